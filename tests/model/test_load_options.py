"""Another attention, and further arguments for transformers: honoured, or refused by the key's name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.samples import query_of
from tests.sampling import sample_groups

from gspo.engine.embedded.fast_decode import fast_decoder
from gspo.errors import UserError
from gspo.model.load import empty_model, load_config
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.recipe.sections import ModelConfig, RolloutConfig

NewPolicy = Callable[..., Policy]


@pytest.fixture
def saved(new_policy: NewPolicy, tmp_path: Path) -> Path:
    new_policy("qwen3").save(tmp_path / "saved")
    return tmp_path / "saved"


def loaded(path: Path, policy: Policy, **options: Any) -> Policy:
    return load_policy(ModelConfig(path=str(path), device="cpu", **options), policy.tokenizer, seed=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_an_attention_that_is_asked_for_is_that_of_training_and_sampling(
    attention: str, saved: Path, new_policy: NewPolicy, ragged_sequences: Any
) -> None:
    plain = new_policy("qwen3")
    policy = loaded(saved, plain, attn_implementation=attention)
    assert policy.supports_packing == (attention == "sdpa")
    assert (fast_decoder(policy.trunk) is not None) == (attention == "sdpa")
    if attention == "eager":
        assert policy.model.config._attn_implementation == "eager"
    sequences: list[TokenSequence] = ragged_sequences(7, vocabulary=len(plain.tokenizer))
    with torch.no_grad():
        ours, theirs = (response_likelihood(own, sequences).logprobs for own in (policy, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    settings = RolloutConfig(max_new_tokens=8)
    (one,), (two,) = (sample_groups(own, [query_of([4, 5])], settings, group_size=4, seed=0) for own in (policy, plain))
    for ours_, theirs_ in zip(one.samples, two.samples, strict=True):
        assert torch.equal(ours_.token_ids, theirs_.token_ids)
        torch.testing.assert_close(ours_.sampler_logprobs, theirs_.sampler_logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("attention", "message"),
    [("nonsense", "is not supported"), ("flash_attention_2", "FlashAttention2"), ("sdpa", "does not support")],
)
def test_an_attention_that_cannot_be_had_is_refused_without_weights(attention: str, message: str) -> None:
    family = {"model_type": "gpt_oss" if attention == "sdpa" else "qwen3", "num_hidden_layers": 1}
    recipe = ModelConfig(architecture=family, tokenizer="fit", attn_implementation=attention)
    with pytest.raises(UserError, match=f"attn_implementation: {attention}: no model can be made: (.|\n)*{message}"):
        empty_model(recipe, load_config(recipe))


def test_further_arguments_reach_the_configuration_and_the_files(saved: Path, new_policy: NewPolicy) -> None:
    plain = new_policy("qwen3")
    kwargs = {"rms_norm_eps": 0.25, "revision": "main", "local_files_only": True}
    policy = loaded(saved, plain, kwargs=kwargs)
    assert policy.model.config.rms_norm_eps == policy.model.model.norm.variance_epsilon == 0.25
    sequences = [TokenSequence(prompt_ids=(4, 5), response_ids=torch.tensor([6, 7]))]
    with torch.no_grad():
        ours, theirs = (response_likelihood(own, sequences).logprobs for own in (policy, plain))
    assert not torch.allclose(ours, theirs)
    weights = load_policy(  # as a resumed run loads its own
        ModelConfig(path=str(saved), device="cpu", kwargs=kwargs), plain.tokenizer, seed=0, weights=saved
    )
    assert weights.model.config.rms_norm_eps == 0.25


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("torch_dtype", "model.dtype"),
        ("attn_implementation", "set model.attn_implementation"),
        ("quantization_config", "docs/guides/models.md"),
        ("token", "docs/guides/models.md"),
        ("rms_norm_epz", "did you mean rms_norm_eps?"),
        ("revison", "did you mean revision?"),
    ],
)
def test_arguments_that_gspo_sets_or_nobody_takes_are_refused(name: str, fix: str, saved: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.kwargs: ") as caught:
        load_config(ModelConfig(path=str(saved), kwargs={name: "x"}))
    assert name in caught.value.what and caught.value.fix is not None and fix in caught.value.fix
