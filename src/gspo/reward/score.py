"""From groups of rollouts to scores: every function's call for every group, concurrently."""

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from gspo.errors import UserError
from gspo.reward.calls import Call, run_calls
from gspo.reward.functions import NAMED, RewardFunction
from gspo.reward.tally import MAX_MASKED_FRACTION, Job, Tally
from gspo.rollout.segments import split_segments
from gspo.types import Group, Query, Score


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A step's scores and how long the calls took."""

    scores: tuple[Score, ...]  # B, group after group
    seconds: Mapping[str, float]  # by function, summed over its calls, which overlap


def score(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    *,
    strict: bool = False,
    max_masked_fraction: float = MAX_MASKED_FRACTION,
    check_stop: Callable[[], None] = lambda: None,
) -> Scored:
    """What the functions say of every rollout; a function is called once a group.

    A rollout's reward is the weighted sum of its parts that are not None, and None where all are or one has failed; a
    part is the sum over its tokens, where a function gives them, or the segments, numbers of their own.
    A call that fails, but for time, is made again for one completion at a time, so that only those are masked on which
    it fails. Raises UserError where a function needs what is not there, and where more than `max_masked_fraction` of
    the rollouts are masked; where `strict`, for the first call that fails.
    """
    tally = Tally(groups, functions, strict=strict, max_masked_fraction=max_masked_fraction)
    jobs = [
        Job(group, function, range(len(its.rollouts)))
        for group, its in enumerate(groups)
        for function in range(len(functions))
    ]
    waiting = deque(_call(job, groups, functions) for job in jobs)
    seconds = dict.fromkeys((function.name for function in functions), 0.0)
    with closing(run_calls(waiting, check_stop)) as finished:
        for call, reply, took in finished:
            job: Job = call.key
            seconds[functions[job.function].name] += took
            if not tally.take(job, reply):
                lone = [job._replace(rollouts=range(rollout, rollout + 1)) for rollout in job.rollouts]
                waiting.extendleft(_call(one, groups, functions) for one in reversed(lone))
    return Scored(scores=tuple(tally.scores()), seconds=seconds)


def check_columns(queries: Sequence[Query], functions: Sequence[RewardFunction]) -> None:
    """UserError where a function needs a column that a query does not have; calls nothing."""
    for query in queries:
        for function in functions:
            _arguments(Group(query=query, rollouts=()), function)


def _call(job: Job, groups: Sequence[Group], functions: Sequence[RewardFunction]) -> Call:
    group, function = groups[job.group], functions[job.function]
    some = Group(query=group.query, rollouts=group.rollouts[job.rollouts.start : job.rollouts.stop])
    return Call(
        key=job,
        host=function.host,
        function=function.call,
        is_async=function.is_async,
        arguments=_arguments(some, function),
        size=len(some.rollouts),
        time_limit_seconds=function.time_limit_seconds,
    )


def _arguments(group: Group, function: RewardFunction) -> dict[str, Any]:
    """What the function takes of the group's columns, by name, with one entry a completion."""
    size, query = len(group.rollouts), group.query
    is_text = isinstance(query.prompt, str)
    texts = [rollout.text for rollout in group.rollouts]
    own: dict[str, Any] = {
        "prompts": [query.prompt] * size,
        "completions": texts if is_text else [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [rollout.response_ids.tolist() for rollout in group.rollouts],  # TRL hands them over too
    }
    if function.per == "segment":
        assert function.segment_separator is not None
        own["segments"] = [split_segments(text, function.segment_separator) for text in texts]
    if taken := [name for name in query.columns if name in own]:
        what = f"a column is named {taken[0]}, which is what a reward function gets of the run"
        raise UserError(what, where=f"row {query.id}", fix="rename the column")
    columns = {name: [value] * size for name, value in query.columns.items() if name not in function.only_options}
    there = {**columns, **function.options, **own}
    parameters = inspect.signature(function.call).parameters.values()
    missing = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty and p.name not in there]
    if missing:
        names = ", ".join(query.columns) or "none"  # what is there besides is not the data's
        what = f"it needs {', '.join(missing)}; the columns there are: {names}"
        fix = "rename the column or the parameter, or give it under the reward's options"
        if "segments" in missing:
            fix = "set per: segment beside the function, or rename the parameter"
        where = f"reward function {function.name}, row {query.id}"
        raise UserError(what, where=where, fix=fix)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return there
    return {p.name: there[p.name] for p in parameters if p.name in there}
