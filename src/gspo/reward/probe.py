"""What is checked of the reward before a run: where tasks come from, and every function on two completions."""

import re
from collections.abc import Sequence
from typing import Any

import torch

from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.reward.builtin import reasoning_gym
from gspo.reward.functions import RewardFunction
from gspo.reward.score import check_columns, score
from gspo.rollout.segments import split_segments
from gspo.types import Group, Query, Sample, Score

JUNK = "I do not know."
# By what their verifiers evaluate as Python: the answer, something in the entry, or whatever another task's does.
EVALUATING_TASKS = frozenset(
    re.findall(
        r"\w+",
        "binary_matrix bitwise_arithmetic composite countdown intermediate_integration n_queens number_sorting "
        "polynomial_multiplication puzzle24 simple_integration spiral_matrix string_insertion",
    )
)


def check_origin(rows: Sequence[Row], functions: Sequence[RewardFunction]) -> None:
    """UserError for a row of data whose task's verifier evaluates text, which would be the data's; calls nothing."""
    functions = [function for function in functions if function.call is reasoning_gym]
    for row in rows if functions else ():
        task = row.columns.get("task")
        tasks = task if isinstance(task, list | tuple) else [task]
        named = EVALUATING_TASKS.intersection(name for name in tasks if isinstance(name, str))
        if named and not row.is_procedural:
            what = (
                f"task {min(named)}: reasoning-gym's verifier of it evaluates text as Python or sympy, and in data "
                "that text could be any program"
            )
            fix = "give queries.procedural.task instead of data, or use a task whose verifier only reads"
            raise UserError(what, where=f"reward function {functions[0].name}, row {row.id}", fix=fix)


def probe(
    train: Sequence[Query],
    held_out: Sequence[Query],
    functions: Sequence[RewardFunction],
    tokenizer: Any,
    *,
    segment_separator: str | None,
) -> list[tuple[str, Score]]:
    """The scores of a gold (where the first row has an `answer`) and a junk answer, by text.

    Raises UserError for a function that needs a column which is not there, raises, crashes,
    runs over its time limit, or returns what is no score.
    """
    check_columns([*train[:1], *held_out[:1]], functions)
    answer = train[0].columns.get("answer")
    texts = [JUNK if answer is None else str(answer), JUNK]  # two at least: a wrong count must show
    group = Group(samples=tuple(_sample(train[0], text, tokenizer, segment_separator) for text in texts))
    samples = score([group], functions, strict=True).samples
    return [(sample.text, sample.score) for sample in samples if sample.score is not None]


def _sample(query: Query, text: str, tokenizer: Any, separator: str | None) -> Sample:
    """As if it had been sampled, each segment's tokens by itself, and an end token in the last."""
    segments = [text] if separator is None else split_segments(text, separator)
    ids = [list(tokenizer(segment, add_special_tokens=False).input_ids) for segment in segments]
    ids[-1].append(tokenizer.eos_token_id or 0)  # any will do where the tokenizer names none
    num_tokens = sum(map(len, ids))
    return Sample(
        query=query,
        token_ids=torch.tensor([token for segment in ids for token in segment]),
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        text=text,
        finish_reason="stop",
        sampler_logprobs=torch.zeros(num_tokens),
        versions=((0, num_tokens),),
        segments=() if separator is None else tuple(map(len, ids)),
    )
