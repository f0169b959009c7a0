"""Log-likelihoods of responses; a [tokens, vocabulary] matrix never exists for more than a chunk of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from gspo.policy.model import Policy

_MIN_FILL = 0.75  # a sequence shorter than this part of the longest beside it would be padding for the rest
_MAX_PARTS = 16  # but a micro-batch of less than this part of the budget is not worth ending


@dataclass(frozen=True, kw_only=True)
class Conditioned:
    """A response whose tokens are to be scored, and the prompt before it."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """What the policy says of N packed response tokens, in nats."""

    logprobs: Float[Tensor, "N"]
    entropy: Float[Tensor, "N"]  # of the distribution each token was drawn from; carries no gradient


def response_likelihood(
    policy: Policy, sequences: Sequence[Conditioned], *, temperature: float = 1.0, chunk_tokens: int = 2048
) -> Likelihood:
    """Log-likelihood and entropy of every response token under softmax(logits / temperature), in float32.

    One forward pass over the right-padded sequences; the caller bounds their number (`micro_batches`).
    """
    ids, is_predictor = _padded(policy, sequences)
    # Padding stands behind every real token, so causal attention needs no mask to keep it out.
    output = policy.trunk(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state[is_predictor]
    targets = torch.cat([torch.tensor(s.response_ids, dtype=torch.long) for s in sequences]).to(policy.device)
    chunks = [
        _checkpointed_chunk(policy, h, t, temperature, recompute=len(targets) > chunk_tokens)
        for h, t in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return Likelihood(logprobs=logprobs, entropy=entropy)


def micro_batches(num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences, the longest first, so that padded tokens a micro-batch stay within the budget.

    Returns the indices of each micro-batch. A sequence is never split: one longer than the budget goes alone. Where
    padding would waste much, a micro-batch ends early, though not before it is large enough to keep the cores busy.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        longest = num_tokens[batches[-1][0]] if batches else 0
        padded = len(batches[-1]) * longest if batches else 0
        wasteful = num_tokens[index] < _MIN_FILL * longest and padded >= max_tokens / _MAX_PARTS
        if batches and padded + longest <= max_tokens and not wasteful:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _padded(policy: Policy, sequences: Sequence[Conditioned]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Token ids padded on the right, and the positions whose hidden state predicts a response token."""
    # The last response token predicts nothing that is scored, so it is not read.
    rows = [torch.tensor([*s.prompt_ids, *s.response_ids][:-1], dtype=torch.long) for s in sequences]
    ids = pad_sequence(rows, batch_first=True, padding_value=policy.pad_id)
    first = torch.tensor([len(s.prompt_ids) - 1 for s in sequences])[:, None]
    count = torch.tensor([len(s.response_ids) for s in sequences])[:, None]
    position = torch.arange(ids.shape[1])[None]
    is_predictor = (position >= first) & (position < first + count)
    return ids.to(policy.device), is_predictor.to(policy.device)


def _checkpointed_chunk(
    policy: Policy, hidden: Float[Tensor, "M H"], targets: Int[Tensor, "M"], temperature: float, *, recompute: bool
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    if recompute and torch.is_grad_enabled():
        return checkpoint(_chunk, policy, hidden, targets, temperature, use_reentrant=False)
    return _chunk(policy, hidden, targets, temperature)


def _chunk(
    policy: Policy, hidden: Float[Tensor, "M H"], targets: Int[Tensor, "M"], temperature: float
) -> tuple[Float[Tensor, "M"], Float[Tensor, "M"]]:
    log_probabilities = (policy.logits(hidden) / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, targets[:, None])[:, 0], entropy
