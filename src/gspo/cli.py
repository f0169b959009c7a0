"""The command line; nothing heavy is imported before a command runs."""

import argparse
import sys
from collections.abc import Sequence

from gspo.errors import RunError, UserError

_INTERRUPTED = 130  # what a shell reports for a program ended by SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0 done, 2 the input is wrong, 1 anything else, 130 after Ctrl-C."""
    options, rest = _parser().parse_known_args(arguments)
    overrides = [*options.overrides, *rest]
    try:
        for override in overrides:
            if override.startswith("-") or "=" not in override:
                mend = f"write {override.lstrip('-')}" if "=" in override else None
                raise UserError(f"{override!r} is not of the form key.subkey=value", where="command line", mend=mend)
        return int(options.command(options.recipe, overrides))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gspo", description="Reinforcement learning of language models by Group Sequence Policy Optimization."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in [
        ("train", _train, "run a recipe: cold start, GSPO, evaluation"),
        ("check", _check, "validate a recipe, its data, model and rewards without training"),
    ]:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("recipe", help="a YAML file, such as recipes/arithmetic.yaml")
        sub.add_argument(
            "overrides", nargs="*", metavar="key=value", help="dotted recipe keys, such as actor.clip_low=1e-3"
        )
        sub.set_defaults(command=command)
    return parser


def _train(path: str, overrides: Sequence[str]) -> int:
    from gspo.config_file import load_recipe
    from gspo.report.display import Display
    from gspo.report.summary import summary

    recipe = load_recipe(path, overrides)
    display = Display()
    from gspo.train import train

    outcome = train(recipe, display=display)
    display.note(
        summary(outcome.metrics, outcome.diagnoses, outcome.model, outcome.seconds, interrupted=outcome.interrupted)
    )
    return _INTERRUPTED if outcome.interrupted else 0


def _check(path: str, overrides: Sequence[str]) -> int:
    from gspo.config_file import load_recipe

    recipe = load_recipe(path, overrides)
    from gspo.check import check

    for line in check(recipe):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
