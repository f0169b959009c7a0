"""Write the pages of docs/reference that say what the code says already: python docs/make_reference.py"""

import argparse
import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import gspo
import gspo.objective
from gspo.cli import _parser
from gspo.metrics.definitions import families
from gspo.recipe.published import as_published
from gspo.recipe.schema import recipe_keys
from gspo.recipe.sections import OptimizerConfig, Section

SUITES = "evaluation.suites."
AS_IN_THE_RECIPE = (f"{SUITES}queries.", f"{SUITES}reward.")
FOLDER = Path(__file__).with_name("reference")
NOTE = "<!-- Made by docs/make_reference.py: edit {} instead. -->\n\n"

RECIPE = """# Recipe keys

A recipe is one YAML file. Each section below is a section of it. Any key can be overridden on the command line:
`gspo train RECIPE actor.clip_low=1e-3 reward.0.weight=2`. Values are YAML, with two exceptions: a date is a text,
and `true` is not the number 1.

- If the default of a key is empty, the key is off, or its meaning says which value it takes.
- "As published" means that the paper of `actor.surrogate` or `actor.correction` gives the value, if the recipe leaves
  the key out or sets it to `null`.
- `reward` is a list of functions, and `phases` one of [phases](../guides/phases.md). Each entry has the keys of its
  table: `reward.0.weight`, `reward.1.weight`.
- On the command line, `reward+=file.py:name` adds to a list. So does the next index:
  `reward.1.function=format reward.1.weight=0.5`.
- `evaluation.suites` is a list of [suites](../guides/evaluation.md#suites). Their keys have a table of their own, which
  is also that of a suite's file. A suite's `queries` and `reward` have the keys of the recipe's.
- In every path, `~` is the home directory. Relative paths are looked up [beside the recipe, then in the working
  directory](../guides/data.md#files-and-data-sets).
- There is no key for epochs: `steps` = epochs × rows ÷ `rollout.queries_per_step`. `gspo check` prints the epochs.
- A recipe has at most 10,000 values. Values that YAML aliases repeat count each time.
"""

METRICS = """# Metrics

`metrics.jsonl` holds one line of JSON for each step. [Files of a run](run_directory.md) describes the other files.

- A number that is not finite is written as `null`. So is one that does not exist in a step, because nothing was trained
  or scored in it.
- A name ending in `_by_mini_batch` is a list with the same number for each mini-batch of the step, in order. With
  `actor.epochs` above 1, those of the second pass follow those of the first.
- A name ending in `_by_length` is a list of four numbers, from the shortest quarter of the trained responses to the
  longest. `response/length_quartiles` has the bounds. Equal lengths stay together, so one of the four can be empty.
- [Ratios and clipping](../concepts/ratio_and_clipping.md) and
  [Staleness and mismatch](../concepts/staleness_and_mismatch.md) explain the ideas behind the ratios.
- "Healthy" says how the number looks in a run that goes well. [Reading the diagnoses](../guides/diagnoses.md) says what
  to do if it does not.
"""

COMMAND_LINE = """# Command line

`gspo COMMAND …`, or `python -m gspo COMMAND …`. `gspo COMMAND --help` prints the same.

Exit codes: 0 for success, 2 for input that cannot be used, 128 + n after signal n, and 1 for anything else. Bad input
gets one message, which says what is wrong, where, why and how to fix it.
"""

PYTHON = """# Python API

Everything that a program may rely on. [From Python](../guides/python.md) shows how to use it.
[Rewards](../guides/rewards.md) describes the signature of a reward function.
"""


def pages() -> Mapping[str, str]:
    """The text of each page, by its file name."""
    return {
        "recipe.md": NOTE.format("src/gspo/recipe/sections.py") + RECIPE + _recipe(),
        "metrics.md": NOTE.format("src/gspo/metrics/definitions.yaml") + METRICS + "".join(_metrics()),
        "command_line.md": NOTE.format("src/gspo/command_line.yaml") + COMMAND_LINE + "".join(_commands()),
        "python.md": NOTE.format("the docstrings") + PYTHON + "".join(_python()),
    }


