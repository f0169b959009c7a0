"""A reference that follows the policy: by which formula, when, and into what precision."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gspo.errors import UserError
from gspo.learner.reference import RefreshedReference
from gspo.model.policy import Policy
from gspo.recipe.sections import KlConfig

NewPolicy = Callable[..., Policy]


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def refreshed(model: Policy, policy: Policy, **settings: Any) -> RefreshedReference:
    return RefreshedReference(KlConfig(coefficient=0.1, **settings), model, policy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("weight", [1.0, 0.6, 0.01])
def test_a_refresh_mixes_the_weights_by_the_equation(weight: float, dtype: str, new_policy: NewPolicy) -> None:
    policy, reference = new_policy(dtype=dtype, seed=1), new_policy(dtype=dtype, seed=2)
    before, after = weights(reference), weights(policy)
    refreshed(reference, policy, refresh_steps=1, refresh_weight=weight).step(1)
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    for name, found in weights(reference).items():
        expected = weight * after[name].double() + (1 - weight) * before[name].double()
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 4)
        assert found.dtype == getattr(torch, dtype) and (weight < 1 or torch.equal(found, after[name]))
    assert all(torch.equal(own, after[name]) for name, own in weights(policy).items())


def test_masters_that_ranks_hold_are_rounded_as_one_process_would(new_policy: NewPolicy) -> None:
    policy, reference = new_policy(seed=1), new_policy(seed=2)
    before, after = ({name: own.bfloat16() for name, own in weights(p).items()} for p in (reference, policy))
    object.__setattr__(reference, "sharding", SimpleNamespace(dtype=torch.bfloat16))
    refreshed(reference, policy, refresh_steps=1, refresh_weight=0.6).step(1)
    for name, found in reference.model.named_parameters():
        expected = torch.lerp(before[name].float(), after[name].float(), 0.6).bfloat16()
        assert torch.equal(found, expected.float())


def test_tied_weights_are_mixed_once(new_policy: NewPolicy) -> None:
    policy, reference = (new_policy(seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    before, after = (weights(own)["model.embed_tokens.weight"] for own in (reference, policy))
    refreshed(reference, policy, refresh_steps=1, refresh_weight=0.5).step(1)
    torch.testing.assert_close(weights(reference)["model.embed_tokens.weight"], (before + after) / 2)


def test_a_refresh_is_due_every_so_many_steps_and_put_back_with_its_count(new_policy: NewPolicy) -> None:
    policy, reference, other = (new_policy(seed=seed) for seed in (1, 2, 3))
    part, again = refreshed(reference, policy, refresh_steps=3), refreshed(other, policy, refresh_steps=3)
    counts = []
    for step in range(1, 8):
        part.step(step)
        counts.append(part.steps_taken)
    assert counts == [0, 0, 1, 1, 1, 2, 2]
    again.restore(part.state())
    assert again.steps_taken == 2 and all(torch.equal(own, weights(reference)[n]) for n, own in weights(other).items())


def test_a_reference_of_other_shapes_is_refused(new_policy: NewPolicy) -> None:
    with pytest.raises(UserError, match=r"actor\.kl\.reference: other: (.|\n)*refresh_steps: null"):
        refreshed(new_policy(num_hidden_layers=1), new_policy(), refresh_steps=1, reference="other")
