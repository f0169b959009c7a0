"""The runs of the study: which there are, and the recipe of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
)
from studies.harness.jobs import Job, Overrides

BASE = Path(__file__).with_name("base.yaml")
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a making of the study departs from arms.py: to try it out in little time."""

    seeds: int | None = None  # the first so many of each experiment only
    extra: Overrides = field(default_factory=dict)  # changed in every recipe


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
            base=BASE,
            experiment=experiment,
            arm=arm,
            seed=seed,
            start=start,
            overrides=overrides,
            cold_overrides=cold_overrides,
        )
