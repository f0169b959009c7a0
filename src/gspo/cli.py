"""The command line. Nothing heavy is imported before a command runs; command_line.yaml says what each takes."""

import argparse
import json
import os
import platform
import re
import signal
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

from gspo.errors import HAS_LAUNCHER, SILENT, OtherRankError, RunError, Stopped, UserError, printable, writing
from gspo.rank_environment import is_of_others, rank_of_several, world_size

if TYPE_CHECKING:
    from gspo.recipe.schema import Recipe
    from gspo.run.console import Display

_SIGNALLED = 128  # a shell adds it to the number of the signal that ended a program
_FIRST_SECONDS = 10.0  # within which what has started several ranks ends all where rank 0 has ended
_FROM_1 = ("--processes", "--processes-per-node", "--cpus-per-process", "--nodes")  # others: from 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 2 for wrong input, 128 + n after signal n, else 1."""
    code = _exit_code(sys.argv[1:] if arguments is None else arguments)
    if arguments is None and getattr(sys.modules.get("gspo.trackers.send"), "UNFINISHED", None):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # what a tracker's package does at the end, such as waiting for a server, may take minutes
    return code


def _exit_code(arguments: Sequence[str]) -> int:
    options = None
    try:
        options = _parsed(arguments)
        return options.run(options) or 0
    except UserError as error:
        ranks = sys.modules.get("gspo.learner.ranks")
        if rank_of_several() and (ranks is None or ranks.num_ranks() == 1):
            time.sleep(_FIRST_SECONDS)  # rank 0 most often says the same; then this one is ended
        text, code = f"error: {error}", 2
    except OtherRankError:  # others than our launcher, such as srun, take the highest code for the run's
        return SILENT if HAS_LAUNCHER in os.environ else 1
    except RunError as error:
        text, code = f"failed: {error}", 1
    except KeyboardInterrupt as error:  # Stopped: before the run had anything to save
        number = signal.Signals(error.args[0]) if isinstance(error, Stopped) else signal.SIGINT
        text, code = f"ended by {number.name}", _SIGNALLED + number
        if rank_of_several():  # rank 0 says it, or what has started it
            return code
    except SystemExit as error:  # of code that is not gspo's: its exit with 0 would look like success
        if options is None:  # of --help and --version
            raise
        text, code = f"error: code that the recipe names ended the program: SystemExit: {error}", 2
    except BrokenPipeError:  # the reader, such as head, has enough
        from gspo.run.console import drop_output

        drop_output()
        return _SIGNALLED + signal.SIGPIPE
    except Exception as error:
        if rank_of_several() is None:
            raise
        from gspo.launch.ranks import FIX

        traceback.print_exc()
        how = f"ended by {type(error).__name__}: its traceback is above{FIX}"
        text, code = f"failed: rank {rank_of_several()} has {how}", 1
    with suppress(OSError):  # the terminal may be gone
        print(printable(text), file=sys.stderr)
    return code


def _parsed(arguments: Sequence[str]) -> Namespace:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, after: eval "$(register-python-argcomplete gspo)"
        import_module("argcomplete").autocomplete(parser)
    options, rest = parser.parse_known_args(arguments)
    if unknown := [word for word in rest if word.startswith("-") or "overrides" not in options]:
        meant = "overrides" in options and _key_for(unknown[0], options.command, arguments)
        fix = meant or f"see gspo {options.command} --help"
        raise UserError(f"there is no option {unknown[0]!r}", where="command line", fix=fix)
    options.overrides = [*getattr(options, "overrides", ()), *rest]  # argparse leaves those after an option
    return options


def _key_for(option: str, command: str, words: Sequence[str]) -> str | None:
    """Return how that is written here which another program has as an option."""
    from gspo.recipe.faults import hint
    from gspo.recipe.schema import recipe_keys

    name, _, value = option.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), value or next(iter(words[words.index(option) + 1 :]), "VALUE")
    if value.endswith(".yaml") or name.startswith("config"):
        return f"the recipe comes first: gspo {command} {value}"
    meant = f"here it is {name}={value}" if name in dict(recipe_keys()) else hint(name)
    return meant and f"keys follow the recipe as key.subkey=value; {name}: {meant}"


class _Parser(argparse.ArgumentParser):
    """A parser whose messages have the form of all others."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError: what, and the usage."""
        what = message.replace("the following arguments are required", "missing")
        what = re.sub(r"argument COMMAND: invalid choice: ('.*?') \(", r"there is no command \1 (", what)
        raise UserError(what, where="command line", fix=" ".join(self.format_usage().split()))


