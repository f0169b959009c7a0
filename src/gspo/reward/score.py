"""From groups of samples to scores: every function's call for every group, concurrently."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import fsum
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo import loop
from gspo.errors import FailureKind, UserError
from gspo.loop import all_of
from gspo.queries.row import Row
from gspo.recipe.sections import Per
from gspo.reward.arguments import arguments_of
from gspo.reward.calls import RewardFunction
from gspo.reward.reply import Cell, Metrics, TrainerState
from gspo.types import Batch, Failure, Group, Query, Sample, Score, ShowProgress

Part = float | Tensor | Failure | None  # what a function says of a sample: of all its tokens, or of each

MAX_MASKED_FRACTION = 0.2
_TOOL_FIX = "mend the tool, the environment or the agent; it may take rollout.tool_seconds or agent_seconds"


class Scoring:
    """The functions at work on some groups: what has failed so far, and what is said of it.

    Where it is strict every failure is a UserError, else more than `max_masked_fraction` of the samples masked: of
    `num_samples`, those that were scored `before` included.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        state: TrainerState | None = None,
        *,
        num_samples: int = 0,
        before: Sequence[Sample] = (),
        strict: bool = False,
        max_masked_fraction: float = MAX_MASKED_FRACTION,
        warn: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        """`warn` gets a name and a sentence."""
        self._functions, self._state, self._strict, self._warn = functions, state, strict, warn
        self._num_samples, self._max_masked_fraction = num_samples + len(before), max_masked_fraction
        self._masked = set[Sample]()
        self._parts: dict[tuple[Sample, str], Part] = {}  # by function name
        self._extra = defaultdict[Sample, dict[str, Cell]](dict)  # by column
        self._first_masked: UserError | None = None
        for sample in before:
            if sample.score and (failure := sample.score.failure):
                fix = _TOOL_FIX if sample.failure else _fix(failure.kind, failure.message, "response")
                self._mask(sample, failure.message, f"row {sample.query.id}", fix)
        self.num_replies = 0  # so far
        self._check_masked()

    async def score(self, group: Group) -> Batch:
        """Call each function once, all at the same time; return the group with the scores of its samples.

        A sample's reward is the weighted sum of its parts that are not None, and None where all are or one has failed;
        a part is the sum over its tokens, where a function gives them, or the segments, numbers of their own.
        A call that fails, but for time, is made again for one completion at a time, so that only those are masked on
        which it fails. UserError where a function needs what is not there, or too much is masked.
        """
        replies = list[tuple[str, float, Metrics]]()
        judged = [sample for sample in group.samples if sample.failure is None]
        functions = judging(self._functions, group.query)
        for sample in group.samples:
            if sample.failure is not None:
                self._mask(sample, sample.failure.message, f"row {sample.query.id}", _TOOL_FIX)
        self._check_masked()
        await all_of([self._ask(function, judged, replies) for function in functions if judged])
        samples = tuple(replace(sample, score=self._score(sample)) for sample in group.samples)
        seconds = {function.name: 0.0 for function in self._functions if function not in functions}
        for name, taken, _ in replies:
            seconds[name] = seconds.get(name, 0.0) + taken
        logged = added_up([{f"{name}/{metric}": own[metric] for metric in own} for name, _, own in replies])
        return Batch(groups=(Group(samples=samples),), reward_seconds=seconds, logged=logged)

    async def _ask(
        self, function: RewardFunction, samples: Sequence[Sample], replies: list[tuple[str, float, Metrics]]
    ) -> None:
        """Call the function for the samples, and note what it says of each, its seconds and its metrics."""
        name, row = f"reward function {function.name}", f"row {samples[0].query.id}"
        arguments = arguments_of(samples[0].query, samples, function, self._state)
        reply, seconds = await function.host.make(function, arguments, len(samples))
        self.num_replies += 1
        replies.append((function.name, seconds, reply.metrics))
        if reply.user_error:
            what, where, fix = reply.user_error
            raise UserError(what, where=f"{where or name}, {row}", fix=fix)
        # The time of a call that ran over its limit is spent; what else fails may be one completion's fault.
        if reply.kind not in (None, "timed_out") and len(samples) > 1 and not self._strict:
            if reply.kind == "invalid":  # it may answer for one, and no mask would show what is wrong
                what = "it is called again for each by itself, and can't compare them"
                self._warn(f"calls of {function.name}", f"{name}, {row}: {reply.what}; {what}")
            await all_of([self._ask(function, (sample,), replies) for sample in samples])
            return
        if reply.refused and self._strict:
            raise UserError(reply.refused, where=name, fix="docs/guides/rewards.md says what it takes")
        if reply.refused:
            what = f"{name}: some of what it logs is left out: {reply.refused}"
            self._warn(f"log of {function.name}", what)
        for place, sample in enumerate(samples):
            for column, cells in reply.columns.items():
                self._extra[sample][f"{function.name}/{column}"] = cells[place]
            value = reply.what if reply.kind else reply.values[place]
            part: Part | str = to_token_rewards(value, function.per, sample)
            if isinstance(part, str):
                kind: FailureKind = reply.kind or "invalid"
                if function.weight != 0 or self._strict:
                    self._mask(sample, part, f"{name}, {row}", _fix(kind, part, function.per))
                part = Failure(kind=kind, message=f"{name}: {part}")
            self._parts[sample, function.name] = part
        self._check_masked()

    def _mask(self, sample: Sample, what: str, where: str, fix: str | None) -> None:
        self._first_masked = self._first_masked or UserError(what, where=where, fix=fix)
        self._masked.add(sample)

    def _check_masked(self) -> None:
        masked, total, first = len(self._masked), self._num_samples, self._first_masked
        if first is not None and self._strict:
            raise first
        if first is not None and masked > self._max_masked_fraction * total:
            most = f"a run goes on with {self._max_masked_fraction:.0%} at most"
            what = f"{first.what}; {masked} of {total} responses have no reward, and {most}"
            fix = f"{first.fix or 'look at that line'}; then resume: the same responses are scored again"
            raise UserError(what, where=first.where, fix=fix)

    def _score(self, sample: Sample) -> Score:
        """Return the sample's score, once everything is in."""
        names = [function.name for function in self._functions]
        weights = {function.name: function.weight for function in self._functions if function.weight != 0}
        if sample.failure is not None:  # the one that judges has nothing to judge
            of_call, none = dict.fromkeys(names[:1], sample.failure), dict.fromkeys(names)
            return Score(reward=None, parts=none, failure=sample.failure, failures=of_call, weights=weights)
        said = {name: self._parts.get((sample, name)) for name in names}  # None: of other sources
        numbers = {name: part for name, part in said.items() if isinstance(part, float | Tensor)}
        totals = {name: own if isinstance(own, float) else fsum(own.tolist()) for name, own in numbers.items()}
        failures = {name: part for name, part in said.items() if isinstance(part, Failure)}
        failed = [failures[name] for name in weights if name in failures]
        applying = {name: weight for name, weight in weights.items() if name in numbers}
        has_reward = applying and not failed
        sample_score = Score(
            reward=sum(weight * totals[name] for name, weight in applying.items()) if has_reward else None,
            parts={name: totals.get(name) for name in names},
            failure=failed[0] if failed else None,
            failures=failures,
            weights=weights,
            extra=dict(sorted(self._extra[sample].items())),
        )
        finer = {function.per for function in self._functions if function.name in weights} - {"response"}
        if not (has_reward and finer):
            return sample_score
        by_token, last = torch.zeros(2, sample.num_written, dtype=torch.float64)
        last[-1] = 1.0  # a response's own reward is earned by its end
        for name, weight in applying.items():
            part = numbers[name]
            by_token += weight * part if isinstance(part, Tensor) else weight * part * last
        segments = None if "token" in finer else torch.tensor(sample.segments)
        places = None if segments is None else torch.arange(len(segments)).repeat_interleave(segments)
        return replace(sample_score, token_rewards=by_token, places=places)


