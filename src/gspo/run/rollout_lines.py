"""What is written of each sample of a step: what the model read, said and got, and token by token how it changed."""

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.run.token_text import TokenText
from gspo.types import Query, Sample

_LONG = 1000  # characters of a column: one that is longer is no answer to be read beside a response
_DIGITS = 4  # of a number a token: clip ranges are of any size


def rollout_lines(samples: Sequence[Sample], token_text: TokenText | None = None) -> Iterator[Mapping[str, Any]]:
    """One a sample; with `token_text`, what is known of each token too.

    Numbers of the update are null where the sample was not trained on, its advantage being 0.
    """
    log_ratios = _rounded({s: s.stats.log_ratios for s in samples if s.stats is not None and token_text})
    advantages = _rounded({s: s.token_advantages for s in samples if s.token_advantages is not None and token_text})
    for sample in samples:
        score, stats = sample.score, sample.stats
        line: dict[str, Any] = {
            "query": sample.query.id,
            "prompt": sample.query.text,
            "columns": _shown_columns(sample.query),
            "completion": sample.text,
            "reward": sample.reward,
            "rewards": dict(score.parts) if score else {},
            "failure": score.failure.message if score and score.failure else None,
            "advantage": sample.advantage,
            "sequence_ratio": stats and stats.sequence_ratio,
            "clipped": stats and stats.num_clipped / stats.num_tokens,
            "mini_batch": stats and stats.mini_batch,
            "tokens": sample.num_tokens,
            "finish_reason": sample.finish_reason,
            "policy_version": sample.versions[0][0],  # the oldest that wrote tokens of it
        }
        if token_text is not None:
            line |= {
                "token_characters": token_text.lengths(sample.token_ids.tolist(), sample.text),
                "token_log_ratios": log_ratios.get(sample),
                "token_advantages": advantages.get(sample),
            }
        yield line


def _shown_columns(query: Query) -> dict[str, Any]:
    """The data's other columns, such as the answer, as far as they are text, numbers or nothing, and not long."""
    return {
        name: value
        for name, value in query.columns.items()
        if value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= _LONG)
    }


def _rounded(numbers: Mapping[Sample, Float[Tensor, "W"]]) -> dict[Sample, list[float | None]]:
    """Rounded to significant digits, one entry for each of a sample's tokens.

    It is null for what is not finite and for tokens that the policy did not write. All samples are rounded at once,
    for one by one would take long.
    """
    if not numbers:
        return {}
    exact = torch.cat(list(numbers.values())).double()
    size = 10.0 ** (_DIGITS - 1 - exact.abs().clamp(min=1e-30).log10().floor())
    rounded = iter(((exact * size).round() / size).tolist())
    return {
        sample: [_finite(next(rounded)) if own else None for own in sample.loss_mask.tolist()] for sample in numbers
    }


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
