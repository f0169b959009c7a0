"""Runs side by side: which runs are seeds of one arm, and where the recipes of the arms differ."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix

from gspo.recipe.yaml_text import leaves
from gspo.report.run_files import RunFiles

_SAME_ARM = ("name", "seed", "output_dir", "checkpoint", "report")  # keys that change nothing about what is learned


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """Runs of the same recipe, which differ in nothing but the seed."""

    label: str
    runs: Sequence[RunFiles]


def arms_of(runs: Sequence[RunFiles]) -> list[Arm]:
    """The runs by recipe, in the order given, under labels that tell them apart."""
    by_recipe: dict[str, list[RunFiles]] = {}
    for run in runs:
        kept = {key: value for key, value in run.recipe.items() if key not in _SAME_ARM}
        by_recipe.setdefault(json.dumps(leaves(kept), sort_keys=True), []).append(run)
    labels = [_label(members) for members in by_recipe.values()]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({members[0].path})" for label, members in zip(labels, by_recipe.values(), strict=True)]
    return [Arm(label=label, runs=members) for label, members in zip(labels, by_recipe.values(), strict=True)]


def differences(arms: Sequence[Arm]) -> list[tuple[str, list[str]]]:
    """Each key whose value is not the same in the recipes of all arms, with the value of each arm."""
    recipes = [leaves(arm.runs[0].recipe) for arm in arms]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    rows = [(key, [recipe.get(key, "–") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if key.split(".")[0] not in _SAME_ARM and len(set(values)) > 1]


def _label(runs: Sequence[RunFiles]) -> str:
    if len(runs) == 1:
        return runs[0].name
    common = commonprefix([run.name for run in runs]).rstrip("-_.0123456789")  # noqa: RUF071 (names, not paths)
    num_seeds = len({str(run.recipe.get("seed")) for run in runs})
    count = f"{len(runs)} seeds" if num_seeds == len(runs) else f"{len(runs)} runs of {num_seeds} seed(s)"
    return f"{common or runs[0].name} ({count})"
