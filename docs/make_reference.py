"""Write the table of all keys in docs/guide.md from the recipe's own description: python docs/make_reference.py"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from gspo.recipe.published import AS_PUBLISHED
from gspo.recipe.schema import recipe_keys
from gspo.recipe.sections import OptimizerConfig, Section

GUIDE = Path(__file__).with_name("guide.md")
HEAD = "| key | default | meaning |\n|---|---|---|\n"


def table() -> str:
    """The Markdown table with a row for every key; of the optimisers that are like the actor's, one for all keys."""
    rows = HEAD
    shortened = ()
    for key, field in recipe_keys():
        default, kind = field.default, type(field.default)
        if key.startswith(shortened):
            continue
        if isinstance(default, OptimizerConfig) and kind is not OptimizerConfig:
            shortened = (f"{key}.",)
            own = {name: value for name, value in default if value != OptimizerConfig.model_fields[name].default}
            changes = ", ".join(f"{name} {shown(value)}" for name, value in own.items())
            rows += f"| `{key}.*` | {changes} | {field.description} |\n"
        elif field.description and not isinstance(default, Section):
            published = key.removeprefix("actor.") in AS_PUBLISHED
            rows += f"| `{key}` | {'as published' if published else shown(default)} | {meaning(field)} |\n"
    return rows


def meaning(field: FieldInfo) -> str:
    """The description, and the values that a key can have where the description does not name them."""
    choices = [f"`{choice}`" for choice in _choices(field.annotation) if isinstance(choice, str)]
    unnamed = [choice for choice in choices if choice not in (field.description or "")]
    listed = f" Values: {', '.join(choices)}." if unnamed and len(choices) > 1 else ""
    return f"{field.description}{listed}"


def shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, tuple):
        return ", ".join(map(shown, default))
    if isinstance(default, int | float):
        return re.sub(r"e-0", "e-", f"{default:g}") if isinstance(default, float) else str(default)
    return f"`{default}`" if isinstance(default, str) else ""


def _choices(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) is tuple:
        yield from _choices(get_args(annotation)[0])


def with_table(text: str) -> str:
    """The guide with its present table of keys."""
    before, after = text.split(HEAD)
    return before + table() + re.sub(r"\A(\|.*\n)*", "", after)


if __name__ == "__main__":
    GUIDE.write_text(with_table(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
