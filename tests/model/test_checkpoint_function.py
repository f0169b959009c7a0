"""The loaded model is the checkpoint: its passes, also those of training, are transformers' own in evaluation mode."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import SHAPE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from gspo.errors import UserError
from gspo.model.packing import TokenSequence
from gspo.model.policy import checkpoint_gradients, load_policy, response_likelihood
from gspo.model.prove import check_noiseless
from gspo.recipe.sections import ModelConfig

DROPOUT = {"attention_dropout": 0.3, "hidden_dropout": 0.3}
PDROP = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
SMALL = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128}
LAYERS = {"ffn_dim": 32, "dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3, "layerdrop": 0.9}
ENCODING = {"d_model": 16, "num_layers": 2, "attention_heads": 2}
EXPERTS = {"num_local_experts": 4, "attention_dropout": 0.3}
NOISY: dict[str, dict[str, Any]] = {
    "llama": {"attention_dropout": 0.3},
    "qwen3": {"attention_dropout": 0.3},
    "qwen3_moe": {**EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gemma2": {"attention_dropout": 0.3},
    "gemma3_text": {"attention_dropout": 0.3},
    "phimoe": {**EXPERTS, "router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
    "mixtral": {**EXPERTS, "router_jitter_noise": 0.3},
    "minimax": {**EXPERTS, "router_jitter_noise": 0.3, "block_size": 8},
    "granitemoe": EXPERTS,
    "opt": {**LAYERS, "word_embed_proj_dim": 16},
    "xglm": {**LAYERS, **ENCODING},
    "biogpt": {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3, "layerdrop": 0.9},
    "gpt2": {**SMALL, **PDROP},
    "codegen": {**SMALL, **PDROP, "rotary_dim": 4},
    "bloom": {**DROPOUT, "n_layer": 2, "n_head": 2},
    "falcon": DROPOUT,
    "gpt_neox": DROPOUT,
    "phi3": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attention_dropout": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.3},
    "gemma3": {},
}
SEQUENCES = [
    TokenSequence(prompt_ids=(3, 4, 5), response_ids=torch.arange(6, 14)),
    TokenSequence(prompt_ids=(7, 8, 9, 10), response_ids=torch.arange(5, 17)),
]


def is_part_of(tree: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a configuration has all that another one has, and the same."""
    trees = {name for name, value in tree.items() if isinstance(value, dict) and isinstance(other.get(name), dict)}
    same = all(other[name] == value for name, value in tree.items() if name not in trees)
    return same and all(is_part_of(tree[name], other[name]) for name in trees)


def gemma3(text: dict[str, Any]) -> Any:
    """A model of text and images, with dropout in its nested configurations."""
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14, "attention_dropout": 0.2}
    config = Gemma3Config(text_config={**text, "attention_dropout": 0.3}, vision_config=vision, eos_token_id=1)
    return Gemma3ForConditionalGeneration(config)


@pytest.fixture
def checkpoint(tmp_path: Path, fitted_tokenizer: Any) -> Callable[[str], Path]:
    """A directory with a model of a family whose configuration has all the noise that there is."""

    def save(family: str) -> Path:
        special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        shape = {**SHAPE, "vocab_size": len(fitted_tokenizer), **special, **NOISY[family]}
        if family == "falcon":  # which works it out
            del shape["head_dim"]
        torch.manual_seed(0)
        model = gemma3(shape) if family == "gemma3" else None
        model = model or AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.25)
        model.save_pretrained(tmp_path / family)
        fitted_tokenizer.save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


@pytest.mark.parametrize("family", NOISY)
def test_every_pass_is_that_of_the_checkpoint_in_evaluation_mode(
    family: str, checkpoint: Callable[[str], Path], fitted_tokenizer: Any, tmp_path: Path, gradient_of: Any
) -> None:
    path, ids = checkpoint(family), torch.arange(3, 17)[None]
    theirs = AutoModelForCausalLM.from_pretrained(path).eval()
    policy = load_policy(ModelConfig(path=str(path), device="cpu"), fitted_tokenizer, seed=0)
    with torch.no_grad():
        assert torch.equal(policy.model(input_ids=ids).logits, theirs(input_ids=ids).logits)

    def passes() -> list[torch.Tensor]:
        policy.model.train()  # which a policy's model does not do
        found = [response_likelihood(policy, SEQUENCES).logprobs for _ in range(2)]
        found[0].sum().backward()
        return [*(logprobs.detach() for logprobs in found), gradient_of(policy.model)]

    kept = passes()
    checkpoint_gradients(policy)
    first, second, gradient = passes()
    assert torch.equal(kept[0], kept[1]) and torch.equal(first, kept[0]) and torch.equal(second, kept[0])
    assert torch.equal(gradient, kept[2]) and gradient.any()
    policy.save(tmp_path / "saved")
    before, after = (json.loads((place / "config.json").read_text()) for place in (path, tmp_path / "saved"))
    assert is_part_of(before, after) and all(before[name] == value for name, value in NOISY[family].items())


def test_a_layer_is_computed_again_for_the_backward_pass_and_only_for_it(
    checkpoint: Callable[[str], Path], fitted_tokenizer: Any
) -> None:
    recipe = ModelConfig(path=str(checkpoint("gpt_neox")), device="cpu")
    policy, calls = load_policy(recipe, fitted_tokenizer, seed=0), list[None]()
    policy.trunk.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    checkpoint_gradients(policy)
    calls.clear()
    with torch.no_grad():
        response_likelihood(policy, SEQUENCES)
    assert len(calls) == 1
    response_likelihood(policy, SEQUENCES).logprobs.sum().backward()
    assert len(calls) == 3


class AlwaysDropping(nn.Module):
    """A module that drops out in evaluation mode, too, as functional dropout does unless it is told not to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return nn.functional.dropout(self.inner(*args, **kwargs), 0.1)


@pytest.mark.parametrize("family", ["gpt_neox", "starcoder2", "gemma3"])
def test_noise_that_is_left_is_refused(family: str, checkpoint: Callable[[str], Path], fitted_tokenizer: Any) -> None:
    policy = load_policy(ModelConfig(path=str(checkpoint(family)), device="cpu"), fitted_tokenizer, seed=0)
    layers = getattr(policy.trunk, "language_model", policy.trunk).layers
    layers[1].mlp = AlwaysDropping(layers[1].mlp)
    state = torch.get_rng_state()
    with pytest.raises(UserError, match=r"passes of .* over the same tokens fail or differ"):
        checkpoint_gradients(policy)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_of_a_trained_pass_alone_is_refused_too(checkpoint: Callable[[str], Path], fitted_tokenizer: Any) -> None:
    policy = load_policy(ModelConfig(path=str(checkpoint("llama")), device="cpu"), fitted_tokenizer, seed=0)
    plain = torch.ones(4, 3)
    with pytest.raises(UserError, match="differ"):
        check_noiseless(policy.model, lambda: plain + torch.rand(4, 3) if torch.is_grad_enabled() else plain)
    check_noiseless(policy.model, lambda: plain)