def _parser() -> argparse.ArgumentParser:
    about = "Reinforcement learning of language models by Group Sequence Policy Optimization."
    versions = f"gspo {version('gspo')}, Python {platform.python_version()}, torch {version('torch')}"
    parser = _Parser(prog="gspo", description=about)
    parser.add_argument("--version", action="version", version=versions, help="print the versions")
    groups = {"": parser.add_subparsers(required=True, metavar="COMMAND")}
    text = Path(__file__).with_name("command_line.yaml").read_text(encoding="utf-8")
    suites = sorted(path.stem for path in Path(__file__).with_name("suites").glob("*.yaml"))
    for name, table in yaml.safe_load(text.replace("{suites}", ", ".join(suites))).items():
        group, _, word = name.rpartition(" ")
        about = table.pop("about")
        description = f"{about}. {table.pop('more')}" if "more" in table else about
        command = groups[group].add_parser(word, help=about, description=description)
        command.set_defaults(command=name, run=_COMMANDS[name.partition(" ")[0]])
        if "commands" in table:
            groups[name] = command.add_subparsers(required=True, metavar=table["commands"])
        else:
            _add_arguments(command, table)
    return parser


def _add_arguments(command: argparse.ArgumentParser, table: dict[str, str]) -> None:
    """Add the arguments of a command, as command_line.yaml has them."""
    required, flags = table.pop("required", "").split(), None
    for usage, meaning in table.items():
        name, _, value = usage.partition(" ")
        if name == "key=value":
            keys: Any = command.add_argument("overrides", nargs="*", default=[], metavar=name, help=meaning)
            keys.completer = _keys  # what argcomplete looks for
        elif not name.startswith("-"):
            command.add_argument("target", nargs="+" if value else None, metavar=name, help=meaning)
        elif not value:
            flags = flags or command.add_mutually_exclusive_group()
            flags.add_argument(name, action="store_true", help=meaning)
        else:
            number = partial(_number, least=int(name in _FROM_1))
            kind = number if value == "N" else Path if name == "--out" else str
            action: Any = "append" if value.endswith("…") else _Once if name == "--data" else "store"
            is_required = name in required
            names = ("-o", name) if name == "--out" else (name,)
            command.add_argument(*names, type=kind, action=action, required=is_required, metavar=value, help=meaning)


class _Once(argparse.Action):
    """An option of which a second value would be taken for a further one: an error."""

    def __call__(self, parser: Any, options: Namespace, value: Any, option_string: str | None = None) -> None:
        """Keep the value."""
        if getattr(options, self.dest) is not None:
            parser.error(f"{option_string} is given twice")
        setattr(options, self.dest, value)


def _number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _keys(prefix: str, **_: object) -> list[str]:
    """The recipe's keys that begin so, for a shell to complete."""
    from gspo.recipe.schema import recipe_keys

    return [f"{name}=" for name, _ in recipe_keys() if name.startswith(prefix)]


def _note(text: str) -> None:
    print(printable(text), flush=True)


def _waiting(name: str) -> AbstractContextManager[Callable[[str], None]]:
    """A block whose name is shown once it takes seconds."""
    from gspo.run.console import Display

    return Display().waiting(name)


def _display(*, is_error: bool = False) -> "Display":
    """A display, once the heavy libraries are loaded; on standard error or not."""
    from rich.console import Console

    from gspo.run.console import Display

    display = Display(Console(stderr=True, highlight=False) if is_error else None)
    with display.waiting("loading torch and transformers"):
        import_module("gspo.train")
    return display


def _given(options: Namespace) -> dict[str, Any]:
    """Return those of a command's own options that are given: the others have defaults where they are used."""
    others = ("command", "target", "overrides", "print", "run")
    return {key: value for key, value in vars(options).items() if value is not None and key not in others}


def _get(options: Namespace) -> None:
    with _waiting("getting the model, and proving it"):
        _note("\n".join(import_module("gspo.get").get(options.target, options.out)))


def _merge(options: Namespace) -> None:
    with _waiting("merging the adapter"):
        _note("\n".join(import_module("gspo.merge").merge(Path(options.target), options.out)))


def _init(options: Namespace) -> None:
    from gspo.init import init

    with _waiting("reading the data, and the model's tokenizer and configuration"):
        _note("\n".join(init(**_given(options))))


