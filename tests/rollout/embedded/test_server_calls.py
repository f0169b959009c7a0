"""What the thread that decodes does first: proofs and weights come between two tokens, or wait for the responses."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.embedded.server import Decoder
from gspo.rollout.servers.weights import in_memory

NewPolicy = Callable[..., Policy]
LONG = 600


class Asked:
    """A decoder that runs, and is asked without waiting for the answer."""

    def __init__(self, policy: Policy, pool: ThreadPoolExecutor) -> None:
        self.decoder, self._pool = Decoder(policy, max_rows=6), pool
        threading.Thread(target=self.decoder.run, daemon=True).start()

    def __call__(self, path: str, body: Any) -> "Future[Any]":
        return self._pool.submit(self.decoder.ask, path, body)

    def wait_until_under_way(self) -> None:
        while self.decoder._under_way is None:
            time.sleep(0.001)


@pytest.fixture
def ask(new_policy: NewPolicy) -> Iterator[Asked]:
    with ThreadPoolExecutor(16) as pool:
        yield Asked(new_policy(max_position_embeddings=1024), pool)


def group(tokens: int, *, first: bool = False, size: int = 2, **settings: Any) -> dict[str, Any]:
    """A group whose responses have so many tokens."""
    own = RolloutConfig(group_size=size, max_new_tokens=tokens, **settings).model_dump(mode="json")
    body = {"prompt_ids": [4, 5, 6], "keys": [*range(size)], "stop_ids": [], "settings": own, "wants_experts": False}
    return json.loads(json.dumps({**body, "goes_first": first}))


def weights(policy: Policy, ask: Asked, label: str, at_publish: str) -> Any:
    """Have the weights replaced, and wait."""
    with in_memory(policy, as_saved=False) as paths:
        return ask("/weights", {"paths": paths, "label": label, "at_publish": at_publish}).result(60)


@pytest.fixture
def policy(new_policy: NewPolicy) -> Policy:
    return new_policy(max_position_embeddings=1024, seed=1)


def labels(answer: Any) -> list[list[str]]:
    return [[label for label, _ in response["labels"]] for response in answer]


def test_a_proof_is_not_kept_waiting_by_long_responses(ask: Asked) -> None:
    long = ask("/sample", group(LONG))
    ask.wait_until_under_way()
    short = ask("/sample", group(3, first=True)).result(60)
    assert [len(response["token_ids"]) for response in short] == [3, 3]
    assert not long.done()
    assert [len(response["token_ids"]) for response in long.result(60)] == [LONG, LONG]


def test_weights_wait_for_the_responses_under_way_and_the_next_ones_have_them(ask: Asked, policy: Policy) -> None:
    weights(policy, ask, "a", "wait")
    long = ask("/sample", group(LONG))
    ask.wait_until_under_way()
    next_one = ask("/sample", group(4, temperature=0.5))  # not sampled side by side with the first
    weights(policy, ask, "b", "wait")
    assert long.done() and labels(long.result(60)) == [["a"], ["a"]]
    assert labels(next_one.result(60)) == [["b"], ["b"]]


@pytest.mark.parametrize("at_publish", ["recompute", "keep"])
def test_weights_do_not_wait_where_responses_may_go_on_with_them(ask: Asked, policy: Policy, at_publish: str) -> None:
    weights(policy, ask, "a", at_publish)
    long = ask("/sample", group(LONG))
    ask.wait_until_under_way()
    weights(policy, ask, "b", at_publish)
    assert not long.done()
    assert labels(long.result(60)) in ([["a", "b"]] * 2, [["b"]] * 2)  # the latter before the first token


def test_groups_are_decoded_side_by_side_as_far_as_there_are_rows_for_them(ask: Asked) -> None:
    """Four groups of two in six rows: three, then one, each with its own random numbers."""
    answers = [future.result(60) for future in [ask("/sample", group(5)) for _ in range(4)]]
    tokens = [[response["token_ids"] for response in answer] for answer in answers]
    assert all(own == tokens[0] for own in tokens) and tokens[0][0] != tokens[0][1]  # the same keys for each


def test_what_fails_is_an_answer_and_the_next_call_is_served(ask: Asked) -> None:
    broken = group(5)
    broken["prompt_ids"] = [10**6]
    with pytest.raises(IndexError):
        ask("/sample", broken).result(60)
    with pytest.raises(ValueError, match="are not given"):
        ask("/weights", {"paths": []}).result(60)
    assert len(ask("/sample", group(5)).result(60)) == 2


def test_weights_that_lack_a_tensor_are_refused(ask: Asked, policy: Policy) -> None:
    with in_memory(policy, as_saved=False) as paths, pytest.raises(ValueError, match="are not given"):
        ask("/weights", {"paths": paths[:-1], "label": "a", "at_publish": "keep"}).result(60)
    assert torch.is_tensor(next(policy.model.parameters()))


def test_what_is_drawn_with_half_of_the_weights_is_nobodys(ask: Asked, policy: Policy) -> None:
    weights(policy, ask, "a", "keep")
    long = ask("/sample", group(LONG))
    ask.wait_until_under_way()
    with in_memory(policy, as_saved=False) as paths, pytest.raises(ValueError, match="are not given"):
        ask("/weights", {"paths": paths[:-1], "label": "b", "at_publish": "keep"}).result(60)
    assert all(own[-1] == "" for own in labels(long.result(60)))
