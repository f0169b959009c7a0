"""The scores on held-out queries among a run's metrics: what they are called, and how they read."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.metrics.numbers import is_number

_PASS, _REWARD = "/pass_at_1", "/reward_mean"


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A score of an evaluated set."""

    label: str  # `pass@1 (held_out)`
    name: str  # of its metric
    error: str  # of the metric that is its standard error over questions


def measures(lines: Iterable[Mapping[str, Any]]) -> list[Measure]:
    """pass@1 of each evaluated set and, wherever it is not the same number, its mean reward."""
    results: dict[str, Measure] = {}
    for line in lines:
        for name in line:
            if name.startswith("evaluation/") and name.endswith(_PASS):
                home = name.removesuffix(_PASS)
                label, reward = home.removeprefix("evaluation/"), home + _REWARD
                results.setdefault(name, Measure(label=f"pass@1 ({label})", name=name, error=f"{home}/standard_error"))
                if is_number(line.get(reward)) and line[reward] != line[name]:
                    error = f"{home}/reward_standard_error"
                    results.setdefault(reward, Measure(label=f"reward ({label})", name=reward, error=error))
    return list(results.values())


def measured(line: Mapping[str, Any], measure: Measure) -> str:
    """Such as `0.514 ± 0.022`; without the error, or without any number, where there is none."""
    if not is_number(line.get(measure.name)):
        return "–"
    error = f" ± {line[measure.error]:.3f}" if is_number(line.get(measure.error)) else ""
    return f"{line[measure.name]:.3f}{error}"
