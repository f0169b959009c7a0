"""What the calls of a step have said so far, and whether so many have failed that the run must end."""

from collections.abc import Mapping, Sequence
from math import fsum
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.errors import FailureKind, UserError
from gspo.recipe.sections import Per
from gspo.reward.functions import RewardFunction
from gspo.reward.reply import Reply
from gspo.types import Failure, Group, Sample, Score

Part = float | Tensor | Failure | None  # what a function says of a sample: of all its tokens, or of each

MAX_MASKED_FRACTION = 0.2

_FIXES: Mapping[FailureKind, str] = {
    "crashed": "look at what it wrote to standard error; after SIGKILL, at the memory it takes",
    "timed_out": "make it faster or raise time_limit_seconds",
    "invalid": "return a list with a finite number for each completion, or None where the function does not apply",
}


class Job(NamedTuple):
    """What a call is about: some samples of one group, and a function."""

    samples: Sequence[Sample]
    function: RewardFunction


class Scores:
    """The parts and failures of a step's samples, and the scores that they add up to.

    Where it is strict every failure is a UserError, else more than `max_masked_fraction` of the samples masked.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        functions: Sequence[RewardFunction],
        *,
        strict: bool,
        max_masked_fraction: float,
    ) -> None:
        self._num_samples = sum(len(group.samples) for group in groups)
        self._functions = functions
        self._strict = strict
        self._max_masked_fraction = max_masked_fraction
        self._parts: dict[tuple[Sample, str], Part] = {}  # by sample and function name
        self._masked: set[Sample] = set()
        self._first_mask: UserError | None = None

    def add(self, job: Job, reply: Reply) -> bool:
        """Note what came of a call; False where it must be made again, for each of its samples by itself.

        Raises UserError where the recipe is at fault, or too much has failed.
        """
        if reply.user_error:
            what, where, fix = reply.user_error
            raise UserError(what or "", where=where, fix=fix)
        # The time of a call that ran over its limit is spent; what else fails may be one completion's fault.
        if reply.kind not in (None, "timed_out") and len(job.samples) > 1 and not self._strict:
            return False
        values = reply.values if reply.kind is None else [reply.what] * len(job.samples)
        for sample, value in zip(job.samples, values, strict=True):
            per = job.function.per
            part = value if value is None or isinstance(value, str) else to_token_rewards(value, per, sample)
            if isinstance(part, str):
                self._fail(sample, job.function, reply.kind or "invalid", part)
            else:
                self._parts[sample, job.function.name] = part
        self._check()
        return True

    def of(self, sample: Sample) -> Score:
        """The sample's score, once everything is in."""
        pairs = [(function, self._parts[sample, function.name]) for function in self._functions]
        parts = {f.name: _total(part) if isinstance(part, float | Tensor) else None for f, part in pairs}
        failures = {function.name: part for function, part in pairs if isinstance(part, Failure)}
        weighed = [(function.weight, part) for function, part in pairs if function.weight != 0]  # 0: measured only
        failure = next((part for _, part in weighed if isinstance(part, Failure)), None)
        applying = [(weight, part) for weight, part in weighed if isinstance(part, float | Tensor)]
        if failure is not None or not applying:
            return Score(reward=None, parts=parts, failure=failure, failures=failures)
        reward = sum(weight * _total(part) for weight, part in applying)
        finer = {function.per for function in self._functions if function.weight != 0} - {"response"}
        if not finer:
            return Score(reward=reward, parts=parts, failures=failures)
        by_token, last = torch.zeros(2, sample.num_written, dtype=torch.float64)
        last[-1] = 1.0  # a response's own reward is earned by its end
        for weight, part in applying:
            by_token += weight * part if isinstance(part, Tensor) else weight * part * last
        segments = None if "token" in finer else torch.tensor(sample.segments)
        places = None if segments is None else torch.arange(len(segments)).repeat_interleave(segments)
        return Score(reward=reward, parts=parts, failures=failures, token_rewards=by_token, places=places)

    def _fail(self, sample: Sample, function: RewardFunction, kind: FailureKind, what: str) -> None:
        name = f"reward function {function.name}"
        self._parts[sample, function.name] = Failure(kind=kind, message=f"{name}: {what}")
        if function.weight == 0 and not self._strict:
            return
        self._masked.add(sample)
        if self._first_mask is None:
            where = f"{name}, row {sample.query.id}"
            self._first_mask = UserError(what, where=where, fix=_fix(kind, what, function.per))

    def _check(self) -> None:
        if (first := self._first_mask) is None:
            return
        if self._strict:
            raise first
        masked, total = len(self._masked), self._num_samples
        if masked > self._max_masked_fraction * total:
            what = f"{first.what}; so with {masked} of {total} responses, over {self._max_masked_fraction:.0%}"
            fix = f"{first.fix or 'look at that line'}; then resume: the same responses are scored again"
            raise UserError(what, where=first.where, fix=fix)


def to_token_rewards(value: float | Sequence[float], per: Per, sample: Sample) -> float | Float[Tensor, "W"] | str:
    """One reward for all, or one for each token, in float64: a segment's is earned by its last token.

    A text says why the value is not of the right form.
    """
    if per == "response":
        return value if isinstance(value, float) else f"it returns {repr(value)[:80]} for a completion"
    expected = sample.num_written if per == "token" else len(sample.segments)
    if isinstance(value, float) and expected == 1:  # an array of one number comes as that number
        value = [value]
    if isinstance(value, float):
        return f"it returns {value!r} for a completion where a list is due, with a number for each {per}"
    if len(value) != expected:
        return f"it returns {_count(len(value), 'number')} for a response of {_count(expected, per)}"
    numbers = torch.tensor(value, dtype=torch.float64)
    if per == "token":
        return numbers
    last_tokens = (torch.tensor(sample.segments).cumsum(0) - 1).clamp(min=0)  # one without tokens: the one before
    return numbers.new_zeros(sample.num_written).index_add_(0, last_tokens, numbers)


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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
