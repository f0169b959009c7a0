"""One sequence of an update: what is known of it before, and what was seen of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.learner.cutting import mini_batches, rollouts_of, trainable_items
from gspo.learner.old_policy import Old
from gspo.model.packing import TokenSequence
from gspo.objective import Surrogate
from gspo.recipe.schema import ActorConfig
from gspo.types import Batch, Experts


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """What is known of a sequence before its mini-batch."""

    index: int  # of the rollout in the batch
    sequence: TokenSequence
    advantage: float
    old_logprobs: Float[Tensor, "T"] | None  # None: the policy is π_old, its own forward pass gives them
    sampler_logprobs: Float[Tensor, "T"] | None = None
    token_advantages: Float[Tensor, "T"] | None = None  # None: all tokens have the sequence's
    reference_logprobs: Float[Tensor, "T"] | None = None
    old_values: Float[Tensor, "T"] | None = None
    returns: Float[Tensor, "T"] | None = None
    old_experts: Experts | None = None  # what the routers' choice is compared with; None: with nothing

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.sequence.response_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
    """What the update saw of one sequence, in the mini-batch that trained it."""

    index: int
    mini_batch: int
    num_tokens: int
    num_clipped: int
    sequence_ratio: float
    entropy_sum: float
    old_logprobs: Float[Tensor, "T"]  # on the CPU, as the next
    log_ratios: Float[Tensor, "T"]  # log π_θ/π_old of each token
    num_masked: int = 0  # tokens that a correction or OPSM has dropped
    ratio_sum: float = 0.0  # of the token ratios π_θ/π_old
    ratio_square_sum: float = 0.0
    gradient_weight: float = 0.0  # Σ_t |∂ per_sequence / ∂ log π_t|
    correction_weight: float = 1.0  # mean over its tokens


def items_of(batch: Batch, old: Mapping[int, Old], actor: ActorConfig) -> dict[int, Item]:
    """The trainable rollouts by index, with what is known of π_old and with the experts they replay."""
    sequences, rollouts = dict(trainable_items(batch, actor)), rollouts_of(batch)
    first = set(mini_batches(batch, actor.mini_batches)[0])
    found = {}
    for index, sequence in sequences.items():
        # Only in the first mini-batch can the policy still be π_old, and its routers' choice π_old's.
        known = old.get(index) if index in first else old[index]
        if actor.routing_replay == "policy" and known is not None and index not in first:
            sequence = replace(sequence, experts=known.experts)
        found[index] = Item(
            index=index,
            sequence=sequence,
            advantage=batch.advantages[index],
            token_advantages=batch.token_advantages.get(index),
            sampler_logprobs=rollouts[index].sampler_logprobs,
            old_logprobs=None if known is None else known.logprobs,
            reference_logprobs=batch.appraisal.reference_logprobs.get(index),
            old_values=batch.appraisal.values.get(index),
            returns=batch.returns.get(index),
            old_experts=rollouts[index].experts if known is None else known.experts,
        )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """What a forward pass showed of its sequences, still on its device: a GPU is waited for once a mini-batch."""

    items: Sequence[Item]
    by_token: Float[Tensor, "K N"]
    sequence_ratio: Float[Tensor, "B"]


def observe(
    items: Sequence[Item],
    result: Surrogate,
    logprobs: Float[Tensor, "N"],
    old: Float[Tensor, "N"],
    entropy: Float[Tensor, "N"],
    weights: Float[Tensor, "N"] | None,
) -> Observation:
    """Must come before the backward pass, whose graph it reads."""
    (slope,) = torch.autograd.grad(result.per_sequence.sum(), logprobs, retain_graph=True)
    log_ratio = logprobs.detach() - old
    ratio = log_ratio.exp()
    weights = torch.ones_like(ratio) if weights is None else weights
    summed = [result.clipped, result.masked, ratio, ratio**2, slope.abs(), weights, entropy.detach()]
    by_token = torch.stack([*summed, old, log_ratio])
    return Observation(items=items, by_token=by_token, sequence_ratio=result.sequence_ratio)


def trained_of(observations: Sequence[Observation], mini_batch: int) -> tuple[Trained, ...]:
    """One a sequence, brought to the CPU in one go."""
    if not observations:
        return ()
    items = [item for one in observations for item in one.items]
    by_token = torch.cat([one.by_token for one in observations], dim=1).cpu()
    ratios = torch.cat([one.sequence_ratio for one in observations]).tolist()
    return tuple(
        Trained(
            index=item.index,
            mini_batch=mini_batch,
            num_tokens=item.length,
            num_clipped=int(sums[0]),
            num_masked=int(sums[1]),
            sequence_ratio=sequence_ratio,
            ratio_sum=sums[2],
            ratio_square_sum=sums[3],
            gradient_weight=sums[4],
            correction_weight=sums[5] / item.length,
            entropy_sum=sums[6],
            old_logprobs=piece[-2].clone(),
            log_ratios=piece[-1].clone(),
        )
        for item, sequence_ratio, piece in zip(
            items, ratios, by_token.split([item.length for item in items], dim=1), strict=True
        )
        for sums in [piece[:-2].double().sum(1).tolist()]
    )


def parts_of(trained: Sequence[Trained], num_mini_batches: int) -> list[list[Trained]]:
    """The sequences of each mini-batch; of one that trained nothing, none."""
    return [[item for item in trained if item.mini_batch == number] for number in range(num_mini_batches)]
