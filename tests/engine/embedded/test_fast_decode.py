"""The fast decoder against the modules it stands for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampling import generate
from torch import nn

from gspo.engine.embedded import fast_decode
from gspo.engine.embedded.decoding import Means
from gspo.engine.embedded.fast_decode import fast_decoder
from gspo.engine.embedded.proof import proven_means
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig

NewPolicy = Callable[..., Policy]
PROMPTS = [[4, 5, 6], [7, 8, 9, 10, 11]]


@pytest.mark.parametrize("is_usual", [True, False])
def test_only_the_decoders_that_it_knows_are_fast(is_usual: bool, new_policy: NewPolicy) -> None:
    known, others = ["qwen3", "llama", "qwen3_moe"], ["olmoe", "glm", "gpt2", "gemma2", "granite"]
    changes: dict[str, dict[str, Any]] = {"granite": {"residual_multiplier": 0.5}}
    with torch.inference_mode():
        for family in known if is_usual else others:
            means = proven_means(new_policy(family, **changes.get(family, {})))
            assert (means is Means.FAST) == is_usual and means <= Means.OWN_MODULES, family


@pytest.mark.parametrize("family", ["olmoe", "glm"])
def test_a_decoder_that_is_built_alike_and_called_otherwise_decodes_by_its_modules(
    family: str, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy(family)
    groups = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=9), group_size=2, seed=0)
    pairs = [(prompt, response) for prompt, group in zip(PROMPTS, groups, strict=True) for response in group]
    with torch.no_grad():
        expected = plain_logprobs(
            policy, [TokenSequence(prompt_ids=tuple(p), response_ids=r.token_ids) for p, r in pairs]
        )
    torch.testing.assert_close(torch.cat([r.sampler_logprobs for _, r in pairs]), expected, rtol=0, atol=1e-5)


def test_a_layer_that_keeps_a_part_of_the_past_only_is_left_to_its_modules(new_policy: NewPolicy) -> None:
    with torch.inference_mode():
        assert fast_decoder(new_policy("mistral", sliding_window=4).trunk) is None


def test_a_projection_with_an_adapter_is_left_to_its_modules(new_policy: NewPolicy) -> None:
    class Adapted(nn.Linear):
        pass

    trunk = new_policy("qwen3").trunk
    projection = trunk.layers[1].self_attn.q_proj
    projection.__class__ = Adapted
    with torch.inference_mode():
        assert fast_decoder(trunk) is None


def test_a_decoder_that_computes_something_else_is_not_used(
    new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy("llama")
    monkeypatch.setattr(fast_decode, "_rotated", lambda states, cos, sin: states)
    with torch.inference_mode():
        assert proven_means(policy) is Means.OWN_MODULES


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_it_samples_what_the_modules_sample(
    family: str, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = new_policy(family)

    def sampled() -> list[Any]:
        groups = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=20), group_size=4, seed=0)
        return [(response.token_ids.tolist(), response.sampler_logprobs) for group in groups for response in group]

    found = sampled()
    monkeypatch.setattr("gspo.engine.embedded.decoding.fast_decoder", lambda trunk: None)
    for (ids, logprobs), (expected_ids, expected) in zip(found, sampled(), strict=True):
        assert ids == expected_ids
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)


def test_updated_weights_are_used_at_once(new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3")

    def sampled() -> list[float]:
        groups = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=4), group_size=1, seed=0)
        return [float(response.sampler_logprobs.sum()) for group in groups for response in group]

    before = sampled()
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    assert sampled() != before