def _import(options: Namespace) -> None:
    import_recipe = import_module("gspo.importing.write").import_recipe
    text, lines = import_recipe(Path(options.target), options.overrides, (options.out or Path()).parent)
    if options.out is None:
        print(printable("\n".join(lines)), file=sys.stderr)
        _note(text.rstrip("\n"))
        return
    fix = "name another file after -o"
    with writing(options.out, fix), options.out.open("x", encoding="utf-8") as file:
        file.write(text)
    _note("\n".join([*lines, f"written: {options.out}; see it by: gspo check {options.out}"]))


def _loaded(options: Namespace) -> "Recipe":
    """The recipe, and its files are there; nothing heavy is imported, for a mistake is to show at once."""
    from gspo.recipe.files import check_files
    from gspo.recipe.load import load_recipe

    try:
        recipe = load_recipe(options.target, options.overrides)
    except UserError as error:
        raise import_module("gspo.importing.read").fault(options.target, options.overrides) or error from None
    check_files(recipe, options.target)
    return recipe


def _train(options: Namespace) -> int:
    from gspo.run.place import check_place, renamed

    recipe, keys = _loaded(options), options.overrides
    if options.new:
        recipe = renamed(recipe, (lambda _: None) if is_of_others() else _note)
        keys = [*keys, f"name={recipe.name}", _output_dir(recipe.run_dir)]
    elif not options.resume and world_size() == 1:
        check_place(recipe, overwrite=options.overwrite)
    flags = {"resume": options.resume, "overwrite": options.overwrite}
    words = ["train", options.target, *keys, *(f"--{name}" for name, is_set in flags.items() if is_set)]
    return _run(recipe, words, options.processes, **flags)


def _output_dir(path: Path) -> str:
    return f"output_dir={json.dumps(str(path), ensure_ascii=False)}"


def _resume(options: Namespace) -> int:
    from gspo.recipe.load import load_recipe
    from gspo.recipe.sections import path_fault
    from gspo.report.run_files import read_run

    if fault := path_fault(options.target):
        raise UserError(f"this path {fault}", where=options.target)
    directory = Path(options.target)
    home = Path(read_run(directory).last("begun", "resumed").get("working_directory") or Path.cwd())
    if home != Path.cwd() and home.is_dir():
        _note(f"in {home}, where the run was started")
        directory = directory.absolute()
        os.chdir(home)
    if any(key.lstrip("+").startswith("output_dir=") for key in options.overrides):
        fix = "move the directory, then resume it under its new name"
        raise UserError("a run goes on in its own directory", where="output_dir", fix=fix)
    recipe = load_recipe(directory / "recipe.yaml", [*options.overrides, _output_dir(directory)], of_run=True)
    if not recipe.reward or not recipe.queries.has_data:
        fix = "resume it there: gspo.train(recipe, queries=…, reward=…, resume=True)"
        raise UserError("this run took its queries or its reward from Python", where=str(directory), fix=fix)
    return _run(recipe, ["resume", str(directory), *options.overrides], options.processes, resume=True)


def _run(recipe: "Recipe", words: list[str], processes: int | None, **flags: Any) -> int:
    """Run the recipe, in this process or by these words in several."""
    from gspo.launch.ranks import end_with_launcher, run_processes
    from gspo.run.summary import summary

    if processes is not None and processes > 1:
        return run_processes(words, processes)
    end_with_launcher()
    display = _display()
    from gspo.train import train

    outcome = train(recipe, display=display, **flags)
    if is_of_others():
        return 0
    with display.waiting("writing the report"):
        report = _write_report(recipe.run_dir, display.note)
    how: dict[str, Any] = {"signal": outcome.signal, "reason": outcome.reason, "report": report}
    diagnoses = {name: text for name, text in outcome.diagnoses.items() if name not in display.just_shown}
    display.note(summary(outcome.metrics, diagnoses, outcome.model, outcome.seconds, **how))
    return 0 if outcome.signal is None else _SIGNALLED + outcome.signal


def _write_report(run: Path, note: Callable[[str], object]) -> Path | None:
    from gspo.report.page.write import write_report

    try:
        return write_report([run], note=lambda _: None)
    except Exception as error:  # the run is done and saved, whatever is wrong with its page
        note(f"no report is written: {error}; again with: gspo report {run}")
        return None


