"""A sequence's likelihood is its own, whatever stands beside it: proven, or refused where it may not be so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

import gspo
from gspo.check import check
from gspo.errors import UserError
from gspo.model.neighbours import check_padding, check_positions
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood
from gspo.recipe.load import load_recipe
from gspo.run.console import Display

NewPolicy = Callable[..., Policy]
TINY = Path(__file__).parents[1] / "tiny.yaml"
BOUNDARY = 24
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1, 1.1, 1.2, 1.3],
    "long_factor": [3, 5, 8, 12],
}
LONG |= {"original_max_position_embeddings": BOUNDARY}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
USUAL = {"rope_type": "default", "rope_theta": 10000.0}
TWO_KINDS = ["sliding_attention", "full_attention"]
OLD_LONG = {"original_max_position_embeddings": BOUNDARY, "rope_parameters": LONG}
# Families whose table is another one beyond 24 tokens, by whatever key and module.
CHANGING: dict[str, dict[str, Any]] = {
    "phi3": OLD_LONG,
    "llama": {"rope_parameters": LONG},
    "phimoe": {"rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 1.3}, "num_local_experts": 4},
    "qwen2": {"max_position_embeddings": BOUNDARY, "rope_parameters": DYNAMIC},
    "gpt_neox": {"max_position_embeddings": BOUNDARY, "rope_parameters": {**DYNAMIC, "partial_rotary_factor": 1.0}},
    "gemma3_text": {
        "max_position_embeddings": BOUNDARY,
        "layer_types": TWO_KINDS,
        "rope_parameters": {"sliding_attention": USUAL, "full_attention": DYNAMIC},
    },
}
STATIC: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    "olmo2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "gemma3_text": {"layer_types": TWO_KINDS, "rope_parameters": {"sliding_attention": USUAL, "full_attention": USUAL}},
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2},
}


def empty(family: str, changes: dict[str, Any]) -> Any:
    with torch.device("meta"):
        shape = {**SHAPE, "vocab_size": 24, "pad_token_id": 0, **changes}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))


@pytest.mark.parametrize("family", CHANGING)
def test_sequences_on_both_sides_of_a_table_of_positions_are_refused(family: str) -> None:
    model = empty(family, CHANGING[family])
    check_positions(model, shortest=3, longest=BOUNDARY, where="x")
    with pytest.raises(UserError, match=f"more than {BOUNDARY} tokens") as caught:
        check_positions(model, shortest=3, longest=BOUNDARY + 1, where="x")
    assert "rollout.max_new_tokens" in str(caught.value) and "queries.max_prompt_tokens" in str(caught.value)


@pytest.mark.parametrize("family", ["phi3", "phimoe", "llama"])
def test_sequences_that_all_have_the_long_table_are_not_refused(family: str) -> None:
    model = empty(family, CHANGING[family])
    check_positions(model, shortest=BOUNDARY + 1, longest=100, where="x")
    with pytest.raises(UserError):
        check_positions(model, shortest=BOUNDARY, longest=100, where="x")


@pytest.mark.parametrize("family", STATIC)
def test_a_table_that_never_changes_is_not_refused(family: str) -> None:
    check_positions(empty(family, STATIC[family]), shortest=1, longest=5000, where="x")


@pytest.mark.parametrize("family", ["phi3", "phimoe", "gemma3_text"])
def test_within_the_limit_a_likelihood_is_the_same_beside_the_longest(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family, **CHANGING[family])

    def likelihood(*lengths: int) -> Any:
        ids = [[4 + place % 9 for place in range(length)] for length in lengths]
        rows = [TokenSequence(prompt_ids=(*own[:3],), response_ids=torch.tensor(own[3:])) for own in ids]
        with torch.no_grad():
            return response_likelihood(policy, rows).logprobs[: lengths[0] - 3]

    gaps = [float((likelihood(9) - likelihood(9, length)).abs().max()) for length in (BOUNDARY, BOUNDARY + 9)]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]  # beyond it, what is refused would be another number


def recipe_of(**rollout: int) -> Any:
    recipe = load_recipe(TINY)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    shape = {**(recipe.model.architecture or {}), "model_type": "phi3", "original_max_position_embeddings": 64}
    shape |= {"rope_parameters": {**LONG, **factors}, "num_key_value_heads": 2, "pad_token_id": 0}
    changes = {"model": recipe.model.model_copy(update={"architecture": shape})}
    return recipe.model_copy(update={**changes, "rollout": recipe.rollout.model_copy(update=rollout)})


def test_check_and_eval_name_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_policy: NewPolicy) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="another one in a pass over more than 64 tokens"):
        [*check(recipe_of(max_new_tokens=64))]
    new_policy("phi3", **CHANGING["phi3"]).save(tmp_path / "phi")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 2 =", "answer": "3"}\n')
    suite = {"name": "sums", "queries": {"path": "rows.jsonl"}, "reward": "exact_match", "max_new_tokens": 30}
    with pytest.raises(UserError, match="a suite's max_new_tokens"):
        gspo.evaluate("phi", [suite], display=Display(quiet=True))


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True, "layer_types": TWO_KINDS}),
        ("cpmant", {"dim_head": 8, "dim_ff": 32, "prompt_length": 2}),
    ],
)
def test_a_model_that_sees_later_tokens_is_refused(family: str, shape: dict[str, Any], new_policy: NewPolicy) -> None:
    with pytest.raises(UserError, match="from left to right"):
        new_policy(family, **shape)


def test_the_proof_of_padding_notices_neighbours(new_policy: NewPolicy) -> None:
    """A model that normalises over all rows is another one beside others."""
    policy = new_policy("gemma2")
    check_padding(policy.model, policy.trunk)

    def over_rows(module: Any, inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state - output.last_hidden_state[:, :1].mean(0, keepdim=True)
        return output

    hook = policy.trunk.register_forward_hook(over_rows)
    with pytest.raises(UserError):
        check_padding(policy.model, policy.trunk)
    hook.remove()
    check_padding(policy.model, policy.trunk)
