"""Reward functions tried out before a run: on a row's own answer, where there is one, and on junk."""

from collections.abc import Sequence

import torch

from gspo.records import Group, Query, Rollout, Score
from gspo.reward.functions import RewardFunction
from gspo.reward.score import check_columns, score

JUNK = "I do not know."


def probe(
    train: Sequence[Query], held_out: Sequence[Query], functions: Sequence[RewardFunction]
) -> list[tuple[str, Score]]:
    """The scores of a gold (where the first row has an `answer`) and a junk answer, by text.

    Raises UserError for a function that needs a column which is not there, raises, crashes,
    runs over its time limit, or returns what is no score.
    """
    check_columns([*train[:1], *held_out[:1]], functions)
    answer = train[0].columns.get("answer")
    texts = [JUNK if answer is None else str(answer), JUNK]  # two at least: a wrong count must show
    group = Group(query=train[0], rollouts=tuple(_rollout(text) for text in texts))
    return list(zip(texts, score([group], functions, strict=True).scores, strict=True))


def _rollout(text: str) -> Rollout:
    ids, logprobs = torch.zeros(0, dtype=torch.long), torch.zeros(0)
    return Rollout(response_ids=ids, text=text, sampler_logprobs=logprobs, finish_reason="stop", policy_version=0)
