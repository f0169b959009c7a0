"""From groups of samples to scores: every function's call for every group, concurrently."""

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from gspo.errors import UserError
from gspo.reward.aggregate import MAX_MASKED_FRACTION, Job, Scores
from gspo.reward.calls import Call, run_calls
from gspo.reward.functions import NAMED, RewardFunction
from gspo.rollout.segments import split_segments
from gspo.types import Batch, Group, Query, Sample


def score(
    groups: Sequence[Group],
    functions: Sequence[RewardFunction],
    *,
    strict: bool = False,
    max_masked_fraction: float = MAX_MASKED_FRACTION,
    check_stop: Callable[[], None] = lambda: None,
) -> Batch:
    """The groups with what the functions say of every sample; a function is called once a group.

    A sample's reward is the weighted sum of its parts that are not None, and None where all are or one has failed; a
    part is the sum over its tokens, where a function gives them, or the segments, numbers of their own.
    A call that fails, but for time, is made again for one completion at a time, so that only those are masked on which
    it fails. Raises UserError where a function needs what is not there, and where more than `max_masked_fraction` of
    the samples are masked; where `strict`, for the first call that fails.
    """
    scores = Scores(groups, functions, strict=strict, max_masked_fraction=max_masked_fraction)
    jobs = [Job(samples=group.samples, function=function) for group in groups for function in functions]
    waiting = deque(map(_call, jobs))
    seconds = dict.fromkeys((function.name for function in functions), 0.0)
    with closing(run_calls(waiting, check_stop)) as finished:
        for call, reply, took in finished:
            job: Job = call.key
            seconds[job.function.name] += took
            if not scores.add(job, reply):
                alone = [Job(samples=(sample,), function=job.function) for sample in job.samples]
                waiting.extendleft(map(_call, reversed(alone)))
    batch = Batch(groups=tuple(groups), reward_seconds=seconds)
    return batch.with_changed({sample: replace(sample, score=scores.of(sample)) for sample in batch.samples})


def check_columns(queries: Sequence[Query], functions: Sequence[RewardFunction]) -> None:
    """UserError where a function needs a column that a query does not have; calls nothing."""
    for query in queries:
        for function in functions:
            _arguments(query, (), function)


def _call(job: Job) -> Call:
    return Call(
        key=job,
        host=job.function.host,
        function=job.function.call,
        is_async=job.function.is_async,
        arguments=_arguments(job.samples[0].query, job.samples, job.function),
        size=len(job.samples),
        time_limit_seconds=job.function.time_limit_seconds,
    )


def _arguments(query: Query, samples: Sequence[Sample], function: RewardFunction) -> dict[str, Any]:
    """What the function takes of the query's columns, by name, with one entry a completion."""
    size, is_text = len(samples), isinstance(query.prompt, str)
    texts = [sample.text for sample in samples]
    own: dict[str, Any] = {
        "prompts": [query.prompt] * size,
        "completions": texts if is_text else [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [sample.token_ids.tolist() for sample in samples],  # TRL hands them over too
    }
    if function.per == "segment":
        assert function.segment_separator is not None
        own["segments"] = [split_segments(text, function.segment_separator) for text in texts]
    if reserved := [name for name in query.columns if name in own]:
        what = f"a column is named {reserved[0]}, which is what a reward function gets of the run"
        raise UserError(what, where=f"row {query.id}", fix="rename the column")
    columns = {name: [value] * size for name, value in query.columns.items() if name not in function.only_options}
    available = {**columns, **function.options, **own}
    parameters = inspect.signature(function.call).parameters.values()
    missing = [p.name for p in parameters if p.kind in NAMED and p.default is p.empty and p.name not in available]
    if missing:
        names = ", ".join(query.columns) or "none"  # what is there besides is not the data's
        fix = "rename the column or the parameter, or give it under the reward's options"
        if "segments" in missing:
            fix = "set per: segment beside the function, or rename the parameter"
        raise UserError(
            f"it needs {', '.join(missing)}; the columns there are: {names}",
            where=f"reward function {function.name}, row {query.id}",
            fix=fix,
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return available
    return {p.name: available[p.name] for p in parameters if p.name in available}
