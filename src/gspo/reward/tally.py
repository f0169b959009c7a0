"""What the calls of a step have said so far, and whether so many have failed that the run must end."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gspo.errors import UserError
from gspo.records import Failure, FailureKind, Group, Score
from gspo.reward.functions import RewardFunction
from gspo.reward.reply import Reply

MAX_MASKED_FRACTION = 0.2

_MENDS: Mapping[FailureKind, str] = {
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

    Where it is strict every failure is a UserError, else more than MAX_MASKED_FRACTION of the rollouts masked.
    """

    def __init__(self, groups: Sequence[Group], functions: Sequence[RewardFunction], *, strict: bool) -> None:
        self._groups = groups
        self._functions = functions
        self._strict = strict
        self._parts: dict[tuple[int, int, int], float | Failure | None] = {}  # by group, function, rollout
        self._masked: set[tuple[int, int]] = set()  # group, rollout
        self._first_mask: UserError | None = None

    def take(self, job: Job, reply: Reply) -> bool:
        """Note what came of a call; False where it must be made again, for each of its rollouts by itself.

        Raises UserError where the recipe is at fault, or too much has failed.
        """
        if reply.user_error:
            what, where, mend = reply.user_error
            raise UserError(what or "", where=where, mend=mend)
        # The time of a call that ran over its limit is spent; what else fails may be one completion's fault.
        if reply.kind not in (None, "timed_out") and len(job.rollouts) > 1 and not self._strict:
            return False
        values = reply.values if reply.kind is None else [reply.what] * len(job.rollouts)
        for rollout, value in zip(job.rollouts, values, strict=True):
            if isinstance(value, str):
                self._fail(job, rollout, reply.kind or "invalid", value)
            else:
                self._parts[job.group, job.function, rollout] = value
        self._check()
        return True

    def scores(self) -> list[Score]:
        """The scores, group after group, once everything is in."""
        return [
            self._score(group, rollout)
            for group, its in enumerate(self._groups)
            for rollout in range(len(its.rollouts))
        ]

    def _fail(self, job: Job, rollout: int, kind: FailureKind, what: str) -> None:
        function = self._functions[job.function]
        message = f"reward function {function.name}: {what}"
        self._parts[job.group, job.function, rollout] = Failure(kind=kind, message=message)
        if function.weight == 0 and not self._strict:
            return
        where = f"reward function {function.name}, row {self._groups[job.group].query.id}"
        self._masked.add((job.group, rollout))
        self._first_mask = self._first_mask or UserError(what, where=where, mend=_mend(kind, what))

    def _check(self) -> None:
        if (first := self._first_mask) is None:
            return
        if self._strict:
            raise first
        masked, total = len(self._masked), sum(len(group.rollouts) for group in self._groups)
        if masked > MAX_MASKED_FRACTION * total:
            what = f"{first.what}; so with {masked} of {total} responses, over {MAX_MASKED_FRACTION:.0%}"
            mend = f"{first.mend or 'look at that line'}; then resume: the same responses are scored again"
            raise UserError(what, where=first.where, mend=mend)

    def _score(self, group: int, rollout: int) -> Score:
        parts: dict[str, float | None] = {}
        reward: float | None = None
        failure: Failure | None = None
        for number, function in enumerate(self._functions):
            part = self._parts[group, number, rollout]
            value = parts[function.name] = None if isinstance(part, Failure) else part
            if function.weight == 0:  # measured only
                continue
            if isinstance(part, Failure):
                failure = failure or part
            elif value is not None:
                reward = (reward or 0.0) + function.weight * value
        return Score(reward=None if failure else reward, parts=parts, failure=failure)


def _mend(kind: FailureKind, what: str) -> str | None:
    if kind == "raised" and "ValueError: signal only works in main thread" in what:  # math-verify's limits are alarms
        return "functions from Python run in threads: pass parsing_timeout=None, timeout_seconds=None"
    return _MENDS.get(kind)
