"""How a model is decoded: by the fastest means that has the likelihoods of plain passes, and by no other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.sampling import generate, sample_groups
from transformers.cache_utils import DynamicSlidingWindowLayer

from gspo.engine.embedded import decoding, proof
from gspo.engine.embedded.cache import InPlaceLayer
from gspo.engine.embedded.decoding import Means
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.embedded.proof import proven_means
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.errors import UserError
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.sections import RolloutConfig
from gspo.types import Experts

NewPolicy = Callable[..., Policy]
PROMPTS = [[3, 9, 8, 4, 5, 6, 7, 11, 12], [4, 5, 6], [7, 3], [9, 4, 6]]
SSM = {"state_size": 8, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8, "num_key_value_heads": 2}
MAMBA = {f"mamba_{name}": number for name, number in {"d_state": 8, "n_heads": 4, "d_head": 8, "n_groups": 1}.items()}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# A family, what it can be decoded with at most, and its shape.
FAMILIES: list[tuple[str, Means, dict[str, Any]]] = [
    ("qwen3", Means.FAST, {}),
    ("bloom", Means.OWN_MODULES, {"n_layer": 2, "n_head": 2}),
    ("gpt_neo", Means.OWN_MODULES, {"num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}),
    ("mamba2", Means.OWN_MODULES, SSM),
    ("lfm2", Means.OWN_MODULES, {"layer_types": ["conv", "full_attention"]}),
    ("bamba", Means.OWN_MODULES, {"attn_layer_indices": [1], "mamba_chunk_size": 8, **MAMBA}),
    ("gpt_oss", Means.OWN_MODULES, {"sliding_window": 4, **EXPERTS}),
    ("mamba", Means.NO_PADDING, {"state_size": 8}),
    ("falcon_mamba", Means.NO_PADDING, {"state_size": 8}),
    (
        "llama4_text",
        Means.NO_PADDING,
        {
            "attention_chunk_size": 6,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 32,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "no_rope_layers": [1, 0],
        },
    ),
    ("rwkv", Means.NO_CACHE, {"attention_hidden_size": 16}),
    ("minimax", Means.NO_CACHE, {"layer_types": ["linear_attention", "full_attention"], "block_size": 8, **EXPERTS}),
    ("openai-gpt", Means.NO_CACHE, {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}),
]


def drawn_anew(policy: Policy, seed: int = 0) -> Policy:
    """The policy with weights so large that a wrong state shows: some families' new ones are nearly flat."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.model.parameters():
        if parameter.dim() > 1:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.25).to(parameter.dtype)
    return policy


def gap(policy: Policy, plain_logprobs: Any) -> float:
    """The most by which sampled tokens' log-likelihoods differ from those of a plain pass."""
    groups = generate(policy, PROMPTS, RolloutConfig(max_new_tokens=12), group_size=3, seed=0)
    pairs = [(prompt, response) for prompt, group in zip(PROMPTS, groups, strict=True) for response in group]
    with torch.no_grad():
        expected = plain_logprobs(
            policy, [TokenSequence(prompt_ids=tuple(p), response_ids=r.token_ids) for p, r in pairs]
        )
    return float((torch.cat([response.sampler_logprobs for _, response in pairs]) - expected).abs().max())


