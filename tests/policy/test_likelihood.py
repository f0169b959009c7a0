"""Log-likelihoods and entropies against the model's own plain forward pass, whatever the cut."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gspo.policy.likelihood import Conditioned, micro_batches, response_likelihood
from gspo.policy.model import Policy

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
        found = policy.logits(policy.model.base_model(input_ids=ids).last_hidden_state[0])
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
    assert not likelihood.entropy.requires_grad


@pytest.mark.parametrize("chunk_tokens", [1, 3, 50, 10**6])
def test_value_and_gradient_do_not_depend_on_the_chunk(
    chunk_tokens: int, new_policy: NewPolicy, ragged_sequences: Any, plain_logprobs: Any, gradient_of: Any
) -> None:
    policy = new_policy("qwen3_moe")
    sequences = ragged_sequences(6, vocabulary=vocabulary(policy))
    expected = plain_logprobs(policy, sequences)
    weights = torch.linspace(-1, 1, len(expected))  # each token its own weight: mixed-up tokens would show
    (expected * weights).sum().backward()
    expected_gradient = gradient_of(policy.model)
    found = response_likelihood(policy, sequences, chunk_tokens=chunk_tokens).logprobs
    (found * weights).sum().backward()
    difference = (gradient_of(policy.model) - expected_gradient).norm() / expected_gradient.norm()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert difference <= 1e-5


def test_no_more_logits_than_a_chunk_exist_at_once(new_policy: NewPolicy, ragged_sequences: Any) -> None:
    policy = new_policy("qwen3")
    rows_seen: list[int] = []
    head = policy.model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: rows_seen.append(output.shape[0]))
    sequences = ragged_sequences(6, vocabulary=vocabulary(policy))
    num_tokens = sum(len(s.response_ids) for s in sequences)
    saved: list[int] = []

    def noting(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(_rows_of_logits(tensor, policy))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noting, lambda tensor: tensor):
        likelihood = response_likelihood(policy, sequences, chunk_tokens=5)
    assert sum(rows_seen) == num_tokens  # only response tokens reach the head
    assert max(rows_seen) == 5
    assert max(saved) == 0  # nothing as wide as the vocabulary is kept for the backward pass
    likelihood.logprobs.sum().backward()
    assert max(rows_seen) == 5


def _rows_of_logits(tensor: torch.Tensor, policy: Policy) -> int:
    width = policy.model.get_input_embeddings().weight.shape[0]
    return tensor.shape[0] if tensor.ndim == 2 and tensor.shape[1] == width else 0


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mistral", "gpt2"])
def test_padding_changes_nothing(family: str, new_policy: NewPolicy, ragged_sequences: Any) -> None:
    policy = new_policy(family)
    short = ragged_sequences(3, vocabulary=vocabulary(policy), longest=4)
    long = Conditioned(prompt_ids=[5] * 20, response_ids=[6] * 30)
    num_tokens = sum(len(s.response_ids) for s in short)
    with torch.no_grad():
        alone = response_likelihood(policy, short)
        padded = response_likelihood(policy, [*short, long])
    torch.testing.assert_close(padded.logprobs[:num_tokens], alone.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(padded.entropy[:num_tokens], alone.entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_logits_never_exist_for_more_than_a_chunk_of_tokens(
    with_gradient: bool, new_policy: NewPolicy, ragged_sequences: Any
) -> None:
    policy = new_policy()
    sequences = ragged_sequences(8, vocabulary=vocabulary(policy))
    num_tokens = sum(len(s.response_ids) for s in sequences)
    rows: list[int] = []
    policy.head.register_forward_hook(lambda module, inputs, output: rows.append(output.numel() // output.shape[-1]))
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.set_grad_enabled(with_gradient), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs = response_likelihood(policy, sequences, chunk_tokens=7).logprobs
    assert max(rows) <= 7 and sum(rows) == num_tokens
    if with_gradient:
        # Nothing kept for the backward pass has a row for every token and a column for every word of the vocabulary.
        assert num_tokens * vocabulary(policy) not in saved
        logprobs.sum().backward()
        assert max(rows) <= 7 and sum(rows) == 2 * num_tokens  # recomputed, chunk by chunk


@pytest.mark.parametrize("max_tokens", [1, 40, 200, 1000, 10**6])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches_hold_every_sequence_once_within_the_budget(max_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 90, (70,), generator=generator).tolist()
    batches = micro_batches(lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert padded <= max_tokens or len(batch) == 1
    order = [lengths[index] for batch in batches for index in batch]
    assert order == sorted(lengths, reverse=True)  # the longest first: out of memory at once or never


def test_micro_batches_of_equal_lengths_fill_the_budget() -> None:
    assert [len(batch) for batch in micro_batches([10] * 25, 100)] == [10, 10, 5]


def test_micro_batches_of_nothing_are_none() -> None:
    assert micro_batches([], 100) == []


def test_much_padding_ends_a_micro_batch_early() -> None:
    # Beside a sequence of 100 tokens the short ones would be nine tenths padding.
    batches = micro_batches([10] * 50 + [100], 1600)
    assert batches[0] == [50]
    assert sum(len(b) * max(([10] * 50 + [100])[i] for i in b) for b in batches) == 600
