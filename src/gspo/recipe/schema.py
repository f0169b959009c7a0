"""The recipe: one YAML file, one complete run. Every section is typed, frozen and closed to unknown keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Self, get_args

from pydantic import model_validator
from pydantic.fields import FieldInfo

from gspo.recipe.rules import refusals
from gspo.recipe.sections import RecipeKeys, Section, refusal


class Recipe(RecipeKeys):
    """A complete run; docs/reference/recipe.md lists every key."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if sentences := refusals(self):
            raise refusal("\n  ".join(sentences))
        return self

    @property
    def run_dir(self) -> Path:
        """Return where everything about this run is written."""
        return Path(self.output_dir or f"runs/{self.name}")


def recipe_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name, a section before its own keys, the places in a list left out."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from recipe_keys(kind, f"{prefix}{name}.")
