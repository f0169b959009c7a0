"""A model is handed packs only where that is proven right; otherwise it is left as it was and still right."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from gspo.model import trunk
from gspo.model.load import fit_tokenizer
from gspo.model.packing import Block, TokenSequence, pack
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.model.trunk import NAME, enable_packing, packed_attention, packed_pass
from gspo.recipe.sections import ModelConfig

NewPolicy = Callable[..., Policy]
WINDOW: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
PACKING = {
    "qwen3": {"use_sliding_window": True, **WINDOW},
    "qwen3_moe": {},
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "gemma3_text": {},
    "gpt2": {},
    "granite": {},
    "cohere": {},
}
NOT_PACKING = {
    "gemma2": {},  # soft caps on the attention
    "gpt_oss": {},  # sinks
    "qwen2_moe": {
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },  # its window is in its mask
}


def groups(vocabulary: int, number: int = 3) -> list[TokenSequence]:
    """Groups of four that share a long prompt, with short and ragged responses, and a sequence alone."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(3, vocabulary, (count,), generator=generator)

    found = [TokenSequence(prompt_ids=tuple(tokens(2).tolist()), response_ids=tokens(40))]
    for size in range(number):
        prompt = tuple(tokens(12 + 6 * size).tolist())
        found += [TokenSequence(prompt_ids=prompt, response_ids=tokens(n)) for n in (1, 7, 9, 3)]
    return found


def check_values(policy: Policy, plain_logprobs: Any) -> None:
    sequences = groups(len(policy.tokenizer))
    with torch.no_grad():
        expected = plain_logprobs(policy, sequences)
        found = response_likelihood(policy, sequences).logprobs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", PACKING)
def test_a_shared_prompt_is_read_once(
    family: str, new_policy: NewPolicy, plain_logprobs: Any, tokens_read: Any
) -> None:
    policy = new_policy(family, **PACKING[family])
    assert policy.supports_packing
    check_values(policy, plain_logprobs)
    shapes = tokens_read(policy)
    response_likelihood(policy, groups(len(policy.tokenizer)))
    # In one pass: a prompt but for its last token once, then that token and the response but for its last one.
    assert shapes == [(1, 2 + 39 + sum(prompt - 1 + 1 + 7 + 9 + 3 for prompt in (12, 18, 24)))]


