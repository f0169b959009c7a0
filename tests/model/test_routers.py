"""Which routers are found and proven, and which are refused: a router that is not understood is never overruled."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.mixtures import GROUP_LIMITED, MIXTURES, random_experts, routers_of
from torch import Tensor, nn

from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients, response_likelihood
from gspo.model.routing import Routing, find_routing

NewPolicy = Callable[..., Policy]
LLAMA4: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}
SEQUENCE = TokenSequence(prompt_ids=(4, 5, 6), response_ids=torch.tensor([7, 8]))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_familys_routers_are_found_with_their_numbers(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family, **MIXTURES[family])
    routing = policy.routing
    assert routing is not None and policy.unknown_routers is None
    experts = 8 if family == "deepseek_v3" else 5  # deepseek's first layer, of four, is dense
    assert (routing.num_layers, routing.num_experts, routing.top_k) == (3, experts, 2)
    assert len(routers_of(policy)) == 3


def test_dense_layers_among_others_have_no_router(new_policy: NewPolicy) -> None:
    changes = {**MIXTURES["qwen3_moe"], "num_hidden_layers": 5, "mlp_only_layers": [0, 3]}
    routing = new_policy("qwen3_moe", **changes).routing
    assert routing is not None and routing.num_layers == 3


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2", "glm"])
def test_a_dense_model_has_no_routing_and_nothing_unknown(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family)
    assert policy.routing is None and policy.unknown_routers is None
    with torch.no_grad():
        likelihood = response_likelihood(policy, [SEQUENCE], keep_router_logits=True)
    assert likelihood.experts is None and likelihood.router_logits == ()


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("phimoe", {"num_local_experts": 4}, "PhimoeTopKRouter: it does not pick its experts by topk"),
        ("llama4_text", LLAMA4, "Llama4Router: it does not return (logits, weights, indices)"),
        ("deepseek_v2", GROUP_LIMITED, "DeepseekV2TopkRouter: experts that are replayed get no weight of their own"),
    ],
)
def test_routers_of_another_kind_are_left_alone_and_named(
    family: str, changes: dict[str, Any], why: str, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy(family, **changes)
    assert policy.routing is None and policy.unknown_routers == why
    routers = [module for module in policy.model.modules() if "outer" in type(module).__name__]
    assert routers and all(getattr(router.forward, "__func__", None) is type(router).forward for router in routers)
    likelihood = response_likelihood(policy, [SEQUENCE])
    assert likelihood.experts is None
    torch.testing.assert_close(likelihood.logprobs, plain_logprobs(policy, [SEQUENCE]), rtol=0, atol=1e-5)


def test_without_its_group_limit_the_same_family_is_replayed(new_policy: NewPolicy) -> None:
    routing = new_policy("deepseek_v2", **{**GROUP_LIMITED, "topk_method": "greedy"}).routing
    assert routing is not None and (routing.num_layers, routing.num_experts) == (4, 8)


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.int16), (300, torch.int16)])
def test_experts_take_a_byte_each_as_far_as_a_byte_goes(
    experts: int, dtype: torch.dtype, new_policy: NewPolicy
) -> None:
    sizes = {"num_experts": experts, "moe_intermediate_size": 4, "num_hidden_layers": 1}
    policy = new_policy("qwen3_moe", **{**MIXTURES["qwen3_moe"], **sizes})
    with torch.no_grad():  # the highest number is chosen, and must come through
        routers_of(policy)[0].weight[-1] *= 100
        ids = torch.arange(3, 15)
        sequence = TokenSequence(prompt_ids=(4, 5, 6), response_ids=ids)
        live = response_likelihood(policy, [sequence])
        assert live.experts is not None
        (own,) = live.experts
        assert own.row.dtype == own.prefix.dtype == dtype
        assert own.row.min() >= 0 and own.row.max() == experts - 1
        replayed = response_likelihood(policy, [TokenSequence(prompt_ids=(4, 5, 6), response_ids=ids, experts=own)])
    assert torch.equal(replayed.logprobs, live.logprobs)


def test_a_routers_jitter_is_off_even_where_activations_are_recomputed(new_policy: NewPolicy) -> None:
    policy = new_policy("mixtral", **MIXTURES["mixtral"], router_jitter_noise=0.3)
    checkpoint_gradients(policy)
    policy.model.train()  # which changes nothing
    sequence = TokenSequence(prompt_ids=(4, 5), response_ids=torch.tensor([6, 7, 8]))
    one, two = (response_likelihood(policy, [sequence]).logprobs for _ in range(2))
    assert torch.equal(one, two)


def test_a_saved_model_has_its_routing_again(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    policy.save(tmp_path)
    again = new_policy("qwen3_moe", weights=tmp_path, seed=1, **MIXTURES["qwen3_moe"])
    told = random_experts(policy, [SEQUENCE])
    assert again.routing is not None
    with torch.no_grad():
        assert torch.equal(response_likelihood(again, told).logprobs, response_likelihood(policy, told).logprobs)


class OwnRouter(nn.Module):
    """A router as it should be, which picks 2 of 4 experts; its kinds break one promise each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, states: Tensor) -> Any:
        logits = states @ self.weight.T
        weights, experts = self.pick(logits)
        return logits, weights, experts

    def pick(self, logits: Tensor) -> Any:
        return logits.softmax(-1).topk(2)


