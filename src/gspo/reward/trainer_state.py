"""How far the run is, as reward functions get it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The numbers of transformers' TrainerState that a reward can depend on, under the same names.

    Example: TrainerState(global_step=12, max_steps=200, epoch=0.75) in step 13 of 200
    """

    global_step: int = 0  # finished: rollout batches, not optimiser steps
    max_steps: int = 1
    epoch: float = 0.0  # passes over the queries
