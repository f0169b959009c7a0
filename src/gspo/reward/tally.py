"""What the calls of a step have said so far, and whether so many have failed that the run must end."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import NamedTuple

import torch
from torch import Tensor

from gspo.errors import FailureKind, UserError
from gspo.recipe.schema import Per
from gspo.reward.functions import RewardFunction
from gspo.reward.reply import Reply
from gspo.reward.spread import spread
from gspo.types import Failure, Group, Score

Part = float | Tensor | Failure | None  # what a function says of a rollout: of all its tokens, or of each

MAX_MASKED_FRACTION = 0.2

_FIXES: Mapping[FailureKind, str] = {
    "crashed": "look at what it wrote to standard error; after SIGKILL, at the memory it takes",
    "timed_out": "make it faster or raise time_limit_seconds",
    "invalid": "return a list with a finite number for each completion, or None where the function does not apply",
}


class Job(NamedTuple):
    """What a call is about: a group, a function, and some of the group's rollouts, all by their position."""

    group: int
    function: int
    rollouts: range


class Tally:
    """The parts and failures of a step's rollouts.

    Where it is strict every failure is a UserError, else more than `max_masked_fraction` of the rollouts masked.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        functions: Sequence[RewardFunction],
        *,
        strict: bool,
        max_masked_fraction: float,
    ) -> None:
        self._groups = groups
        self._functions = functions
        self._strict = strict
        self._max_masked_fraction = max_masked_fraction
        self._parts: dict[tuple[int, int, int], Part] = {}  # by group, function, rollout
        self._masked: set[tuple[int, int]] = set()  # group, rollout
        self._first_mask: UserError | None = None

    def take(self, job: Job, reply: Reply) -> bool:
        """Note what came of a call; False where it must be made again, for each of its rollouts by itself.

        Raises UserError where the recipe is at fault, or too much has failed.
        """
        if reply.user_error:
            what, where, fix = reply.user_error
            raise UserError(what or "", where=where, fix=fix)
        # The time of a call that ran over its limit is spent; what else fails may be one completion's fault.
        if reply.kind not in (None, "timed_out") and len(job.rollouts) > 1 and not self._strict:
            return False
        values = reply.values if reply.kind is None else [reply.what] * len(job.rollouts)
        for rollout, value in zip(job.rollouts, values, strict=True):
            part = value if value is None or isinstance(value, str) else self._spread(job, rollout, value)
            if isinstance(part, str):
                self._fail(job, rollout, reply.kind or "invalid", part)
            else:
                self._parts[job.group, job.function, rollout] = part
        self._check()
        return True

    def scores(self) -> list[Score]:
        """The scores, group after group, once everything is in."""
        return [
            self._score(group, rollout)
            for group, its in enumerate(self._groups)
            for rollout in range(len(its.rollouts))
        ]

    def _spread(self, job: Job, rollout: int, value: float | list[float]) -> float | Tensor | str:
        return spread(value, self._functions[job.function].per, self._groups[job.group].rollouts[rollout])

    def _fail(self, job: Job, rollout: int, kind: FailureKind, what: str) -> None:
        function = self._functions[job.function]
        message = f"reward function {function.name}: {what}"
        self._parts[job.group, job.function, rollout] = Failure(kind=kind, message=message)
        if function.weight == 0 and not self._strict:
            return
        where = f"reward function {function.name}, row {self._groups[job.group].query.id}"
        self._masked.add((job.group, rollout))
        self._first_mask = self._first_mask or UserError(what, where=where, fix=_fix(kind, what, function.per))

    def _check(self) -> None:
        if (first := self._first_mask) is None:
            return
        if self._strict:
            raise first
        masked, total = len(self._masked), sum(len(group.rollouts) for group in self._groups)
        if masked > self._max_masked_fraction * total:
            what = f"{first.what}; so with {masked} of {total} responses, over {self._max_masked_fraction:.0%}"
            fix = f"{first.fix or 'look at that line'}; then resume: the same responses are scored again"
            raise UserError(what, where=first.where, fix=fix)

    def _score(self, group: int, rollout: int) -> Score:
        said = [self._parts[group, number, rollout] for number in range(len(self._functions))]
        pairs = list(zip(self._functions, said, strict=True))
        parts = {f.name: _total(part) if isinstance(part, float | Tensor) else None for f, part in pairs}
        failures = {function.name: part for function, part in pairs if isinstance(part, Failure)}
        weighed = [(function.weight, part) for function, part in pairs if function.weight != 0]  # 0: measured only
        if masking := [part for _, part in weighed if isinstance(part, Failure)]:
            return Score(reward=None, parts=parts, failure=masking[0], failures=failures)
        applying = [(weight, part) for weight, part in weighed if isinstance(part, float | Tensor)]
        if not applying:
            return Score(reward=None, parts=parts, failures=failures)
        reward = sum(weight * _total(part) for weight, part in applying)
        finer = {function.per for function in self._functions if function.weight != 0} - {"response"}
        if not finer:
            return Score(reward=reward, parts=parts, failures=failures)
        its = self._groups[group].rollouts[rollout]
        by_token, last = torch.zeros(2, len(its.response_ids), dtype=torch.float64)
        last[-1] = 1.0  # a response's own reward is earned by its end
        for weight, part in applying:
            by_token += weight * part if isinstance(part, Tensor) else weight * part * last
        segments = None if "token" in finer else torch.tensor(its.segments)
        places = None if segments is None else torch.arange(len(segments)).repeat_interleave(segments)
        return Score(reward=reward, parts=parts, failures=failures, token_rewards=by_token, places=places)


def _total(part: float | Tensor) -> float:
    """Over the response's tokens."""
    return fsum(part.tolist()) if isinstance(part, Tensor) else part


def _fix(kind: FailureKind, what: str, per: Per) -> str | None:
    if kind == "raised" and "ValueError: signal only works in main thread" in what:  # math-verify's limits are alarms
        return "functions from Python run in threads: pass parsing_timeout=None, timeout_seconds=None"
    if kind == "invalid" and per != "response":
        return (
            f"return, for each completion, a list with a finite number for each {per}, or None where it does not apply"
        )
    return _FIXES.get(kind)
