"""Replayed experts against a mixture-of-experts layer written out by hand in float64: values and all gradients."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.mixtures import MIXTURES, live_experts, random_experts, routers_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood

NewPolicy = Callable[..., Policy]
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_moe of raw probabilities": {"norm_topk_prob": False},
    "qwen3_moe with a dense layer": {"mlp_only_layers": [1]},
    "deepseek_v3": {},
    "deepseek_v3 of raw scores": {"norm_topk_prob": False},
}


def experts_output(block: Any, states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Σ_k w_k · down(silu(gate x) · up x) of the experts named, token by token."""
    gate, up = torch.einsum("nkih,nh->nki", block.experts.gate_up_proj[experts], states).chunk(2, dim=-1)
    each = torch.einsum("nkhi,nki->nkh", block.experts.down_proj[experts], F.silu(gate) * up)
    return (weights[:, :, None] * each).sum(1)


def qwen3_moe(block: Any, states: Tensor, experts: Tensor, config: Any) -> Tensor:
    """Softmax over all experts, of which those named are taken and, where the model does so, normalised."""
    exponentials = (states @ block.gate.weight.T).exp()
    weights = exponentials.gather(1, experts) / exponentials.sum(1, keepdim=True)
    if config.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return experts_output(block, states, experts, weights)


def deepseek_v3(block: Any, states: Tensor, experts: Tensor, config: Any) -> Tensor:
    """Sigmoids, taken, normalised, scaled; the bias of the choice is no part of the weight."""
    weights = 1 / (1 + (-(states @ block.gate.weight.T)).exp()).gather(1, experts)
    if config.norm_topk_prob:
        weights = weights / weights.sum(1, keepdim=True)
    return experts_output(block, states, experts, config.routed_scaling_factor * weights) + block.shared_experts(states)


WRITTEN_OUT = {"qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}


class Reference:
    """A policy's model anew in float64, without gspo's attention and routers, its experts' layers by hand."""

    def __init__(self, policy: Policy, family: str) -> None:
        config = copy.deepcopy(policy.model.config)
        config._attn_implementation = "eager"
        self.model: Any = AutoModelForCausalLM.from_config(config).eval()
        self.model.load_state_dict(policy.model.state_dict())
        self.model.double()
        self._experts = torch.empty(0)
        mixed = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "experts")]
        for number, block in enumerate(mixed):

            def forward(states: Tensor, number: int = number, block: Any = block) -> Tensor:
                output = WRITTEN_OUT[family](block, states.flatten(0, 1), self._experts[:, number], config)
                return output.view(states.shape)

            block.forward = forward

    def logprobs(self, sequences: Sequence[TokenSequence]) -> Tensor:
        """Of their responses, each sequence by itself under its experts."""
        found = []
        for sequence in sequences:
            assert sequence.experts is not None
            self._experts = torch.cat([sequence.experts.prefix, sequence.experts.row]).long()
            ids = torch.tensor([*sequence.prompt_ids, *sequence.response_ids])
            table = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
            start = len(sequence.prompt_ids) - 1
            found.append(table[start:].gather(1, sequence.response_ids[:, None])[:, 0])
        return torch.cat(found)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture
def compared(new_policy: NewPolicy) -> Callable[[str], tuple[Policy, Reference]]:
    """A policy and its reference; the correction bias of DeepSeek's routers is not left at zero."""

    def build(model: str) -> tuple[Policy, Reference]:
        family = model.split()[0]
        policy = new_policy(family, **{**MIXTURES[family], **MODELS[model]})
        for router in routers_of(policy):
            if family == "deepseek_v3":
                router.e_score_correction_bias.copy_(torch.linspace(-1, 1, 8))
        return policy, Reference(policy, family)

    return build


@pytest.mark.parametrize("whose", ["live", "other"])
@pytest.mark.parametrize("model", MODELS)
def test_values_and_gradients_are_those_of_the_layer_written_out(
    model: str, whose: str, compared: Any, ragged_sequences: Any
) -> None:
    policy, reference = compared(model)
    assert policy.routing.num_layers == (2 if "dense" in model else 3)
    sequences = ragged_sequences(6, vocabulary=len(policy.tokenizer), seed=5)
    told = random_experts(policy, sequences)
    if whose == "live":  # the reference itself is the model, where it is given the model's own choice
        told = [replace(sequence, experts=live_experts(policy, sequence)) for sequence in sequences]
    expected = reference.logprobs(told)
    assert expected.dtype == torch.float64
    found = response_likelihood(policy, sequences if whose == "live" else told).logprobs
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    direction = torch.linspace(-1, 2, len(found))
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    ours, theirs = gradients(policy.model), gradients(reference.model)
    assert ours.keys() == theirs.keys()
    largest = max(gradient.norm() for gradient in theirs.values())
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7 * largest, name
    routers = [name for name in theirs if name.endswith("gate.weight")]
    assert len(routers) == policy.routing.num_layers
    assert all(theirs[name].norm() > 1e-3 * largest for name in routers)


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_the_routers_gradient_under_replay_is_the_slope_of_the_likelihood(
    model: str, compared: Any, ragged_sequences: Any
) -> None:
    """By finite differences of the reference, whose experts stay what they are however the router turns."""
    policy, reference = compared(model)
    told = random_experts(policy, ragged_sequences(4, vocabulary=len(policy.tokenizer), seed=6))
    response_likelihood(policy, told).logprobs.sum().backward()
    for number, router in enumerate(routers_of(policy)):
        (weight,) = [
            p
            for name, p in reference.model.named_parameters()
            if name.endswith(f"layers.{number + (model == 'deepseek_v3')}.mlp.gate.weight")
        ]
        direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        sums = []
        with torch.no_grad():
            for step in (3e-3, -6e-3):
                weight += step * direction
                sums.append(reference.logprobs(told).sum())
            weight += 3e-3 * direction
        slope = float((sums[0] - sums[1]) / 6e-3)
        assert abs(slope) > 0.05
        assert float((router.weight.grad * direction).sum()) == pytest.approx(slope, rel=1e-2)
