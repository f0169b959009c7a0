"""How far a run has come: all that a checkpoint holds besides weights, optimiser and random states."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.learner.old_policy import Old
from gspo.learner.update import MiniBatchReport
from gspo.reward.score import Scored
from gspo.types import Appraisal, Group, Score

Judged = tuple[Group, tuple[Score, ...]]
_NAME = re.compile(r"step_(\d+)(?:_batch|_update_(\d+))?")


@dataclass(frozen=True, order=True)
class Position:
    """How far a phase of a run has come; it names and orders the checkpoints.

    Example: Position(12, 3) is `step_000012_update_2`. 12 steps are finished, step 13 has its batch and has made two of
    its optimiser steps.
    """

    steps: int  # that are finished
    stage: int = 0  # 1 once the next step's batch is sampled and scored, and one more for each optimiser step on it

    @property
    def name(self) -> str:
        """The name of a checkpoint made here: `step_000012`, `step_000012_batch` or `step_000012_update_2`."""
        return f"step_{self.steps:06d}" + ("", "_batch", f"_update_{self.stage - 1}")[min(self.stage, 2)]

    def __str__(self) -> str:
        within = ("", ", batch", f", update {self.stage - 1}")[min(self.stage, 2)]
        return f"step {self.steps + bool(self.stage)}{within}"


def position_of(name: str) -> Position | None:
    """The position of a checkpoint's name; None for any other name, such as `step_99`."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    position = Position(int(match[1]), 1 + int(match[2]) if match[2] else int(name.endswith("_batch")))
    return position if position.name == name else None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a step trains on, and what it has sampled besides."""

    groups: tuple[Group, ...]
    scored: Scored  # of those groups; the seconds are of all calls
    dropped: tuple[Judged, ...] = ()  # groups of equal rewards that others have taken the place of


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters and records of a phase, and what the stages of the step under way have given so far.

    Example: Progress(steps=12, collected=…, old=…, reports=(first,)) has made one optimiser step of step 13.
    """

    steps: int = 0  # that are finished
    extra_rounds: int = 0  # of sampling, beyond one a step: so far has the order of the queries moved on
    skipped_in_a_row: int = 0  # updates
    seconds: float = 0.0  # that the run took up to here
    diagnoses: Mapping[str, str] = field(default_factory=dict)  # every sentence so far, by the diagnosis's name
    rollout_files: Mapping[str, Any] = field(default_factory=dict)  # by name: [bytes, SHA-256]
    reference_sha256: str | None = None  # of the reference model's weights, where there is one
    clip_scale: tuple[float, float] | None = None  # of the clip range, where actor.clip_fraction sets it
    # The step under way:
    collected: Collected | None = None  # None: it is not sampled and scored yet
    appraisal: Appraisal = field(default_factory=Appraisal)  # computed before the first mini-batch, as the next
    old: Mapping[int, Old] = field(default_factory=dict)
    reports: tuple[MiniBatchReport, ...] = ()  # of the mini-batches that are trained on
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """What a checkpoint made now is named by."""
        return Position(self.steps, 0 if self.collected is None else 1 + len(self.reports))