@pytest.mark.parametrize("family", NOT_PACKING)
def test_a_model_whose_attention_cannot_be_handed_a_pack_is_right_all_the_same(
    family: str, new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    policy = new_policy(family, **NOT_PACKING[family])
    assert not policy.supports_packing and policy.shared_hidden_size is None
    assert policy.model.config._attn_implementation != NAME
    check_values(policy, plain_logprobs)


def test_a_window_that_the_attention_function_is_not_told_of_is_kept(
    new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    check_values(new_policy("phimoe", sliding_window=20), plain_logprobs)


def ignoring(module: Any, query: Any, key: Any, value: Any, mask: Any, *, layout: Any = None, **kwargs: Any) -> Any:
    """One causal sequence of whatever is in the pack."""
    return sdpa_attention_forward(module, query, key, value, None if layout else mask, **kwargs)


def without_prefix(module: Any, *states: Any, layout: Any = None, **kwargs: Any) -> Any:
    """Rows that see nothing of the prompt they share."""
    if layout is not None:
        blocks: list[Block] = []
        for block in layout.blocks:
            if block.prefix:
                prefix = Block(start=block.start, prefix=0, lengths=(block.prefix,), width=block.prefix, place=None)
                blocks.append(prefix)
            blocks.append(dataclasses.replace(block, start=block.rows.start, prefix=0))
        layout = dataclasses.replace(layout, blocks=tuple(blocks))
    return packed_attention(module, *states, layout=layout, **kwargs)


def refusing(module: Any, *states: Any, layout: Any = None, **kwargs: Any) -> Any:
    if layout is not None:
        raise TypeError("unexpected keyword argument 'layout'")
    return sdpa_attention_forward(module, *states, **kwargs)


def of_layer(wrong: Any, layer: int, module: Any, *states: Any, **kwargs: Any) -> Any:
    """Wrong in one layer only."""
    return (wrong if module.layer_idx == layer else packed_attention)(module, *states, **kwargs)


def anticipating(by: int, module: Any, *states: Any, **kwargs: Any) -> Any:
    """A mask that is off by one."""

    def mask(width: int, prefix: int, window: int | None, like: Any) -> Any:
        return torch.full((width, prefix + width), -torch.inf, dtype=like.dtype).triu(prefix + 1 + by)[None, None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trunk, "_mask", mask)
        return packed_attention(module, *states, **kwargs)


def continuing(model: Any, layout: Any, routing: Any = None) -> Any:
    """Positions that go on from sequence to sequence."""
    return packed_pass(model, dataclasses.replace(layout, positions=torch.arange(len(layout.ids))), routing)


@pytest.fixture
def attention_is() -> Iterator[Callable[[Any], None]]:
    yield lambda function: AttentionInterface.register(NAME, function)
    AttentionInterface.register(NAME, packed_attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", [ignoring, without_prefix, refusing])
def test_attention_that_does_wrong_by_a_pack_is_found_out(
    wrong: Any, dtype: str, new_policy: NewPolicy, plain_logprobs: Any, attention_is: Any
) -> None:
    attention_is(wrong)
    policy = new_policy("qwen3", dtype=dtype)
    assert not policy.supports_packing
    assert policy.model.config._attn_implementation == "sdpa"
    if dtype == "float32":
        check_values(policy, plain_logprobs)


@pytest.mark.parametrize("deviation", [0.02, 0.25])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "granite"])
def test_a_fault_of_one_layer_is_found_out_at_either_precision(
    family: str, dtype: str, deviation: float, new_policy: NewPolicy, attention_is: Any, monkeypatch: Any
) -> None:
    window = {"use_sliding_window": True, "layer_types": 2 * WINDOW["layer_types"], "sliding_window": 4}
    shape = window if family == "qwen3" else {}
    shape |= {"initializer_range": deviation, "num_hidden_layers": 4, "n_layer": 4}
    policy = new_policy(family, dtype=dtype, **shape)
    assert policy.supports_packing

    def is_packed_with(function: Any) -> bool:
        attention_is(function)
        policy.model.set_attn_implementation("sdpa")
        return enable_packing(policy.model, policy.trunk, policy.head.weight.shape[1])

    assert is_packed_with(packed_attention)
    for wrong in (ignoring, without_prefix, partial(anticipating, 1), partial(anticipating, -1)):
        for layer in (0, 3):
            assert not is_packed_with(partial(of_layer, wrong, layer)), (wrong, layer)
    monkeypatch.setattr(trunk, "packed_pass", continuing)
    assert not is_packed_with(packed_attention)


def test_the_right_attention_is_found_right_in_bfloat16_too(new_policy: NewPolicy, attention_is: Any) -> None:
    attention_is(packed_attention)
    for seed in range(5):
        assert new_policy("qwen3", dtype="bfloat16", seed=seed, hidden_size=64, num_hidden_layers=4).supports_packing


def test_a_model_whose_trunk_takes_no_layout_is_read_padded(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy("llama")
    forward = policy.trunk.forward

    def strict(input_ids: Any, attention_mask: Any = None, position_ids: Any = None, use_cache: bool = False) -> Any:
        return forward(input_ids, attention_mask, position_ids, use_cache=use_cache)

    policy.trunk.forward = strict
    policy.model.set_attn_implementation("sdpa")
    assert not enable_packing(policy.model, policy.trunk, 16)
    assert policy.model.config._attn_implementation == "sdpa"


def test_a_saved_model_knows_nothing_of_packs(new_policy: NewPolicy, tmp_path: Path) -> None:
    policy = new_policy("qwen3")
    assert policy.supports_packing
    policy.save(tmp_path)
    for path in tmp_path.glob("*.json"):
        assert "gspo" not in path.read_text(encoding="utf-8")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


def test_probing_moves_no_weight_and_leaves_no_gradient(new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3_moe")
    assert all(parameter.grad is None and parameter.requires_grad for parameter in policy.model.parameters())
    assert torch.is_grad_enabled()
    layout = pack(groups(len(policy.tokenizer)), device=policy.device, hidden_size=policy.shared_hidden_size)
    assert policy.run(layout).hidden.requires_grad


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_a_model_smaller_than_the_probe_loads(family: str) -> None:
    tokenizer = fit_tokenizer(["0 1"])
    assert len(tokenizer) < 9
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8} if family == "qwen3" else {"n_head": 2}
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 9, **heads}
    recipe = ModelConfig(architecture={"model_type": family, **shape}, tokenizer="fit", device="cpu")
    load_policy(recipe, tokenizer, seed=0)
