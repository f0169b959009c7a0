"""Weights that are replaced while completions are decoded."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from gspo.engine.embedded.decoding import Decoding
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy

NewPolicy = Callable[..., Policy]
PROMPTS = [[4, 5, 6], [7], [3, 9, 8, 4, 5]]
SIZE, LONGEST, CHANGES = 2, 24, (0, 5, 12)  # before which tokens the weights are replaced


def decode(policy: Policy, keep_cache: bool, **shape: Any) -> tuple[list[Completion], list[dict[str, torch.Tensor]]]:
    """Completions, and the weights of each version."""
    versions = [{name: own.clone() for name, own in policy.model.state_dict().items()}]
    due = list(CHANGES)

    def look() -> None:
        if due and decoding.transcript.num_steps == due[0]:
            generator = torch.Generator().manual_seed(due.pop(0))
            for parameter in policy.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            versions.append({name: own.clone() for name, own in policy.model.state_dict().items()})
            decoding.change_weights(len(versions) - 1, keep_cache=keep_cache)

    found, keys = dict[int, Completion](), range(len(PROMPTS) * SIZE)
    decoding = Decoding(
        policy=policy,
        prompts=[Prompt(ids=tuple(PROMPTS[key // SIZE]), key=key, max_new_tokens=LONGEST) for key in keys],
        sampling=Sampling(stop_ids=policy.stop_ids, record_experts=policy.routing is not None, **shape),
        max_rows=len(keys),
        check=look,
        put=found.__setitem__,
    )
    with torch.inference_mode():
        decoding.generate()
    return [found[key] for key in keys], versions


def gaps(policy: Policy, responses: list[Completion], versions: list[Any], plain_logprobs: Any) -> list[torch.Tensor]:
    """For each version, how far its tokens' log-likelihoods are from those that its weights give."""
    sequences = [
        TokenSequence(prompt_ids=tuple(PROMPTS[number // SIZE]), response_ids=response.token_ids)
        for number, response in enumerate(responses)
    ]
    found = []
    for version, weights in enumerate(versions):
        policy.model.load_state_dict(weights)
        with torch.no_grad():
            expected = plain_logprobs(policy, sequences).split([len(own.response_ids) for own in sequences])
        own = [
            torch.tensor([own for own, n in response.versions for _ in range(n)]) == version for response in responses
        ]
        pairs = zip(responses, expected, own, strict=True)
        found.append(torch.cat([(response.logprobs - other).abs()[mask] for response, other, mask in pairs]))
    return found


@pytest.mark.parametrize("max_tokens", [16_384, 20])  # that are read again in one pass
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma3_text"])
def test_a_token_has_the_likelihood_of_the_weights_that_drew_it(
    family: str, max_tokens: int, new_policy: NewPolicy, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gspo.engine.embedded.decoding._MOST_TOKENS", max_tokens)
    policy = new_policy(family)
    responses, versions = decode(policy, keep_cache=False)
    assert len(versions) == 1 + len(CHANGES) and len({len(response.token_ids) for response in responses}) > 2
    for response in responses:
        length, ends = len(response.token_ids), [*CHANGES, LONGEST]
        counts = (0, *(max(0, min(length, b) - a) for a, b in pairwise(ends)))
        assert response.versions == tuple((version, count) for version, count in enumerate(counts) if count)
        assert response.experts is None or len(response.experts.row) == length
    for own in gaps(policy, responses, versions, plain_logprobs):
        assert not len(own) or own.max() < 1e-5


def test_with_the_cache_of_other_weights_it_has_not(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy()
    first, second = gaps(policy, *decode(policy, keep_cache=True), plain_logprobs)[:2]
    assert len(first) and first.max() < 1e-5  # the first token: what it was drawn from was there before
    assert second.max() > 1e-3  # the prompt was read before


def test_a_penalty_goes_on_counting_the_tokens_before(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    policy = new_policy()
    responses, versions = decode(policy, keep_cache=False, repetition_penalty=1.5)
    own = [
        replace(response, logprobs=response.full_logprobs)
        for response in responses
        if response.full_logprobs is not None
    ]
    assert max(gap.max() for gap in gaps(policy, own, versions, plain_logprobs) if len(gap)) < 1e-5
    assert not all(torch.equal(one.logprobs, other.logprobs) for one, other in zip(own, responses, strict=True))