def _recipe() -> str:
    """A table for each section, with a row for every key; of the optimisers that are like the actor's, one for all."""
    rows: dict[str, str] = {}
    shortened: tuple[str, ...] = ()
    for key, field in recipe_keys():
        default, kind, title = field.default, type(field.default), key.partition(".")[0] if "." in key else "run"
        if key.startswith((*shortened, *AS_IN_THE_RECIPE)):
            continue
        if key.startswith(SUITES):
            key, title = key.removeprefix(SUITES), "A suite"
        if isinstance(default, OptimizerConfig) and kind is not OptimizerConfig:
            shortened = (f"{key}.",)
            own = {name: value for name, value in default if value != OptimizerConfig.model_fields[name].default}
            row = f"| `{key}.*` | {', '.join(f'{name} {_shown(value)}' for name, value in own.items())} "
        elif field.description and not isinstance(default, Section):
            published = key.removeprefix("actor.") in as_published({})
            row = f"| `{key}` | {'as published' if published else _shown(default)} "
        else:
            continue
        rows[title] = rows.get(title, "") + row + f"| {_meaning(field)} |\n"
    head = "| key | default | meaning |\n|---|---|---|\n"
    return "".join(f"\n## {'The run' if title == 'run' else title}\n\n{head}{rows[title]}" for title in rows)


def _meaning(field: FieldInfo) -> str:
    """The description, and the values that a key can have where the description does not name them."""
    choices = [f"`{choice}`" for choice in _choices(field.annotation) if isinstance(choice, str)]
    unnamed = [choice for choice in choices if choice not in (field.description or "")]
    listed = f" Values: {', '.join(choices)}." if unnamed and len(choices) > 1 else ""
    return f"{field.description}{listed}"


def _shown(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(map(_shown, default))
    if isinstance(default, int | float):
        return re.sub(r"e-0", "e-", f"{default:g}") if isinstance(default, float) else str(default)
    return f"`{default}`" if isinstance(default, str) else ""


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is tuple:
        yield from _choices(get_args(annotation)[0])


def _metrics() -> Iterator[str]:
    for family in families():
        yield f"\n## {family.title}\n\n{textwrap.fill(family.about, 120, break_on_hyphens=False)}\n\n"
        yield "| metric | meaning | healthy |\n|---|---|---|\n"
        for name, definition in family.metrics.items():
            yield f"| `{name}` | {_cell(definition.text)} | {_cell(definition.healthy)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _commands() -> Iterator[str]:
    program = _parser()
    yield from _arguments([action for action in program._actions if not isinstance(action, argparse._SubParsersAction)])
    yield from _commands_of(program)


def _commands_of(program: argparse.ArgumentParser) -> Iterator[str]:
    (commands,) = [action for action in program._actions if isinstance(action, argparse._SubParsersAction)]
    for parser in commands.choices.values():
        text, actions = parser.description or "", [*_shown_actions(parser._actions)]
        yield f"\n## {parser.prog}\n\n{text[:1].upper()}{text[1:]}.\n\n"
        if isinstance(actions[0], argparse._SubParsersAction):
            yield from _commands_of(parser)
        else:
            yield f"```text\n{parser.prog} {' '.join(map(_usage, actions))}\n```\n"
            yield from _arguments(actions)


def _shown_actions(actions: Iterable[argparse.Action]) -> Iterator[argparse.Action]:
    return (action for action in actions if not isinstance(action, argparse._HelpAction))


def _arguments(actions: Iterable[argparse.Action]) -> Iterator[str]:
    rows = [f"| `{_usage(action).strip('[]')}` | {_cell(action.help or '')} |\n" for action in _shown_actions(actions)]
    yield from ["\n| argument | meaning |\n|---|---|\n", *rows] if rows else ()


def _usage(action: argparse.Action) -> str:
    """Such as `RUN_DIR …` or `[--step N]`."""
    value = str(action.metavar or "").replace("None", "") if action.nargs != 0 else ""
    words = " ".join([*action.option_strings[-1:], *([value] if value else [])])
    repeated = f"{words} …" if action.nargs in ("*", "+") else words
    is_needed = action.required if action.option_strings else action.nargs != "*"
    return repeated if is_needed else f"[{repeated}]"


def _python() -> Iterator[str]:
    yield "\n## gspo\n"
    for name in gspo.__all__:
        yield f"\n### {name}\n\n```py\n{_stub(getattr(gspo, name))}\n```\n"
    yield f"\n## gspo.objective\n\n{inspect.getdoc(gspo.objective)}\n"
    for name in gspo.objective.__all__:
        yield f"\n### {name}\n\n```py\n{_stub(getattr(gspo.objective, name))}\n```\n"


def _stub(named: Any) -> str:
    """A function as far as its docstring, or a class as far as its last field, as they are written."""
    source = textwrap.dedent(inspect.getsource(named))
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    last = fields[-1] if fields and isinstance(node, ast.ClassDef) else node.body[0]
    return "\n".join(source.splitlines()[node.lineno - 1 : last.end_lineno])


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
