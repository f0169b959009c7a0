"""One run of a study: a base recipe with some of its keys changed, begun from a cold-started model."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml

Overrides = Mapping[str, Any]  # dotted recipe key → value


class Named(Protocol):
    """An arm, or a model that runs begin from."""

    @property
    def name(self) -> str:
        """A part of a file's name."""
        ...


class _RecipesModel:
    name = "recipe"


RECIPES_MODEL = _RecipesModel()  # a run begins from the model that its recipe names, and nothing is cold-started


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: an arm under a condition with a seed."""

    base: Path  # the recipe of which the overrides change keys
    experiment: str  # the folder of its result
    arm: Named
    seed: int
    start: Named = RECIPES_MODEL
    overrides: Overrides  # of the base, but for where the model lies and where the run writes
    cold_overrides: Overrides = field(default_factory=dict)  # that make the base the recipe of the model it begins from

    @property
    def name(self) -> str:
        """Its result's path below the results, without the ending."""
        return f"{self.experiment}/{self.arm.name}_{self.seed}"

    @property
    def digest(self) -> str:
        """Of the recipe and of that of its cold start: a result with another one is stale."""
        return _digest(self.base, self.overrides, self.cold_overrides)

    @property
    def cold_digest(self) -> str:
        """Of the recipe of its cold start."""
        return _digest(self.base, self.cold_overrides)


def from_model(path: Path) -> Overrides:
    """What has a run begin from a model directory."""
    return {
        "model.architecture": None,
        "model.tokenizer": None,
        "model.path": str(path),
        "cold_start.steps": 0,
        "cold_start.demonstrations": None,
    }


def as_arguments(overrides: Overrides) -> list[str]:
    """As the command line of gspo takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]


def _digest(base: Path, *parts: Overrides) -> str:
    """Of the base's content, comments and layout aside, and these."""
    content: Iterable[object] = (yaml.safe_load(base.read_text(encoding="utf-8")), *parts)
    return hashlib.sha256(json.dumps(list(content), sort_keys=True).encode()).hexdigest()[:12]