def _launch(options: Namespace) -> int:
    recipe = _loaded(options)  # here, for a mistake is to show before the job has waited for its turn
    words = ["train", options.target, *options.overrides, "--resume"]  # from its checkpoint, if it has one
    if options.command == "launch local":
        from gspo.launch.ranks import run_processes, with_restarts

        return with_restarts(partial(run_processes, words, options.processes or 1), options.max_failures, _note)
    if options.command == "launch ray":
        from gspo.launch.ray import RayJob, run_on_ray

        return run_on_ray(words, RayJob(**_given(options)), recipe.cluster, _note)
    from gspo.launch.slurm import slurm_script, submit

    script = slurm_script(recipe.name, words, **_given(options))
    if options.print:
        print(script, end="")
    else:
        _note(f"job {(number := submit(script))}; it writes to {recipe.name}-{number}.out and {recipe.run_dir}")
    return 0


def _check(options: Namespace) -> None:
    recipe, display = _loaded(options), _display(is_error=True)  # what reads the lines gets nothing else
    from gspo.check import check

    with display.waiting("loading the recipe's parts") as say:
        for line in check(recipe, say, num_ranks=options.processes or 1, on=options.on):
            _note(line)


def _plan(options: Namespace) -> None:
    from gspo.recipe.load import load_recipe

    recipe = load_recipe(options.target, options.overrides)
    with _waiting("computing"):
        _note("\n".join(import_module("gspo.run.plan").plan(recipe, options.on)))


def _eval(options: Namespace) -> None:
    from gspo.recipe.suites import suite_tree

    targets = [word for word in options.target if not _is_key(word)]
    overrides = [*filter(_is_key, options.target), *options.overrides]
    suites = [suite_tree(name) for names in options.suite for name in names.split(",")]
    if options.data is not None:
        if len(suites) > 1:
            fix = f"say whose it is: {suites[0]['name']}.queries.path={options.data}"
            raise UserError(f"{len(suites)} suites, and --data names one file", where="command line", fix=fix)
        overrides.insert(0, f"queries.path={json.dumps(options.data, ensure_ascii=False)}")
    if not targets:
        raise UserError("name a model directory, a hub id or a run", where="command line", fix="gspo eval MODEL …")
    display = _display()
    from gspo.evaluate import evaluate, evaluation_directories, evaluation_recipe
    from gspo.model.inputs import quiet_transformers
    from gspo.model.load import load_config
    from gspo.report.evaluation import write_evaluation_page
    from gspo.run.summary import comparison_line, evaluation_lines

    quiet_transformers()
    for target in targets:  # a mistake shows before anything takes time
        load_config(evaluation_recipe(target, suites, overrides).model)
    pairs = zip(targets, evaluation_directories(targets, options.out), strict=True)
    done = [evaluate(target, suites, overrides=overrides, out=out, display=display) for target, out in pairs]
    asked = [suite["name"] for suite in suites]
    for evaluation in done:
        _note("\n".join(evaluation_lines(evaluation.tree, asked)))
        _note(f"every response: {evaluation.directory / 'evaluation.json'}")
    for other in done[1:]:
        for name in asked:
            _note(comparison_line(done[0].tree, other.tree, name))
    of_all = Path(options.out or "evaluations", "compared.html")
    page = of_all if len(done) > 1 else done[0].directory / "evaluation.html"
    with display.waiting("writing the page"):
        _note(f"page: {write_evaluation_page([evaluation.directory for evaluation in done], page)}")


def _is_key(word: str) -> bool:
    """Tell whether it is key=value: a path may have a `=`, too."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key and not os.path.lexists(word)


def _report(options: Namespace) -> None:
    from gspo.report.page.write import write_report

    with _waiting("reading the run and writing its page"):
        write_report([*map(Path, options.target)], options.out, note=_note)


def _view(options: Namespace) -> None:
    from gspo.report.view import view

    view([*map(Path, options.target)], options.port or 0, note=_note, waiting=_waiting)


def _show(options: Namespace) -> None:
    from gspo.report.show import show

    waiting = _waiting if sys.stdout.isatty() else nullcontext  # what reads the lines gets nothing else
    show(Path(options.target), step=options.step, query=options.query, as_json=options.json, waiting=waiting)


def _track(options: Namespace) -> None:
    from gspo.track import track

    with _waiting("sending the run"):
        track(Path(options.target), options.to, note=_note)


_COMMANDS: dict[str, Callable[[Namespace], int | None]] = {  # by the first word of their names in command_line.yaml
    "get": _get,
    "merge": _merge,
    "init": _init,
    "import": _import,
    "train": _train,
    "resume": _resume,
    "launch": _launch,
    "eval": _eval,
    "check": _check,
    "plan": _plan,
    "report": _report,
    "view": _view,
    "show": _show,
    "track": _track,
}

if __name__ == "__main__":
    sys.exit(main())
