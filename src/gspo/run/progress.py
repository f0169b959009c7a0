"""How far a run has come: all that a checkpoint holds besides weights, optimiser and random states."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gspo.learner.update import MiniBatchReport
from gspo.run.checkpoint.position import Position, position_in_step
from gspo.types import Batch, Group


@dataclass(kw_only=True)
class InHand:
    """The step under way: what its stages have given so far, under the stages' names."""

    rounds: tuple[Batch, ...] = ()  # of sampling and scoring, that are over
    rollout: tuple[Group, ...] | None = None  # of the round under way
    reward: Batch | None = None  # of the round under way
    appraisal: Batch | None = None  # with what the reference and the critic say
    likelihood: Batch | None = None  # with π_old, and with the stats of the samples trained on so far
    reports: tuple[MiniBatchReport, ...] = ()  # of the mini-batches trained on
    seconds: Mapping[str, float] = field(default_factory=dict)  # by stage


@dataclass(kw_only=True)
class Progress:
    """Counters and records that a resumed run takes up where they were."""

    num_cold_steps: int  # of the cold start's, how many there are to be
    cold_steps: int = 0  # finished
    steps: int = 0  # of reinforcement learning, finished
    extra_rounds: int = 0  # of sampling, beyond one a step: so far has the order of the queries moved on
    skipped_in_a_row: int = 0  # updates
    seconds: float = 0.0  # the run took before this process took it up
    diagnoses: Mapping[str, str] = field(default_factory=dict)  # every one named so far
    rollout_files: Mapping[str, Any] = field(default_factory=dict)  # by name: [bytes, SHA-256]
    reference_sha256: str | None = None  # of the reference model's weights; None: not settled yet
    clip_scale: tuple[float, float] | None = None  # of the clip range, where actor.clip_fraction sets it
    in_hand: InHand = field(default_factory=InHand)

    @property
    def in_cold_start(self) -> bool:
        """Whether supervised steps are left."""
        return self.cold_steps < self.num_cold_steps

    @property
    def position(self) -> Position:
        """What a checkpoint made now is named by."""
        if self.in_cold_start:
            return Position(-1, self.cold_steps)
        hand = self.in_hand
        return position_in_step(
            self.steps,
            sampled=hand.rollout is not None,
            scored=hand.reward is not None,
            num_updates=None if hand.likelihood is None else len(hand.reports),
            rounds=len(hand.rounds),
        )
