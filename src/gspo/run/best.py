"""The best value of a metric so far: what `checkpoint.best` keeps the model of, and what `early_stop` goes by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from gspo.errors import UserError, did_you_mean
from gspo.evaluation.sets import name_of_held_out
from gspo.metrics.definitions import definition_of, families
from gspo.metrics.numbers import is_number
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import EarlyStopConfig


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a metric so far.

    Example: Best(metric="reward/mean", best_is="highest", value=0.7, step=12, misses=2) has had two values since.
    """

    metric: str
    best_is: str  # highest or lowest
    value: float
    step: int
    misses: int = 0  # values since then, none of them a new best


def next_best(
    best: Best | None, line: Mapping[str, Any], metric: str | None, best_is: str, margin: float = 0.0
) -> Best | None:
    """The best after a line of metrics; None where there is none yet. A new best is better by more than the margin."""
    if best is not None and (best.metric, best.best_is) != (metric, best_is):  # the recipe was changed since
        best = None
    if metric is None or not is_number(value := line.get(metric)):
        return best
    if best is None or (value - best.value) * (1 if best_is == "highest" else -1) > margin:
        return Best(metric=metric, best_is=best_is, value=value, step=line["step"])
    return replace(best, misses=best.misses + 1)


def reason_to_stop(best: Best | None, line: Mapping[str, Any], settings: EarlyStopConfig) -> str | None:
    """Say why the run ends early after a line of metrics; None where it goes on."""
    if best is None or not is_number(value := line.get(best.metric)):
        return None
    goal, patience = settings.goal, settings.patience
    if goal is not None and (value >= goal if best.best_is == "highest" else value <= goal):
        return f"early_stop: {best.metric} is {value:g}, and the goal is {goal:g}"
    if patience is not None and best.misses >= patience:
        return f"early_stop: {best.metric} was {best.value:g} at step {best.step}; {best.misses} values were no better"
    return None


def check_watched(recipe: Recipe, sets: Sequence[str]) -> None:
    """Raise UserError for a watched metric that no run of the recipe has; `sets` are beside the held-out one."""
    homes = [f"evaluation/{name}/" for name in (name_of_held_out(recipe), *sets)]
    general = [name for family in families() for name in family.metrics]
    names = [name.replace("evaluation/<set>/", home) for home in homes for name in general]
    for key in ("checkpoint.best", "early_stop.metric"):
        metric = attrgetter(key)(recipe)
        is_of_another_set = metric and metric.startswith("evaluation/") and not metric.startswith(tuple(homes))
        if metric and (definition_of(metric) is None or is_of_another_set):
            fix = did_you_mean(metric, names, "see docs/reference/metrics.md", most=3, cutoff=0.5)
            raise UserError(f"no metric is called {metric}", where=key, fix=fix)
