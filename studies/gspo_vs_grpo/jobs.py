"""The runs of the study: which there are, and the recipe of each."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from studies.gspo_vs_grpo.arms import (
    ARMS,
    COLD,
    FACTORS,
    MAIN,
    MOE_ARMS,
    STARTS,
    TUNE_SEEDS,
    Arm,
    ClipRange,
    Condition,
    Overrides,
    Start,
)

BASE = Path(__file__).with_name("base.yaml")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a making of the study departs from arms.py: to try it out in little time."""

    seeds: int | None = None  # the first so many of each experiment only
    extra: Overrides = field(default_factory=dict)  # changed in every recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: an arm under a condition with a seed."""

    experiment: str  # the folder of its result
    arm: Arm
    seed: int
    start: Start
    overrides: Overrides  # of base.yaml, but for where the model lies and where the run writes
    cold_overrides: Overrides  # that make base.yaml the recipe of the model it begins from

    @property
    def name(self) -> str:
        """Its result's path below the results, without the ending."""
        return f"{self.experiment}/{self.arm.name}_{self.seed}"

    @property
    def digest(self) -> str:
        """Of the recipe and of that of its cold start: a result with another one is stale."""
        return _digest(self.overrides, self.cold_overrides)

    @property
    def cold_digest(self) -> str:
        """Of the recipe of its cold start."""
        return _digest(self.cold_overrides)


def tuning_jobs(variant: Variant) -> Iterator[Job]:
    """Every arm with every clip range of its sweep."""
    for arm in ARMS:
        for name, clip in arm.clips.items():
            yield from _jobs(f"tune/{name}", arm, clip, TUNE_SEEDS, MAIN, variant)


def main_jobs(clips: Mapping[str, ClipRange], variant: Variant) -> Iterator[Job]:
    """Every arm with the clip range chosen for it."""
    for arm in ARMS:
        yield from _jobs(MAIN.name, arm, clips[arm.name], MAIN.seeds, MAIN, variant)


def factor_jobs(clips: Mapping[str, ClipRange], variant: Variant) -> Iterator[Job]:
    """Every mixture-of-experts arm under every condition."""
    for condition in FACTORS:
        for arm in MOE_ARMS:
            yield from _jobs(f"factors/{condition.name}", arm, clips[arm.name], condition.seeds, condition, variant)


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


def _jobs(
    experiment: str, arm: Arm, clip: ClipRange, seeds: Sequence[int], condition: Condition, variant: Variant
) -> Iterator[Job]:
    start = STARTS[condition.start if arm.model == "moe" else arm.model]
    for seed in seeds[: variant.seeds]:
        overrides = {
            **start.task,
            "seed": seed,
            "actor.importance_sampling_level": arm.level,
            "actor.clip_low": clip[0],
            "actor.clip_high": clip[1],
            "actor.routing_replay": condition.replay if arm.replays else "none",
            **condition.overrides,
            **variant.extra,
        }
        cold_overrides = {**COLD, **start.task, **start.cold, **variant.extra}
        yield Job(
            experiment=experiment,
            arm=arm,
            seed=seed,
            start=start,
            overrides=overrides,
            cold_overrides=cold_overrides,
        )


def _digest(*parts: Overrides) -> str:
    """Of base.yaml's content, comments and layout aside, and these."""
    content: Iterable[object] = (yaml.safe_load(BASE.read_text(encoding="utf-8")), *parts)
    return hashlib.sha256(json.dumps(list(content), sort_keys=True).encode()).hexdigest()[:12]
