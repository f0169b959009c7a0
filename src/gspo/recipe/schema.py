"""The recipe: one YAML file, one complete run. Every section is typed, frozen and closed to unknown keys."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import model_validator
from pydantic.fields import FieldInfo

from gspo.recipe.rules import refusals
from gspo.recipe.sections import RecipeKeys, Section, refusal

S = TypeVar("S", bound=Section)


class Recipe(RecipeKeys):
    """A complete run; docs/reference/recipe.md lists every key."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        sentences = refusals(self)
        for index, recipe in enumerate(() if sentences else self.recipes_of_phases):
            sentences += (f"in phases.{index}: {sentence}" for sentence in refusals(recipe))
        if sentences:
            raise refusal("\n  ".join(sentences))
        return self

    def at(self, step: int, begun: int = 0) -> Self:
        """The recipe of a step, with what the phases set that have begun by then: at least the first `begun`."""
        return (self, *self.recipes_of_phases)[self.num_begun(step, begun)]

    def num_begun(self, step: int, begun: int = 0) -> int:
        """The number of phases that have begun by a step, at least `begun`: with one, all before it have begun."""
        begins = (step + 1 if phase.from_step is None else phase.from_step for phase in self.phases)
        return max([begun, *(number for number, first in enumerate(begins, 1) if first <= step)])

    @property
    def recipes_of_phases(self) -> tuple[Self, ...]:
        """The recipe of each phase."""
        recipes = [self]
        for phase in self.phases:
            before, weights = recipes[-1], phase.reward_weights
            rewards = [own.model_copy(update={"weight": weights.get(own.name, own.weight)}) for own in before.reward]
            recipes.append(_with(before, phase).model_copy(update={"reward": tuple(rewards)}))
        return tuple(recipes[1:])

    @property
    def at_longest(self) -> Self:
        """The recipe of the first phase whose responses may be the longest: what the run must have room for."""
        return max((self, *self.recipes_of_phases), key=lambda recipe: recipe.rollout.max_new_tokens)

    @property
    def length_key(self) -> str:
        """The key that sets the length of the longest responses."""
        lengths = {"": self.rollout.max_new_tokens}
        lengths |= {f"phases.{n}.": phase.rollout.max_new_tokens or 0 for n, phase in enumerate(self.phases)}
        return f"{max(lengths, key=lengths.__getitem__)}rollout.max_new_tokens"

    @property
    def run_dir(self) -> Path:
        """Return where everything about this run is written."""
        return Path(self.output_dir or f"runs/{self.name}")


def _with(section: S, changes: Section) -> S:
    """The section with the values of the changes that are not None, in sections within it, too."""
    update = dict[str, Any]()
    for name in type(section).model_fields.keys() & type(changes).model_fields.keys():
        value, before = getattr(changes, name), getattr(section, name)
        if value is not None:
            update[name] = _with(before, value) if isinstance(value, Section) else value
    return section.model_copy(update=update)


def recipe_keys(section: type[Section] = Recipe, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key by its dotted name, a section before its own keys, the places in a list left out."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                yield from recipe_keys(kind, f"{prefix}{name}.")
