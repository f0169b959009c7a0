"""Where the checkpoints of a run lie, and what they are named and ordered by, whatever the clock says."""

import re
from dataclasses import dataclass

CHECKPOINTS = "checkpoints"  # of reinforcement learning
COLD_CHECKPOINTS = "cold_start_checkpoints"  # while the cold start is under way
COLD_START = "cold_start"  # what the cold start has ended with: a checkpoint with its model
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
