"""Frozen parameters: no gradient, no state, no change, and less of what they would cost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import FAMILIES
from tests.samples import learner_of, updates

from gspo.errors import UserError
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.model.head import Head, token_likelihood
from gspo.model.parameters import freeze, live_tensors, matching
from gspo.model.policy import Policy
from gspo.recipe.sections import OptimizerConfig

NewPolicy = Callable[..., Policy]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "torch.optim.Muon"])
def test_frozen_parameters_have_no_gradient_no_state_and_stay_as_they_are(
    name: str, dtype: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", dtype=dtype)
    freeze(policy.model, ["*embed_tokens*", "*.mlp.gate.weight", "lm_head.*"])
    before = {key: p.detach().clone() for key, p in policy.model.named_parameters()}
    frozen = {key for key in before if "embed" in key or key.endswith("mlp.gate.weight") or "lm_head" in key}
    assert len(frozen) == 4
    batch = batch_of([[1.0, 0.0], [0.0, 1.0]], vocabulary=len(policy.tokenizer))
    actor = actor_of(mini_batches=2, routing_replay="policy")
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    settings = OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1)
    optimizer = Optimizer(policy.model, settings, total_steps=2)
    for _ in updates(policy, optimizer, batch, actor):
        assert all(p.grad is None for key, p in policy.model.named_parameters() if key in frozen)
    changed = {key for key, p in policy.model.named_parameters() if not torch.equal(p, before[key])}
    assert changed == before.keys() - frozen
    assert {key.partition("/")[2] for key in optimizer.state()} - {""} == changed
    assert len(optimizer.gradient()) == len(changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_costs_no_gradient_and_changes_no_other(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, hidden = torch.randn(50, 8, dtype=dtype), torch.randn(6, 8, dtype=dtype)
    gradients = []
    for is_trained in (True, False):
        head = Head(weight=weight.clone().requires_grad_(is_trained))
        states = hidden.clone().requires_grad_()
        logprobs, entropy = token_likelihood(head, states, torch.arange(6), 0.7)
        (logprobs.sum() + entropy.sum()).backward()
        assert states.grad is not None
        gradients.append(states.grad)
        assert (head.weight.grad is not None) == is_trained
    assert torch.equal(*gradients)


@pytest.mark.parametrize("pattern", ["*embed_tokens*", "lm_head.*"])
def test_a_tied_head_is_frozen_with_its_embedding(pattern: str, new_policy: NewPolicy) -> None:
    policy = new_policy(tie_word_embeddings=True)
    freeze(policy.model, [pattern])
    assert not policy.model.lm_head.weight.requires_grad
    assert not policy.model.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["*.nothing"], r"model\.frozen: '\*\.nothing' matches no parameter\n  fix: there are: model\.embed_tokens"),
        (["*norm*", "layers.0.*"], r"'layers\.0\.\*' matches no parameter(.|\n)*model\.layers\.\*\.self_attn\.q_proj"),
        (["*"], "these patterns match every parameter: nothing is left to train"),
        (["model.*", "lm_head*"], "these patterns match every parameter"),
    ],
)
def test_patterns_that_match_nothing_or_everything_are_refused(
    patterns: list[str], message: str, new_policy: NewPolicy
) -> None:
    with pytest.raises(UserError, match=message):
        freeze(new_policy().model, patterns)


def test_capital_letters_and_brackets_mean_themselves_as_in_a_shell() -> None:
    names = ["layers.0.Wq", "layers.1.Wq", "layers.11.wq"]
    assert matching(["layers.[0-9].Wq"], names, where="here") == {*names[:2]}
    with pytest.raises(UserError, match="matches no parameter"):
        matching(["*.WQ"], names, where="here")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_live_tensors_are_those_of_state_dict_in_its_order(family: str, new_policy: NewPolicy) -> None:
    model: Any = new_policy(family).model
    expected = model.state_dict()
    found = dict(live_tensors(model))
    assert list(found) == list(expected)
    assert all(found[name].data_ptr() == tensor.data_ptr() for name, tensor in expected.items())