def judging(functions: Sequence[RewardFunction], asked: Query | Row) -> list[RewardFunction]:
    """The functions that judge responses to a query, by its source."""
    return [own for own in functions if not (asked.source and own.sources) or asked.source in own.sources]


def score(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    state: TrainerState | None = None,
    **options: Any,
) -> Batch:
    """Return the groups with scores, in one batch; options are those of `score_each`."""
    return together(score_each(groups, functions, state, **options), functions)


def score_each(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    state: TrainerState | None = None,
    *,
    show_progress: ShowProgress = lambda *_: None,
    **options: Any,
) -> list[Batch]:
    """Return a batch with scores for each group, in their order; further options are those of Scoring."""
    num_calls = len(groups) * len(functions)
    scoring = Scoring(functions, state, num_samples=sum(len(group.samples) for group in groups), **options)

    def look() -> None:
        if scoring.num_replies:
            show_progress(min(scoring.num_replies, num_calls), num_calls, "calls of reward functions")

    return loop.run(all_of([scoring.score(group) for group in groups]), look)


def together(batches: Sequence[Batch], functions: Sequence[RewardFunction]) -> Batch:
    """Join batches into one, in their order."""
    seconds = {function.name: 0.0 for function in functions}
    for name, own in (pair for batch in batches for pair in batch.reward_seconds.items()):
        seconds[name] = seconds.get(name, 0.0) + own
    groups = tuple(group for batch in batches for group in batch.groups)
    return Batch(groups=groups, reward_seconds=seconds, logged=added_up([batch.logged for batch in batches]))


