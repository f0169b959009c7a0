"""What is written of each rollout of a step: what the model read, said and got, and token by token how it changed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.item import Trained
from gspo.run.token_text import TokenText
from gspo.types import Batch, Query

_LONG = 1000  # characters of a column: one that is longer is no answer to be read beside a response
_DIGITS = 4  # of a number a token: clip ranges are of any size


def rollout_lines(
    batch: Batch, trained: Sequence[Trained] = (), token_text: TokenText | None = None
) -> Iterator[Mapping[str, Any]]:
    """One a rollout of the batch, in its order; with `token_text`, what is known of each token too.

    Numbers of the update are null where the sequence took no part in it, its advantage being 0.
    """
    seen, index = {item.index: item for item in trained}, 0
    log_ratios = _rounded({item.index: item.log_ratios for item in trained} if token_text else {})
    advantages = _rounded(batch.token_advantages if token_text else {})
    for group in batch.groups:
        for rollout in group.rollouts:
            score, item = batch.scores[index], seen.get(index)
            line: dict[str, Any] = {
                "query": group.query.id,
                "prompt": group.query.text,
                "columns": _shown_columns(group.query),
                "completion": rollout.text,
                "reward": score.reward,
                "rewards": dict(score.parts),
                "failure": score.failure.message if score.failure else None,
                "advantage": batch.advantages[index],
                "sequence_ratio": None if item is None else item.sequence_ratio,
                "clipped": None if item is None else item.num_clipped / item.num_tokens,
                "mini_batch": None if item is None else item.mini_batch,
                "tokens": len(rollout.response_ids),
                "finish_reason": rollout.finish_reason,
                "policy_version": rollout.policy_version,
            }
            if token_text is not None:
                line |= {
                    "token_characters": token_text.lengths(rollout.response_ids.tolist(), rollout.text),
                    "token_log_ratios": log_ratios.get(index),
                    "token_advantages": advantages.get(index),
                }
            yield line
            index += 1


def _shown_columns(query: Query) -> dict[str, Any]:
    """The data's other columns, such as the answer, as far as they are text, numbers or nothing, and not long."""
    return {
        name: value
        for name, value in query.columns.items()
        if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONG)
    }


def _rounded(numbers: Mapping[int, Float[Tensor, "_"]]) -> dict[int, list[float | None]]:
    """To significant digits, all responses at once, for one by one would take long; null for what is not finite."""
    if not numbers:
        return {}
    exact = torch.cat(list(numbers.values())).double()
    size = 10.0 ** (_DIGITS - 1 - exact.abs().clamp(min=1e-30).log10().floor())
    found: list[float | None] = ((exact * size).round() / size).tolist()
    if not exact.isfinite().all():
        found = [None if one is None or not isfinite(one) else one for one in found]
    ends = list(accumulate(map(len, numbers.values())))
    return {index: found[start:end] for index, start, end in zip(numbers, [0, *ends[:-1]], ends, strict=True)}
