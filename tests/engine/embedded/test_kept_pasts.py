"""Prompts that go on behind what was sampled before: the engine reads what is new, and computes the same."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.mixtures import live_experts, sets

from gspo.engine.embedded import decoding
from gspo.engine.embedded.cache import KeptPasts
from gspo.engine.embedded.decoding import Decoding, Means
from gspo.engine.engine import Completion, Prompt, Sampling, Session
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy

NewPolicy = Callable[..., Policy]
Made = list[tuple[tuple[int, ...], Completion]]  # prompts, and what was sampled behind each
ROWS = 8


class Turns:
    """Responses of several turns, side by side, each with its session."""

    def __init__(self, policy: Policy, means: Means = Means.FAST, max_rows: int = ROWS) -> None:
        self.policy, self.means, self.max_rows = policy, means, max_rows
        self.kept, self.sessions = KeptPasts(), [Session() for _ in range(ROWS)]
        rng = random.Random(0)
        self.ids = [tuple(rng.randrange(9, 20) for _ in range(rng.randint(1, 12))) for _ in range(ROWS)]
        self.num_read, self.rng = 0, rng
        policy.model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: Any) -> None:
        self.num_read += inputs[0].numel()
        is_first = inputs[0].numel() > len(inputs[0])  # it reads prompts
        assert is_first or len(self.kept._by_session) + len(inputs[0]) <= self.max_rows

    def turn(
        self, *, after: Callable[[int], Sequence[int]] = lambda row: ()
    ) -> list[tuple[tuple[int, ...], Completion]]:
        """Go on with all of them, behind what `after` adds; return prompts and completions."""
        self.ids = [(*ids, *after(row)) for row, ids in enumerate(self.ids)]
        made = dict[int, Completion]()
        own = Decoding(
            policy=self.policy,
            prompts=[
                Prompt(ids=ids, key=row, max_new_tokens=3 + row % 4, group=row, session=self.sessions[row])
                for row, ids in enumerate(self.ids)
            ],
            sampling=Sampling(stop_ids=(5, 6), record_experts=self.policy.routing is not None),
            max_rows=self.max_rows,
            put=made.__setitem__,
            means=self.means,
            kept=self.kept,
        )
        self.num_read = 0
        with torch.inference_mode():
            own.generate()
        turns = [(ids, made[row]) for row, ids in enumerate(self.ids)]
        self.ids = [(*ids, *own.token_ids.tolist()) for ids, own in turns]
        return turns

    def said(self, row: int) -> list[int]:
        """Tokens that come between two turns, of some rows many."""
        return [self.rng.randrange(9, 20) for _ in range(20 if row == 3 else 1 + row % 3)]


def gap(policy: Policy, turns: Made, plain_logprobs: Any) -> float:
    """How far the likelihoods are from plain passes at most; experts are theirs."""
    rows = [TokenSequence(prompt_ids=ids, response_ids=own.token_ids) for ids, own in turns]
    with torch.no_grad():
        expected = plain_logprobs(policy, rows)
    for row, (ids, own) in zip(rows, turns, strict=True):
        assert (own.experts is None) == (policy.routing is None)
        if own.experts is not None:
            assert len(own.experts.prefix) == len(ids) - 1 and not own.experts.prefix.is_inference()
            assert sets(own.experts) == sets(live_experts(policy, row))
    return float((torch.cat([own.logprobs for _, own in turns]) - expected).abs().max())


@pytest.mark.parametrize("look_every", [1, 5])
@pytest.mark.parametrize("means", [Means.FAST, Means.OWN_MODULES])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_turns_have_the_likelihoods_and_experts_of_plain_passes(
    family: str,
    means: Means,
    look_every: int,
    new_policy: NewPolicy,
    plain_logprobs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(decoding._LOOK_EVERY, "cpu", look_every)
    turns = Turns(new_policy(family), means if family != "gpt2" else Means.OWN_MODULES)
    for number in range(4):
        made = turns.turn(after=turns.said if number else lambda _: ())
        num_read = turns.num_read
        assert gap(turns.policy, made, plain_logprobs) < 1e-5
        if number > 1:
            # The longest of what was said and the last token of a turn, of those side by side; then what was sampled.
            assert num_read < 21 + 1 + 4 * ROWS + ROWS * (6 + look_every) < sum(len(ids) for ids, _ in made)
    # One that has changed what was said before goes on behind what it has left, and new ones have no past.
    first, second = turns.sessions[0], turns.sessions[1]
    turns.ids[0] = (*turns.ids[0][:-9], 10, 11, 12)
    turns.ids[1] = turns.ids[1][:5]
    turns.sessions[2:4] = [Session(), Session()]
    made = turns.turn()
    assert gap(turns.policy, made, plain_logprobs) < 1e-5
    assert turns.kept.take(first, made[0][0]) and turns.kept.take(second, made[1][0])


def test_what_is_kept_is_computed_anew_by_other_weights_alone(new_policy: NewPolicy, plain_logprobs: Any) -> None:
    turns = Turns(new_policy("qwen3"))
    turns.turn()
    with torch.no_grad():
        for parameter in turns.policy.model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    kept = turns.turn(after=turns.said)
    assert gap(turns.policy, kept, plain_logprobs) > 1e-2
    turns.kept.clear()
    assert gap(turns.policy, turns.turn(after=turns.said), plain_logprobs) < 1e-5


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_no_more_is_kept_than_rows_may_be_decoded_and_that_is_gone_on_with_first(
    max_rows: int, new_policy: NewPolicy, plain_logprobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, found, take = Turns(new_policy("qwen3"), max_rows=max_rows), list[Any](), KeptPasts.take
    turns.turn()
    assert len(turns.kept._by_session) == max_rows

    def noted(kept: KeptPasts, session: Session, ids: Sequence[int]) -> Any:
        found.append(take(kept, session, ids))
        return found[-1]

    monkeypatch.setattr(KeptPasts, "take", noted)
    assert gap(turns.policy, turns.turn(after=turns.said), plain_logprobs) < 1e-5
    assert len(turns.kept._by_session) == max_rows == sum(past is not None for past in found)


def test_nothing_is_kept_of_a_response_that_is_over(new_policy: NewPolicy) -> None:
    turns = Turns(new_policy("qwen3"))
    turns.turn()
    assert len(turns.kept._by_session) == ROWS
    turns.sessions = turns.sessions[:2]
    assert len(turns.kept._by_session) == 2


def test_a_prompt_that_begins_otherwise_has_no_past(new_policy: NewPolicy) -> None:
    turns = Turns(new_policy("qwen3"))
    ids = turns.ids[0]
    turns.turn()
    assert turns.kept.take(turns.sessions[0], (8, *ids)) is None
    turns.turn()
    found = turns.kept.take(turns.sessions[0], ids)
    assert (found is None) == (len(ids) == 1) and (found is None or found.ids == ids[:-1])


def test_prompts_of_one_group_are_read_once_behind_what_one_of_them_has(
    new_policy: NewPolicy, plain_logprobs: Any
) -> None:
    """Two responses that have said the same go on with the same tokens."""
    turns = Turns(new_policy("qwen3"))
    turns.turn()
    again = replace(turns.policy, stop_ids=())
    prompt = (*turns.ids[0], 9)
    own = [
        Prompt(ids=prompt, key=key, max_new_tokens=4, session=turns.sessions[0] if key == 1 else Session())
        for key in range(3)
    ]
    made = dict[int, Completion]()
    turns.num_read = 0
    with torch.inference_mode():
        options: dict[str, Any] = {"sampling": Sampling(), "max_rows": ROWS, "put": made.__setitem__}
        Decoding(policy=again, prompts=own, kept=turns.kept, **options).generate()
    assert turns.num_read == 2 + 3 * 3  # the last token of the turn and what follows it, then what is sampled
    assert gap(again, [(prompt, made[key]) for key in range(3)], plain_logprobs) < 1e-5