def added_up(logged: Sequence[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Add up sums and counts by name, over rounds or calls; their order does not change the last digit."""
    found = defaultdict[str, list[tuple[float, int]]](list)
    for name, pair in (pair for by_name in logged for pair in by_name.items()):
        found[name].append(pair)
    sums = ((name, [*zip(*found[name], strict=True)]) for name in sorted(found))
    return {name: (fsum(totals), sum(counts)) for name, (totals, counts) in sums}


def to_token_rewards(
    value: float | Sequence[float] | str | None, per: Per, sample: Sample
) -> float | Float[Tensor, "W"] | str | None:
    """Return one reward for all, or one for each token, in float64: a segment's is earned by its last token.

    A text says why there is none, or why the value is not of the right form; None: the function does not apply.
    """
    if value is None or isinstance(value, str):
        return value
    if per == "response":
        return value if isinstance(value, float) else f"it returns {repr(value)[:80]} for a completion"
    expected = sample.num_tokens if per == "token" else len(sample.segments)
    if isinstance(value, float) and expected == 1:  # an array of one number comes as that number
        value = [value]
    if isinstance(value, float):
        return f"it returns {value!r} for a completion where a list is due, with a number for each {per}"
    if len(value) != expected:
        return f"it returns {_count(len(value), 'number')} for a response of {_count(expected, per)}"
    numbers = torch.tensor(value, dtype=torch.float64)
    if per == "token":
        return numbers[sample.loss_mask]
    last_tokens = (torch.tensor(sample.segments).cumsum(0) - 1).clamp(min=0)  # one without tokens: the one before
    return numbers.new_zeros(sample.num_written).index_add_(0, last_tokens, numbers)


def _fix(kind: FailureKind, what: str, per: Per) -> str | None:
    if "TypeError: string indices must be integers" in what:  # completion[0]["content"], as in functions for TRL
        return "a completion is text where the prompt is text, and messages where the prompt is: use it as it comes"
    values = "a finite number" if per == "response" else f"a list (a finite number for each {per})"
    fixes = {
        "crashed": "look at what it wrote to standard error; after SIGKILL, at the memory it takes",
        "timed_out": "make it faster or raise time_limit_seconds",
        "invalid": f"return a list with {values} for each completion, or None where the function does not apply",
    }
    return fixes.get(kind)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
