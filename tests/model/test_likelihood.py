"""Log-likelihoods and entropies against the model's own plain forward pass, whatever the cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.model.head import Head
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, response_likelihood

NewPolicy = Callable[..., Policy]
FAMILIES = ["qwen3", "qwen3_moe", "llama", "gpt2", "gemma2", "granite", "cohere", "mistral"]


def vocabulary(policy: Policy) -> int:
    return len(policy.tokenizer)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_plain_forward_pass(
    family: str, temperature: float, new_policy: NewPolicy, ragged_sequences: Any, plain_logprobs: Any
) -> None:
    policy = new_policy(family)
    sequences = ragged_sequences(7, vocabulary=vocabulary(policy))
    with torch.no_grad():
        expected = plain_logprobs(policy, sequences, temperature)
        found = response_likelihood(policy, sequences, temperature=temperature).logprobs
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.3  # or a wrong context would look right


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_from_hidden_states_are_the_models_own(family: str, new_policy: NewPolicy) -> None:
    policy = new_policy(family)
    ids = torch.arange(3, vocabulary(policy))[None]
    with torch.no_grad():
        expected = policy.model(input_ids=ids).logits[0]
        found = policy.head.logits(policy.model.base_model(input_ids=ids).last_hidden_state[0])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_entropy_is_that_of_the_distribution_at_the_temperature(new_policy: NewPolicy, ragged_sequences: Any) -> None:
    policy = new_policy("llama")
    sequences = ragged_sequences(4, vocabulary=vocabulary(policy))
    expected = []
    with torch.no_grad():
        for sequence in sequences:
            ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids]])
            logits = policy.model(input_ids=ids).logits[0, len(sequence.prompt_ids) - 1 : -1].double()
            expected += [torch.distributions.Categorical(logits=row / 0.8).entropy().item() for row in logits]
    likelihood = response_likelihood(policy, sequences, temperature=0.8)
    assert likelihood.entropy.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 50, 10**6])
def test_value_and_gradient_do_not_depend_on_the_chunk(
    chunk_tokens: int,
    new_policy: NewPolicy,
    ragged_sequences: Any,
    plain_logprobs: Any,
    gradient_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = new_policy("qwen3_moe")
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * vocabulary(policy))
    sequences = ragged_sequences(6, vocabulary=vocabulary(policy))
    expected = plain_logprobs(policy, sequences)
    weights = torch.linspace(-1, 1, len(expected))  # each token its own weight: mixed-up tokens would show
    (expected * weights).sum().backward()
    expected_gradient = gradient_of(policy.model)
    found = response_likelihood(policy, sequences).logprobs
    (found * weights).sum().backward()
    difference = (gradient_of(policy.model) - expected_gradient).norm() / expected_gradient.norm()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert difference <= 1e-5


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mistral", "gpt2"])
def test_padding_changes_nothing(family: str, new_policy: NewPolicy, ragged_sequences: Any) -> None:
    policy = new_policy(family)
    short = ragged_sequences(3, vocabulary=vocabulary(policy), longest=4)
    long = TokenSequence(prompt_ids=(5,) * 20, response_ids=torch.tensor([6] * 30))
    num_tokens = sum(len(s.response_ids) for s in short)
    with torch.no_grad():
        alone = response_likelihood(policy, short)
        padded = response_likelihood(policy, [*short, long])
    torch.testing.assert_close(padded.logprobs[:num_tokens], alone.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.entropy[:num_tokens], alone.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [5, 7])
def test_logits_never_exist_for_more_than_a_chunk_of_tokens(
    chunk_tokens: int,
    with_gradient: bool,
    dtype: str,
    new_policy: NewPolicy,
    ragged_sequences: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = new_policy(dtype=dtype)
    width = vocabulary(policy)
    sequences = ragged_sequences(8, vocabulary=width)
    num_tokens = sum(len(s.response_ids) for s in sequences)
    monkeypatch.setattr("gspo.model.head.MAX_LOGITS", chunk_tokens * width)
    rows: list[int] = []
    logits_of = Head.logits

    def noting(head: Head, hidden: torch.Tensor) -> torch.Tensor:
        logits = logits_of(head, hidden)
        rows.append(logits.numel() // width)
        return logits

    monkeypatch.setattr(Head, "logits", noting)
    weight = policy.head.weight
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.set_grad_enabled(with_gradient), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = response_likelihood(policy, sequences).logprobs
    num_chunks = -(-num_tokens // chunk_tokens)
    assert max(rows) <= chunk_tokens and sum(rows) == num_tokens  # only response tokens reach the head
    assert len(rows) == num_chunks  # no more of them than it takes
    # Nothing kept for the backward pass is a row of the vocabulary's width, but the weights themselves.
    kept = [tensor for tensor in saved if tensor.data_ptr() != weight.data_ptr()]
    assert not [tensor.shape for tensor in kept if tensor.ndim and tensor.shape[-1] == width]
    assert num_tokens * width not in [tensor.numel() for tensor in kept]
    if with_gradient:
        logprobs.sum().backward()
        assert max(rows) <= chunk_tokens and sum(rows) == 2 * num_tokens  # recomputed, chunk by chunk
        assert len(rows) == 2 * num_chunks
