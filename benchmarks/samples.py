"""Samples with what earlier stages would have filled in, for benchmarks of the later ones."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gspo.types import Batch, Group, Query, Sample, Score


def sample_of(prompt_ids: Sequence[int], token_ids: Tensor, **fields: Any) -> Sample:
    """A sample of which only the tokens matter; the policy is its own π_old, so that nothing is clipped."""
    num_tokens = len(token_ids)
    return Sample(
        query=Query(id="benchmark:1", prompt="", text="", prompt_ids=tuple(prompt_ids), columns={}),
        token_ids=token_ids,
        loss_mask=torch.ones(num_tokens, dtype=torch.bool),
        text="",
        finish_reason="length",
        sampler_logprobs=torch.zeros(num_tokens),
        versions=((0, num_tokens),),
        **fields,
    )


def scored(groups: Sequence[Group], rewards: Sequence[float]) -> Batch:
    """The groups with these rewards, one for each sample."""
    batch = Batch(groups=tuple(groups))
    scores = [Score(reward=reward, parts={}) for reward in rewards]
    return batch.with_changed({s: replace(s, score=score) for s, score in zip(batch.samples, scores, strict=True)})
