"""Runs side by side: which are seeds of one arm, and where the arms' recipes differ."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from gspo.report.run_files import RunFiles

_SAME_ARM = ("name", "seed", "output_dir", "checkpoint", "report")  # change nothing that is learned but by chance


MOST_STEPS = 2000  # a curve is drawn of; a longer run is drawn by every second, third, … step


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """Runs of one recipe, which differ in nothing but the seed."""

    label: str
    runs: Sequence[RunFiles]

    @cached_property
    def drawn(self) -> Sequence[tuple[int, Sequence[Mapping[str, Any]]]]:
        """The steps to draw, with the line of each run that has one.

        Of very many steps, evenly spread ones, and all with an evaluation.
        """
        lines: dict[int, list[Mapping[str, Any]]] = {}
        for run in self.runs:
            for line in run.lines:
                lines.setdefault(line["step"], []).append(line)
        steps = sorted(lines)
        every = math.ceil(len(steps) / MOST_STEPS)

        def is_kept(place: int, step: int) -> bool:
            evaluated = any(name.startswith("evaluation/") for line in lines[step] for name in line)
            return place % every == 0 or evaluated or step == steps[-1]

        return [(step, lines[step]) for place, step in enumerate(steps) if is_kept(place, step)]

    @property
    def num_steps(self) -> int:
        """That any of the runs has a line of."""
        return len({line["step"] for run in self.runs for line in run.lines})


def arms_of(runs: Sequence[RunFiles]) -> list[Arm]:
    """The runs by recipe, in the order given, under labels that tell them apart."""
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        kept = {key: value for key, value in run.recipe.items() if key not in _SAME_ARM}
        found.setdefault(json.dumps(_leaves(kept), sort_keys=True), []).append(run)
    labels = [_label(members) for members in found.values()]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({members[0].path})" for label, members in zip(labels, found.values(), strict=True)]
    return [Arm(label=label, runs=members) for label, members in zip(labels, found.values(), strict=True)]


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Each key whose value is not the same in all arms' recipes, with the value of each."""
    recipes = [_leaves(arm.runs[0].recipe) for arm in arms]
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe) if key.split(".")[0] != "name"]
    rows = [(key, [recipe.get(key, "–") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if key.split(".")[0] not in _SAME_ARM and len(set(values)) > 1]


def _label(runs: Sequence[RunFiles]) -> str:
    if len(runs) == 1:
        return runs[0].name
    letters = takewhile(lambda column: len(set(column)) == 1, zip(*(run.name for run in runs), strict=False))
    common = "".join(column[0] for column in letters).rstrip("-_.0123456789")
    num_seeds = len({str(run.recipe.get("seed")) for run in runs})
    count = f"{len(runs)} seeds" if num_seeds == len(runs) else f"{len(runs)} runs of {num_seeds} seed(s)"
    return f"{common or runs[0].name} ({count})"


def _leaves(tree: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys with their values as text."""
    pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else ()
    found: dict[str, str] = {}
    for key, value in pairs:
        name = f"{prefix}{key}"
        nested = isinstance(value, Mapping | list) and value
        found |= _leaves(value, f"{name}.") if nested else {name: json.dumps(value, default=str)}
    return found
