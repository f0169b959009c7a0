"""How far a run has come: what a checkpoint is named and ordered by, whatever the clock says."""

import re
from dataclasses import dataclass, field

_SCORED, _FIRST_UPDATE = 2, 3
_STEP = r"step_(?P<step>\d+)(?:_round_(?P<round>[2-9]|[1-9]\d+))?(?:_(?P<stage>sampled|scored|update_(?P<update>\d+)))?"
_NAME = re.compile(rf"(?:cold_(?P<cold>\d+)|{_STEP})")


@dataclass(frozen=True, order=True)
class Position:
    """Finished steps, then how far the next one has come; the cold start is before step 0."""

    steps: int  # finished steps of reinforcement learning; -1 in the cold start
    rounds: int = field(default=0, kw_only=True)  # of the next step's sampling, finished and followed by another
    stage: int = 0  # supervised steps in the cold start; else 0, or 1 sampled, 2 scored, 3 + optimiser steps made

    @property
    def name(self) -> str:
        """`cold_000200`, `step_000012`, or `step_000012_update_2`: within step 13, after two optimiser steps.

        `step_000012_round_2_update_2` where dynamic sampling has sampled twice for them.
        """
        if self.steps < 0:
            return f"cold_{self.stage:06d}"
        stage = {0: "", 1: "_sampled", _SCORED: "_scored"}.get(self.stage, f"_update_{self.stage - _FIRST_UPDATE}")
        again = f"_round_{self.rounds + 1}" if self.rounds else ""
        return f"step_{self.steps:06d}{again}{stage}"

    def __str__(self) -> str:
        if self.steps < 0:
            return f"step {self.stage} of the cold start"
        within = {0: "", 1: ", sampled", _SCORED: ", scored"}.get(self.stage, f", update {self.stage - _FIRST_UPDATE}")
        again = f", round {self.rounds + 1}" if self.rounds else ""
        return f"step {self.steps + 1}{again}{within}" if again or within else f"step {self.steps}"


def position_of(name: str) -> Position | None:
    """The position of a checkpoint's name; None for another name, such as `step_99`, which no checkpoint has."""
    found = _NAME.fullmatch(name)
    position = None if found is None else _position(found)
    return position if position is not None and position.name == name else None


def _position(found: re.Match[str]) -> Position:
    if found["cold"]:
        return Position(-1, int(found["cold"]))
    stage = {None: 0, "sampled": 1, "scored": _SCORED}.get(found["stage"])
    stage = _FIRST_UPDATE + int(found["update"]) if stage is None else stage
    return Position(int(found["step"]), stage, rounds=int(found["round"] or 1) - 1)


def position_in_step(steps: int, *, sampled: bool, scored: bool, num_updates: int | None, rounds: int = 0) -> Position:
    """The position after `steps` whole ones; `num_updates` is None before the old log-likelihoods are known."""
    if num_updates is not None:
        return Position(steps, _FIRST_UPDATE + num_updates, rounds=rounds)
    return Position(steps, _SCORED if scored else int(sampled), rounds=rounds)
