"""Rows taken over by waiting prompts, and looks at which rows have ended every few tokens only, as on a GPU."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import generate

from gspo.engine.embedded.decoding import Decoding
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig

NewPolicy = Callable[..., Policy]
LONGEST = 24


@pytest.mark.parametrize("max_rows", [3, 6, 13])
@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.parametrize("decoder", ["fast", "the modules' own"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_responses_are_the_models_whatever_row_they_are_decoded_in(
    family: str,
    decoder: str,
    look_every: int,
    max_rows: int,
    new_policy: NewPolicy,
    plain_logprobs: Any,
    refilling: Any,
) -> None:
    joined = refilling(decoder, look_every)
    policy = new_policy(family)
    policy = replace(policy, stop_ids=(5, 6, 7, 8))  # responses end after a few tokens, each at its own time
    rng = random.Random(0)
    prompts = [[rng.randrange(9, 20) for _ in range(rng.randint(1, 12))] for _ in range(11)]
    groups = generate(policy, prompts, RolloutConfig(max_new_tokens=LONGEST, max_rows=max_rows), group_size=3, seed=1)
    pairs = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    assert len(pairs) == 33
    for _, response in pairs:
        assert not set(response.token_ids[:-1].tolist()) & set(policy.stop_ids)
        stopped = int(response.token_ids[-1]) in policy.stop_ids
        assert response.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(response.token_ids) == LONGEST
    with torch.no_grad():
        expected = plain_logprobs(
            policy, [TokenSequence(prompt_ids=tuple(p), response_ids=r.token_ids) for p, r in pairs]
        )
    torch.testing.assert_close(torch.cat([r.sampler_logprobs for _, r in pairs]), expected, rtol=0, atol=1e-5)
    assert len({len(r.token_ids) for _, r in pairs}) > 5
    assert joined or max_rows == 3  # rows were taken over while others were under way


@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_a_completion_is_handed_over_as_it_ends(
    family: str, look_every: int, new_policy: NewPolicy, refilling: Any
) -> None:
    refilling("fast", look_every)
    policy = replace(new_policy(family), stop_ids=(5, 6, 7, 8))
    rng, handed = random.Random(0), dict[int, tuple[int, Completion]]()
    prompts = [tuple(rng.randrange(9, 20) for _ in range(rng.randint(1, 12))) for _ in range(3)]
    decoding = Decoding(
        policy=policy,
        prompts=[Prompt(ids=prompts[number // 2], key=number, max_new_tokens=LONGEST) for number in range(6)],
        sampling=Sampling(stop_ids=policy.stop_ids, record_experts=policy.routing is not None),
        max_rows=6,
        put=lambda number, own: handed.__setitem__(number, (decoding.transcript.num_steps, own)),
    )
    with torch.inference_mode():
        decoding.generate()
    assert sorted(handed) == [*range(6)] and len({num_steps for num_steps, _ in handed.values()}) > 1
    for number, other in enumerate(decoding.transcript.completions(range(6), policy.stop_ids, {})):
        num_steps, one = handed[number]
        assert len(other.token_ids) <= num_steps < len(other.token_ids) + look_every
        assert torch.equal(one.token_ids, other.token_ids) and torch.equal(one.logprobs, other.logprobs)
        assert (one.versions, one.finish_reason) == (other.versions, other.finish_reason)
        assert (one.experts is None) == (other.experts is None) == (policy.routing is None)
        if one.experts is not None and other.experts is not None:
            assert torch.equal(one.experts.prefix, other.experts.prefix)
            assert torch.equal(one.experts.row, other.experts.row)
