"""The command line; nothing heavy is imported before a command runs."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gspo.errors import RunError, UserError

if TYPE_CHECKING:
    from gspo.config import Recipe

_SIGNALLED = 128  # what a shell adds to the number of the signal that has ended a program


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 the input is wrong, 1 anything else, 128 + n
    after signal n."""
    options, rest = _parser().parse_known_args(arguments)
    overrides = [*options.overrides, *rest]
    try:
        for override in overrides:
            if override.startswith("-") or "=" not in override:
                mend = f"write {override.lstrip('-')}" if "=" in override else None
                raise UserError(f"{override!r} is not of the form key.subkey=value", where="command line", mend=mend)
        return int(options.command(options, overrides))
    except UserError as error:
        return _said(f"error: {error}", 2)
    except RunError as error:
        return _said(f"failed: {error}", 1)
    except KeyboardInterrupt:
        return _SIGNALLED + signal.SIGINT
    except BrokenPipeError:  # whoever read along, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return _SIGNALLED + signal.SIGPIPE


def _said(text: str, code: int) -> int:
    with suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo", description="Reinforcement learning of language models by Group Sequence Policy Optimization."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    a_recipe = "a YAML file, such as recipes/arithmetic.yaml"
    for name, command, text, what in [
        ("train", _train, "run a recipe: cold start, reinforcement learning, evaluation", a_recipe),
        (
            "resume",
            _resume,
            "go on with a run that has ended before its time",
            "its directory, such as runs/arithmetic",
        ),
        ("check", _check, "validate a recipe, its data, model and rewards without training", a_recipe),
    ]:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("target", metavar="RUN_DIR" if name == "resume" else "RECIPE", help=what)
        sub.add_argument(
            "overrides", nargs="*", metavar="key=value", help="dotted recipe keys, such as actor.clip_low=1e-3"
        )
        if name == "train":
            text = "go on with the run in the recipe's directory; from the start where there is none"
            sub.add_argument("--resume", action="store_true", help=text)
        sub.set_defaults(command=command)
    return parser


def _train(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.config_file import load_recipe

    return _run(load_recipe(options.target, overrides), resume=options.resume)


def _resume(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.config_file import load_recipe

    directory = Path(options.target)
    if (directory / "manifest.json").is_file():
        mend = f"gspo resume {directory.parent.parent}: it goes on from the newest whole one"
        raise UserError("this is a checkpoint, not a run", where=str(directory), mend=mend)
    from gspo.resume import home_of, not_a_run

    if not (directory / "recipe.yaml").is_file():
        raise not_a_run(directory)
    home = home_of(directory)
    if home is not None and home != Path.cwd() and home.is_dir():
        print(f"in {home}, where the run was begun")
        directory = directory.absolute()
        os.chdir(home)
    if any(override.lstrip("+").startswith("output_dir=") for override in overrides):
        mend = "move the directory, then resume it under its new name"
        raise UserError("a run goes on in its own directory", where="output_dir", mend=mend)
    recipe = load_recipe(directory / "recipe.yaml", [*overrides, f"output_dir={json.dumps(str(directory))}"])
    if not recipe.reward or not (recipe.queries.path or recipe.queries.procedural):
        mend = "resume it there: gspo.train(recipe, queries=…, reward=…, resume=True)"
        raise UserError("this run took its queries or its reward from Python", where=str(directory), mend=mend)
    return _run(recipe, resume=True)


def _run(recipe: "Recipe", *, resume: bool) -> int:
    from gspo.report.display import Display
    from gspo.report.summary import summary
    from gspo.train import train

    display = Display()
    outcome = train(recipe, display=display, resume=resume)
    display.note(summary(outcome.metrics, outcome.diagnoses, outcome.model, outcome.seconds, signal=outcome.signal))
    return 0 if outcome.signal is None else _SIGNALLED + outcome.signal


def _check(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from gspo.config_file import load_recipe

    recipe = load_recipe(options.target, overrides)
    from gspo.check import check

    for line in check(recipe):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
