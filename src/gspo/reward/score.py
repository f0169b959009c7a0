"""From groups of rollouts to scores: every function's call for every group, concurrently."""

import inspect
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gspo.callables import error_line
from gspo.errors import UserError
from gspo.records import Group, Query, Score
from gspo.reward.calls import MAX_CONCURRENT_CALLS, Call, Outcome, run_calls
from gspo.reward.functions import NAMED, RewardFunction

MAX_TIMED_OUT_FRACTION = 0.2

Parts = list[float | None]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A step's scores and how the calls went."""

    scores: tuple[Score, ...]  # B, group after group
    num_timed_out: int  # calls that ran over their time limit; their rollouts have None for that part
    seconds: Mapping[str, float]  # by function, summed over its calls, which overlap


def score(groups: Sequence[Group], functions: Sequence[RewardFunction]) -> Scored:
    """What the functions say of every rollout; a function is called once a group.

    A rollout's reward is the weighted sum of its parts that are not None, and None where all are.
    Raises UserError naming the function and the row for a call that raises or returns anything but a finite number
    or None for each completion, and where more than a fifth of the calls run over their time limit.
    """
    jobs = [(group, function) for group in groups for function in functions]
    calls = [_call(group, function) for group, function in jobs]
    parts: list[Parts] = [[] for _ in jobs]
    seconds = dict.fromkeys((function.name for function in functions), 0.0)
    num_timed_out = 0
    for index, outcome in run_calls(calls):
        group, function = jobs[index]
        parts[index] = _parts(outcome, group, function)
        seconds[function.name] += outcome.seconds
        num_timed_out += outcome.timed_out
        if num_timed_out > MAX_TIMED_OUT_FRACTION * len(calls):
            raise _too_many_timeouts(num_timed_out, len(calls), function)
    scores = [
        one
        for position, group in enumerate(groups)
        for one in _group_scores(group, functions, parts[position * len(functions) : (position + 1) * len(functions)])
    ]
    return Scored(scores=tuple(scores), num_timed_out=num_timed_out, seconds=seconds)


def check_columns(queries: Sequence[Query], functions: Sequence[RewardFunction]) -> None:
    """UserError where a function needs a column that a query does not have; calls nothing."""
    for query in queries:
        for function in functions:
            _arguments(Group(query=query, rollouts=()), function)


def _group_scores(group: Group, functions: Sequence[RewardFunction], parts: Sequence[Parts]) -> list[Score]:
    scores = []
    for rollout in range(len(group.rollouts)):
        values = [of_function[rollout] for of_function in parts]
        applying = [
            function.weight * value
            for function, value in zip(functions, values, strict=True)
            if value is not None and function.weight != 0  # weight 0: measured only
        ]
        by_name = {function.name: value for function, value in zip(functions, values, strict=True)}
        scores.append(Score(reward=sum(applying) if applying else None, parts=by_name))
    return scores


def _call(group: Group, function: RewardFunction) -> Call:
    arguments = _arguments(group, function)
    return Call(
        function=partial(function.call, **arguments),
        is_async=function.is_async,
        time_limit_seconds=function.time_limit_seconds,
        lane=function.name,
        at_once=getattr(function.call, "max_concurrent_calls", MAX_CONCURRENT_CALLS),
    )


def _arguments(group: Group, function: RewardFunction) -> dict[str, Any]:
    """What the function takes of the group's columns, by name, with one entry a completion."""
    size, query = len(group.rollouts), group.query
    is_text = isinstance(query.prompt, str)
    texts = [rollout.text for rollout in group.rollouts]
    there: dict[str, Any] = {name: [value] * size for name, value in query.columns.items()}
    there |= function.options
    there["prompts"] = [query.prompt] * size
    there["completions"] = texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]
    there["completion_ids"] = [rollout.response_ids.tolist() for rollout in group.rollouts]  # TRL hands them over too
    parameters = inspect.signature(function.call).parameters.values()
    missing = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty and p.name not in there]
    if missing:
        columns = ", ".join(query.columns) or "none"  # what is there besides is not the data's
        what = f"it needs {', '.join(missing)}; the columns there are: {columns}"
        mend = "rename the column or the parameter, or give it under the reward's options"
        raise UserError(what, where=_place(group, function), mend=mend)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return there
    return {p.name: there[p.name] for p in parameters if p.name in there}


def _parts(outcome: Outcome, group: Group, function: RewardFunction) -> Parts:
    size = len(group.rollouts)
    if outcome.timed_out:
        return [None] * size
    if outcome.error is not None:
        if isinstance(outcome.error, UserError):
            raise outcome.error
        kind, message = type(outcome.error).__name__, str(outcome.error)
        what = f"it raises {kind}: {message}{error_line(outcome.error, function.call)}"
        threads = kind == "ValueError" and "thread" in message  # math-verify's time limits are alarms
        mend = "reward functions run in threads: pass parsing_timeout=None, timeout_seconds=None" if threads else None
        raise UserError(what, where=_place(group, function), mend=mend) from outcome.error
    values = outcome.value.tolist() if hasattr(outcome.value, "tolist") else outcome.value
    if not isinstance(values, list | tuple) or len(values) != size:
        count = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)[:80]
        mend = "return a list with one number or None for each completion"
        raise UserError(f"it returns {count} for {size} completions", where=_place(group, function), mend=mend)
    return [_number(value, group, function) for value in values]


def _number(value: Any, group: Group, function: RewardFunction) -> float | None:
    if value is None:
        return None
    plain = value.item() if hasattr(value, "item") else value  # a numpy or torch scalar
    if isinstance(plain, numbers.Real) and math.isfinite(plain):
        return float(plain)
    mend = "return a finite number, or None where the function does not apply"
    raise UserError(f"it returns {value!r} for a completion", where=_place(group, function), mend=mend)


def _too_many_timeouts(num_timed_out: int, num_calls: int, function: RewardFunction) -> UserError:
    what = f"{num_timed_out} of a step's {num_calls} reward calls ran over their time limit, the last after "
    what += f"{function.time_limit_seconds:g} s"
    return UserError(what, where=f"reward function {function.name}", mend="make it faster or raise time_limit_seconds")


def _place(group: Group, function: RewardFunction) -> str:
    return f"reward function {function.name}, row {group.query.id}"
