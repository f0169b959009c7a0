"""How far a run has come: all that a checkpoint holds besides weights, optimiser and random states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.learner.update import MiniBatchReport
from gspo.run.checkpoint.position import Position
from gspo.types import Batch


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters and records of a phase, and what the step under way has come to so far.

    Example: Progress(steps=12, batch=…, reports=(report,)) has made one optimiser step of step 13.
    """

    steps: int = 0  # that are finished
    extra_rounds: int = 0  # of sampling, beyond one a step: so far has the order of the queries moved on
    skipped_in_a_row: int = 0  # updates
    seconds: float = 0.0  # that the run took up to here
    diagnoses: Mapping[str, str] = field(default_factory=dict)  # every sentence so far, by the diagnosis's name
    rollout_files: Mapping[str, Any] = field(default_factory=dict)  # by name: [bytes, SHA-256]
    reference_sha256: str | None = None  # of the reference model's weights, where there is one
    clip_scale: tuple[float, float] | None = None  # of the clip range, where actor.clip_fraction sets it
    # Of the step under way:
    batch: Batch | None = None  # sampled and scored; None: not yet
    reports: tuple[MiniBatchReport, ...] = ()  # of the mini-batches that the batch has been trained on
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def position(self) -> Position:
        """What a checkpoint made now is named by."""
        return Position(self.steps, 0 if self.batch is None else 1 + len(self.reports))