class ArgmaxRouter(OwnRouter):
    def pick(self, logits: Tensor) -> Any:
        chosen = logits.argsort(-1, descending=True)[:, :2]
        return logits.softmax(-1).gather(1, chosen), chosen


class MaskingRouter(OwnRouter):
    def pick(self, logits: Tensor) -> Any:
        weights, chosen = logits.softmax(-1).topk(2)
        return weights * (weights >= logits.softmax(-1).topk(3).values[:, 1:2]), chosen


class DeafRouter(OwnRouter):
    def pick(self, logits: Tensor) -> Any:
        return logits.softmax(-1).topk(2).values, logits.argsort(-1, descending=True)[:, :2]


class BareRouter(OwnRouter):
    def forward(self, states: Tensor) -> Any:
        return states @ self.weight.T


class ForgetfulRouter(OwnRouter):
    calls = 0

    def pick(self, logits: Tensor) -> Any:
        self.calls += 1
        weights, chosen = logits.softmax(-1).topk(2)
        return weights * self.calls, chosen


class OwnTrunk(nn.Module):
    def __init__(self, routers: list[Any], deaf: int | None = None) -> None:
        super().__init__()
        self.deaf = deaf  # a layer that picks its experts from the logits again
        self.embedding = nn.Embedding(9, 6)
        nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(0))
        self.routers = nn.ModuleList(routers)
        self.shift = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        states = self.embedding(input_ids)[0]
        for layer, router in enumerate(self.routers):
            output = router(states)
            logits, weights, experts = output if isinstance(output, tuple) else (output, output[:, :2], None)
            chosen = logits.topk(2).indices if experts is None or layer == self.deaf else experts
            weights = logits.softmax(-1).topk(2).values if layer == self.deaf else weights
            states = states + (weights[..., None] * self.shift[chosen]).sum(1)
        return SimpleNamespace(last_hidden_state=states[None])


def test_a_model_of_ones_own_is_known_by_what_its_router_does() -> None:
    trunk = OwnTrunk([OwnRouter(), OwnRouter()])
    routing, reason = find_routing(trunk, trunk)
    assert (
        reason is None
        and isinstance(routing, Routing)
        and (routing.num_layers, routing.num_experts, routing.top_k) == (2, 4, 2)
    )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ArgmaxRouter, "topk"),
        (MaskingRouter, "no weight of their own"),
        (DeafRouter, "does not use the experts"),
        (BareRouter, "does not return"),
        (ForgetfulRouter, "something else"),
    ],
)
def test_a_router_that_breaks_one_promise_is_refused_and_left_as_it_was(kind: type[OwnRouter], why: str) -> None:
    trunk = OwnTrunk([OwnRouter(), kind()])
    routing, reason = find_routing(trunk, trunk)
    assert routing is None and reason is not None and why in reason
    assert reason.partition(":")[0] == ", ".join(sorted(["OwnRouter", kind.__name__]))
    assert all("watched" not in getattr(router.forward, "__qualname__", "") for router in trunk.routers)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_does_not_heed_its_router_is_found_out(layer: int) -> None:
    trunk = OwnTrunk([OwnRouter(), OwnRouter()], deaf=layer)
    routing, reason = find_routing(trunk, trunk)
    assert routing is None and reason == "OwnRouter: the model does not use the experts that its router returns"


class ProbabilityRouter(OwnRouter):
    def forward(self, states: Tensor) -> Any:
        probabilities = (states @ self.weight.T).softmax(-1)
        return probabilities, *probabilities.topk(2)


def test_logits_are_logits_whatever_the_router_gives_in_their_place() -> None:
    probabilities = []
    for kind in (OwnRouter, ProbabilityRouter):
        trunk = OwnTrunk([kind(), kind()])
        routing, _ = find_routing(trunk, trunk)
        assert routing is not None
        with routing.traced(keep_logits=True) as trace:
            trunk(input_ids=torch.arange(9)[None], use_cache=False)
        probabilities.append(torch.stack(trace.router_logits).softmax(-1))
    torch.testing.assert_close(*probabilities)


def test_layers_of_different_sizes_are_refused() -> None:
    other = OwnRouter()
    other.weight = nn.Parameter(torch.randn(3, 6, generator=torch.Generator().manual_seed(1)))
    trunk = OwnTrunk([OwnRouter(), other])
    assert find_routing(trunk, trunk) == (None, "OwnRouter: its layers differ in their numbers of experts")


def test_experts_without_a_router_that_could_be_watched_are_refused() -> None:
    class OwnExperts(nn.Module):
        pass

    trunk = OwnTrunk([])
    assert find_routing(trunk, trunk) == (None, None)
    trunk.experts = OwnExperts()
    assert find_routing(trunk, trunk) == (None, "OwnExperts: no router beside these")
    trunk.vision = OwnRouter()  # of a part that text does not pass through
    assert find_routing(trunk, trunk) == (None, "OwnRouter: no pass over text calls it")
