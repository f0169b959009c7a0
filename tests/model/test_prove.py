"""The proof at load: what counts as the same computation, what does not, and that a misfit is a reason, not a crash."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gspo.model.prove import MISFITS, TOLERANCE, computing_in, disagreement, probe_ids, trunk_states

STATES = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_difference_up_to_the_tolerance_of_the_dtype_is_rounding_and_a_larger_one_is_not(dtype: torch.dtype) -> None:
    plain = STATES.to(dtype)
    for share, agrees in ((0.5, True), (2.0, False)):
        factor = 1 + share * TOLERANCE[dtype]
        reason = disagreement(lambda: plain, partial(torch.mul, plain.float(), factor))
        assert (reason is None) == agrees


def test_half_precision_is_given_more_room_than_float32() -> None:
    assert TOLERANCE[torch.float32] == 1e-4 and TOLERANCE[torch.bfloat16] == TOLERANCE[torch.float16] == 5e-2


@pytest.mark.parametrize("wrong", [STATES.flip(0), STATES * torch.nan, STATES * torch.inf])
def test_other_states_and_no_numbers_are_named(wrong: Tensor) -> None:
    assert disagreement(lambda: STATES, lambda: wrong) == "it computes something else"


def test_one_wrong_number_among_many_is_named() -> None:
    plain = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    wrong = plain.clone()
    wrong[3, 4] += 0.01  # 1e-5 of the Euclidean norm, 2e-3 of the largest number
    assert disagreement(lambda: plain, lambda: wrong) == "it computes something else"


def test_another_shape_is_named_though_it_could_be_broadcast() -> None:
    same = STATES[:1].expand(5, 7)
    assert disagreement(lambda: same, lambda: same[:1]) == "it has the shape [1, 7] in place of [5, 7]"


@pytest.mark.parametrize("kind", MISFITS)
def test_what_a_model_that_is_built_otherwise_raises_is_the_reason(kind: type[Exception]) -> None:
    def fail() -> Tensor:
        raise kind("no such module")

    assert "no such module" in str(disagreement(lambda: STATES, fail))
    assert "no such module" in str(disagreement(fail, lambda: STATES))


def test_an_interruption_is_no_reason() -> None:
    def interrupted() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        disagreement(lambda: STATES, interrupted)


def test_no_gradient_is_recorded() -> None:
    weight = torch.ones(5, 7, requires_grad=True)
    outputs: list[Tensor] = []

    def weighted() -> Tensor:
        outputs.append(weight * STATES)
        return outputs[0]

    assert disagreement(lambda: STATES, weighted) is None
    assert not outputs[0].requires_grad and torch.is_grad_enabled()


@pytest.mark.parametrize("vocabulary", [1, 3, 8, 20, 50_257, 262_144])
def test_probe_ids_are_tokens_of_the_model_far_from_special_ones(vocabulary: int) -> None:
    trunk = SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(vocabulary, 1))
    ids = probe_ids(trunk, 15)
    assert int(ids.min()) >= vocabulary // 8 and int(ids.max()) < vocabulary - vocabulary // 8
    assert len(set(ids.tolist())) >= min(15, vocabulary // 2)
    assert torch.equal(probe_ids(trunk, 5, first=10), ids[10:])


def test_rounding_that_neighbours_alone_cause_is_allowed_and_more_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(STATES.shape, generator=generator)
    noise *= 2e-4 * STATES.norm() / noise.norm()
    lenient = partial(disagreement, lambda: STATES, beside=lambda: STATES + noise)
    assert disagreement(lambda: STATES, lambda: STATES - noise) == "it computes something else"
    assert lenient(lambda: STATES - noise) is None
    assert lenient(lambda: STATES + 4 * noise) == "it computes something else"
    # Rows that others change are no yardstick.
    far = partial(disagreement, lambda: STATES, beside=lambda: STATES.flip(0))
    assert far(lambda: STATES + 10 * noise) == "it computes something else"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma3_text"])
def test_a_model_of_half_precision_computes_in_float32_and_is_left_as_it_was(family: str, new_policy: Any) -> None:
    policy = new_policy(family, dtype="bfloat16")
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    with torch.no_grad(), computing_in(torch.float32, policy.model):
        states = trunk_states(policy.trunk)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    assert trunk_states(policy.trunk).dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(states, trunk_states(policy.model.float().base_model))
