"""The command line; nothing heavy is imported before a command runs."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gspo.errors import RunError, UserError, printable

if TYPE_CHECKING:
    from gspo.recipe.schema import Recipe

_NICENESS = 10
_SIGNALLED = 128  # what a shell adds to the number of the signal that has ended a program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 the input is wrong, 1 anything else, 128 + n
    after signal n."""
    options, rest = _parser().parse_known_args(arguments)
    overrides = [*(options.overrides or ()), *rest]
    try:
        if options.overrides is None and rest:
            raise UserError(f"there is no option {rest[0]!r}", where="command line", fix="see --help")
        for override in overrides:
            if override.startswith("-") or "=" not in override:
                fix = f"write {override.lstrip('-')}" if "=" in override else None
                raise UserError(f"{override!r} is not of the form key.subkey=value", where="command line", fix=fix)
        return int(options.command(options, overrides))
    except UserError as error:
        return _failed(f"error: {error}", 2)
    except RunError as error:
        return _failed(f"failed: {error}", 1)
    except KeyboardInterrupt:
        return _failed("ended by Ctrl-C", _SIGNALLED + signal.SIGINT)
    except SystemExit as error:  # of code that is not gspo's: an exit with 0 would say that all is done
        return _failed(f"error: code that the recipe names ended the program: SystemExit: {error}", 2)
    except BrokenPipeError:  # whoever read along, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return _SIGNALLED + signal.SIGPIPE


def _failed(text: str, code: int) -> int:
    with suppress(OSError):  # the terminal may be gone
        print(printable(text), file=sys.stderr)
    return code


def _note(text: str) -> None:
    print(printable(text), flush=True)


def _parser() -> argparse.ArgumentParser:
    text = "Reinforcement learning of language models by Group Sequence Policy Optimization."
    parser = argparse.ArgumentParser(prog="gspo", description=text)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    a_recipe, a_run = "a YAML file, such as recipes/arithmetic.yaml", "its directory, such as runs/arithmetic"

    def add(name: str, command: Callable[..., int], text: str, target: str, **settings: Any) -> Callable[..., Any]:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command, overrides=None)
        about = a_recipe if target == "RECIPE" else a_run
        added.add_argument("run" if settings else "target", metavar=target, help=about, **settings)
        if not settings:
            text = "dotted recipe keys, such as actor.clip_low=1e-3"
            added.add_argument("overrides", nargs="*", metavar="key=value", help=text)
        return added.add_argument

    option = add("train", _train, "run a recipe: cold start, reinforcement learning, evaluation", "RECIPE")
    text = "go on with the run in the recipe's directory; from the start where there is none"
    option("--resume", action="store_true", help=text)
    add("resume", _resume, "go on with a run that has ended before its time", "RUN_DIR")
    add("check", _check, "validate a recipe, its data, model and rewards without training", "RECIPE")
    text = "write one HTML page with the curves and samples of one run, or several"
    option = add("report", _report, text, "RUN_DIR", nargs="+", type=Path)
    text = "the file to write; default: report.html in the run's directory, of several runs compared.html in this one"
    option("--out", metavar="FILE", type=Path, help=text)
    option("--watch", action="store_true", help="write it again whenever a run has gone on, until all have ended")
    option = add("show", _show, "print a group's responses, with rewards and ratios", "RUN_DIR", type=Path)
    option("--step", type=int, metavar="N", help="default: the last one that has it")
    option("--query", metavar="ID", help="default: the step's first one")
    option("--json", action="store_true", help="one line a response, as rollouts/ has it")
    option = add(
        "track", _track, "send what a run has written to its trackers, from where they are", "RUN_DIR", type=Path
    )
    text = "tensorboard, trackio or wandb, once or more; default: the recipe's report.trackers"
    option("--to", action="append", metavar="TRACKER", help=text)
    option("--follow", action="store_true", help="until the run has ended")
    return parser


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.recipe.load import load_recipe

    return _run(load_recipe(options.target, overrides), resume=options.resume)


def _resume(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.recipe.load import load_recipe
    from gspo.recipe.sections import path_fault

    if fault := path_fault(options.target):
        raise UserError(f"this path {fault}", where=options.target)
    directory = Path(options.target)
    if (directory / "manifest.json").is_file():
        run = next(path for path in directory.parents if (path / "history.jsonl").exists() or path == path.parent)
        fix = f"gspo resume {run}: it goes on from the newest whole one"
        raise UserError("this is a checkpoint, not a run", where=str(directory), fix=fix)
    from gspo.run.resume import not_a_run, working_directory_of

    if not (directory / "recipe.yaml").is_file():
        raise not_a_run(directory)
    home = working_directory_of(directory)
    if home is not None and home != Path.cwd() and home.is_dir():
        _note(f"in {home}, where the run was begun")
        directory = directory.absolute()
        os.chdir(home)
    if any(override.lstrip("+").startswith("output_dir=") for override in overrides):
        fix = "move the directory, then resume it under its new name"
        raise UserError("a run goes on in its own directory", where="output_dir", fix=fix)
    recipe = load_recipe(directory / "recipe.yaml", [*overrides, f"output_dir={json.dumps(str(directory))}"])
    if not recipe.reward or not (recipe.queries.path or recipe.queries.procedural):
        fix = "resume it there: gspo.train(recipe, queries=…, reward=…, resume=True)"
        raise UserError("this run took its queries or its reward from Python", where=str(directory), fix=fix)
    return _run(recipe, resume=True)


def _run(recipe: "Recipe", *, resume: bool) -> int:
    from gspo.run.console import Display
    from gspo.run.summary import summary
    from gspo.train import train

    display = Display()
    outcome = train(recipe, display=display, resume=resume)
    report = _write_report(recipe.run_dir, display.note)
    results = outcome.metrics, outcome.diagnoses, outcome.model, outcome.seconds
    display.note(summary(*results, signal=outcome.signal, report=report))
    return 0 if outcome.signal is None else _SIGNALLED + outcome.signal


def _write_report(run: Path, note: Callable[[str], object]) -> Path | None:
    from gspo.report.page.write import write_report

    try:
        return write_report([run], note=lambda _: None)
    except Exception as error:  # the run is done and saved, whatever there is to say of its page
        note(f"no report is written: {error}; again with: gspo report {run}")
        return None


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.recipe.load import load_recipe

    recipe = load_recipe(options.target, overrides)
    from gspo.check import check

    for line in check(recipe):
        _note(line)
    return 0


def _report(options: argparse.Namespace, _: Sequence[str]) -> int:
    from gspo.report.page.write import watch, write_report

    if options.watch:
        os.nice(_NICENESS)  # the cores are for the run that is watched
    (watch if options.watch else write_report)(options.run, options.out, note=_note)
    return 0


def _show(options: argparse.Namespace, _: Sequence[str]) -> int:
    from gspo.report.show import show

    show(options.run, step=options.step, query=options.query, as_json=options.json)
    return 0


def _track(options: argparse.Namespace, _: Sequence[str]) -> int:
    from gspo.trackers.track import track

    track(options.run, options.to, follow=options.follow, note=_note)
    return 0


if __name__ == "__main__":
    sys.exit(main())
