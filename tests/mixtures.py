"""Small mixtures of experts, and what their routers choose, seen by hooks in plain passes without gspo's own means."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.types import Experts, Sample

# Layers, experts and experts a token differ in number: what is transposed does not fit.
_SIZES: dict[str, Any] = {"num_hidden_layers": 3, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {  # attention and experts as DeepSeek has them
    **{"num_hidden_layers": 4, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    **{"qk_nope_head_dim": 4, "v_head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}
MIXTURES: dict[str, dict[str, Any]] = {  # whose experts can be replayed
    "qwen3_moe": {**_SIZES, "num_experts": 5, "norm_topk_prob": True},
    "qwen2_moe": {**_SIZES, "num_experts": 5},
    "mixtral": {**_SIZES, "num_local_experts": 5},
    "olmoe": {**_SIZES, "num_experts": 5},
    "gpt_oss": {**_SIZES, "num_local_experts": 5},
    "deepseek_v3": {**_LATENT, "head_dim": 4, "num_local_experts": 8, "routed_scaling_factor": 1.7},
}
GROUP_LIMITED = {**_LATENT, "num_experts": 8, "topk_method": "group_limited_greedy", "first_k_dense_replace": 0}


def routers_of(policy: Policy) -> list[Any]:
    """In the order of the layers."""
    return [module for module in policy.model.modules() if type(module).__name__.endswith("TopKRouter")] or [
        module for module in policy.model.modules() if type(module).__name__ == "DeepseekV3TopkRouter"
    ]


@contextmanager
def router_calls(policy: Policy) -> Iterator[list[tuple[int, Tensor, Any]]]:
    """(layer, input, output) of every call of a router within."""
    calls: list[tuple[int, Tensor, Any]] = []
    hooks = [
        router.register_forward_hook(lambda _, given, output, layer=layer: calls.append((layer, given[0], output)))
        for layer, router in enumerate(routers_of(policy))
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def live_experts(policy: Policy, sequence: TokenSequence) -> Experts:
    """The routers' own choice, in the model's plain pass over one sequence by itself."""
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
    with router_calls(policy) as calls:
        policy.model(input_ids=ids[:, :-1], use_cache=False)
    chosen = torch.stack([output[2] for _, _, output in calls], dim=1)
    start = len(sequence.prompt_ids) - 1
    return Experts(prefix=chosen[:start], row=chosen[start:])


def random_experts(policy: Policy, sequences: Sequence[TokenSequence], seed: int = 0) -> list[TokenSequence]:
    """The sequences with experts that have nothing to do with the routers; neighbours share those of their prompt."""
    routing, generator = policy.routing, torch.Generator().manual_seed(seed)
    assert routing is not None

    def draw(tokens: int) -> Tensor:
        scores = torch.rand(tokens, routing.num_layers, routing.num_experts, generator=generator)
        return scores.argsort(-1)[..., : routing.top_k].to(routing.dtype)

    prefix = draw(len(sequences[0].prompt_ids) - 1)
    found = []
    for before, sequence in pairwise([sequences[0], *sequences]):
        if before.prompt_ids != sequence.prompt_ids:
            prefix = draw(len(sequence.prompt_ids) - 1)
        found.append(replace(sequence, experts=Experts(prefix=prefix, row=draw(len(sequence.response_ids)))))
    return found


def replayed_logprobs(policy: Policy, sequences: Sequence[TokenSequence], plain_logprobs: Any, *rest: Any) -> Tensor:
    """Of the model's plain passes over the sequences one by one, without padding, their experts replayed."""
    found = []
    for sequence in sequences:
        assert policy.routing is not None and sequence.experts is not None
        parts = (sequence.experts.prefix, sequence.experts.row, sequence.experts.row[-1:])  # the last token's: unread
        with policy.routing.traced(torch.cat(parts)):
            found.append(plain_logprobs(policy, [sequence], *rest))
    return torch.cat(found)


def conditioned(sample: Sample, experts: Experts | None = None) -> TokenSequence:
    """A sample as a sequence to be scored."""
    return TokenSequence(prompt_ids=sample.query.prompt_ids, response_ids=sample.token_ids, experts=experts)


@torch.no_grad()
def turn_routers(policy: Policy, seed: int = 1) -> None:
    """New random weights for the routers, and for nothing else."""
    generator = torch.Generator().manual_seed(seed)
    for router in routers_of(policy):
        router.weight.copy_(torch.randn(router.weight.shape, generator=generator))


def sets(experts: Experts) -> list[list[list[int]]]:
    """The experts of each token and layer, in the order of their numbers."""
    lists: list[list[list[int]]] = torch.cat([experts.prefix, experts.row]).sort(-1).values.tolist()
    return lists