@pytest.mark.parametrize(("family", "means", "shape"), FAMILIES, ids=[family for family, *_ in FAMILIES])
def test_each_family_samples_from_what_its_plain_passes_compute(
    family: str, means: Means, shape: dict[str, Any], new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = drawn_anew(new_policy(family, **shape))
    assert gap(policy, plain_logprobs) < 1e-4
    assert proven_means(policy) == means
    assert ("decoding" in EmbeddedEngine(policy).describe()) == (means >= Means.NO_PADDING)


@pytest.mark.parametrize("means", [Means.NO_PADDING, Means.NO_CACHE])
def test_slower_means_sample_the_same_tokens_and_experts(means: Means, new_policy: NewPolicy, query_of: Any) -> None:
    policy = new_policy("qwen3_moe")
    queries = [query_of(prompt, number) for number, prompt in enumerate(PROMPTS)]
    options: dict[str, Any] = {"group_size": 2, "seed": 0, "record_experts": True}
    usual: list[Any] = []
    slower: list[Any] = []
    for found, chosen in ((usual, Means.FAST), (slower, means)):
        proof._proven[policy.trunk] = chosen
        for rows in (64, 2):  # all side by side, and one group after the other
            settings = RolloutConfig(max_new_tokens=9, max_rows=rows)
            found += [s for group in sample_groups(policy, queries, settings, **options) for s in group.samples]
    for one, other in zip(usual, slower, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        torch.testing.assert_close(one.sampler_logprobs, other.sampler_logprobs, rtol=0, atol=1e-5)
        for experts in (one.experts, other.experts):
            assert isinstance(experts, Experts)
        assert one.experts is not None and other.experts is not None
        assert torch.equal(one.experts.prefix, other.experts.prefix)
        assert torch.equal(one.experts.row, other.experts.row)


def test_what_is_wrong_beside_padding_is_decoded_without(
    new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding.Rows, "mask", None)
    assert proven_means(new_policy("llama")) is Means.NO_PADDING


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_cache_that_mixes_rows_up_is_not_used(
    family: str, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in (InPlaceLayer, InPlaceLayer.__base__):
        reorder = kind.reorder_cache
        monkeypatch.setattr(kind, "reorder_cache", lambda self, rows, usual=reorder: usual(self, rows.flip(0)))
    assert proven_means(new_policy(family)) is Means.NO_CACHE


def test_rows_that_join_wrongly_are_noticed(
    new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch, refilling: Any
) -> None:
    refilling("fast", 2)
    assert proven_means(new_policy("llama")) is Means.FAST
    join = InPlaceLayer.join

    def shifted(self: Any, other: Any, width: int) -> None:
        join(self, other, width)
        self.keys.copy_(self.keys.roll(1, dims=2))

    monkeypatch.setattr(InPlaceLayer, "join", shifted)
    assert proven_means(new_policy("llama")) is Means.NO_PADDING


@pytest.mark.parametrize(("family", "window"), [("mistral", 20), ("starcoder2", 33)])
def test_the_proof_is_longer_than_a_declared_window(
    family: str, window: int, new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = DynamicSlidingWindowLayer.__init__
    assert proven_means(new_policy(family, sliding_window=window)) is Means.OWN_MODULES

    def shorter(self: Any, *args: Any, **kwargs: Any) -> None:
        new(self, *args, **kwargs)
        self.sliding_window -= 4

    monkeypatch.setattr(DynamicSlidingWindowLayer, "__init__", shorter)
    assert proven_means(new_policy(family, sliding_window=window)) is Means.NO_CACHE


def test_a_model_that_nothing_decodes_rightly_is_refused_in_a_sentence(new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3")

    def look_ahead(module: Any, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state + output.last_hidden_state.mean(1, keepdim=True)
        return output

    policy.trunk.register_forward_hook(look_ahead)
    with pytest.raises(UserError, match="cannot be sampled from token by token") as caught:
        EmbeddedEngine(policy)
    assert caught.value.where == "model.path"


def test_a_half_precision_model_is_not_refused_for_its_rounding(new_policy: NewPolicy) -> None:
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        assert proven_means(new_policy(family, "bfloat16")) <= Means.OWN_MODULES
    for family in ("mixtral", "olmoe", "phimoe"):  # where rounding alone has routers choose other experts
        shape = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
        for seed in range(4):
            assert proven_means(drawn_anew(new_policy(family, "bfloat16", **shape), seed)) <= Means.OWN_MODULES


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "mamba2"])
def test_a_half_precision_model_whose_states_are_of_float32_samples_and_learns(
    family: str, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = drawn_anew(new_policy(family, "bfloat16", **(SSM if family == "mamba2" else {"state_size": 8})))
    assert gap(policy, plain_logprobs) < 0.2
    likelihood = response_likelihood(policy, [TokenSequence(prompt_ids=(3, 9), response_ids=torch.tensor([8, 4, 5]))])
    likelihood.logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.model.parameters())


def test_weights_that_change_while_rows_of_one_length_are_decoded_are_used(
    new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy("llama")
    for means in (Means.NO_PADDING, Means.NO_CACHE):

        def look() -> None:
            if decoder.transcript.num_steps == 4 and decoder.transcript._next_version == 0:  # noqa: B023
                for parameter in policy.model.parameters():
                    parameter.data.mul_(1.1)
                decoder.change_weights(1, keep_cache=False)  # noqa: B023

        found = dict[int, Completion]()
        decoder = decoding.Decoding(
            policy=policy,
            prompts=[Prompt(ids=tuple(PROMPTS[1]), key=key, max_new_tokens=8) for key in range(2)],
            sampling=Sampling(),
            max_rows=2,
            check=look,
            put=found.__setitem__,
            means=means,
        )
        with torch.no_grad():
            decoder.generate()
            assert len(found) == 2
            for response in found.values():
                assert response.versions == ((0, 4), (1, 4))
                sequence = TokenSequence(prompt_ids=tuple(PROMPTS[1]), response_ids=response.token_ids)
                expected = plain_logprobs(policy, [sequence])
                torch.testing.assert_close(response.logprobs[4:], expected[4:], rtol=0, atol=1e-5)
                assert not torch.allclose(response.logprobs[:4], expected[:4], rtol=0, atol=1e-3)
