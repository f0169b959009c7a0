"""A copy of the weights that samples while the policy is trained, and the thread in which it does."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import sampler_of

from gspo.engine.embedded.decoding import Decoding
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Completion, Prompt, Sampling, Session
from gspo.errors import Stopped
from gspo.interrupt import Interrupt
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import AtPublish, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Query

NewPolicy = Callable[..., Policy]
LONG = 40
Weights = dict[str, torch.Tensor]
NEVER = Sampling(stop_ids=(10**9,))  # completions of exactly as many tokens as they may have


@pytest.fixture(params=["qwen3"])
def policy(request: pytest.FixtureRequest, new_policy: NewPolicy) -> Policy:
    return new_policy(request.param)


@pytest.fixture
def copy(policy: Policy, new_policy: NewPolicy) -> Policy:
    """Of the policy's shape, and of other weights."""
    return new_policy(policy.model.config.model_type, seed=1)


@pytest.fixture
def made(policy: Policy, copy: Policy) -> Iterator[Callable[..., EmbeddedEngine]]:
    engines: list[EmbeddedEngine] = []

    def make(at_publish: AtPublish = "recompute", max_rows: int = 6) -> EmbeddedEngine:
        engines.append(EmbeddedEngine(policy, copy=copy, at_publish=at_publish, max_rows=max_rows))
        engines[-1].publish(0)
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def gate(copy: Policy) -> "Gate":
    return Gate(copy)


class Gate:
    """Stops a model's passes at those of certain numbers, the first of which reads the prompt, until it is opened."""

    def __init__(self, policy: Policy) -> None:
        self.num_passes, self.shut, self.rows = 0, set[int](), list[int]()
        self._reached, self._open = threading.Semaphore(0), threading.Semaphore(0)
        policy.model.get_input_embeddings().register_forward_hook(self._pass)

    def _pass(self, module: Any, inputs: Any, output: Any) -> None:
        self.num_passes += 1
        self.rows.append(len(inputs[0]))
        if self.num_passes in self.shut:
            self._reached.release()
            assert self._open.acquire(timeout=60)

    def shut_at(self, *numbers: int) -> None:
        """Counted from now."""
        self.num_passes, self.shut = 0, {*numbers}
        self.rows.clear()

    def wait(self) -> None:
        """Until a pass is stopped."""
        assert self._reached.acquire(timeout=60)

    def open(self) -> None:
        self._open.release()


def prompts(*keys: int, ids: Sequence[int] = (4, 5, 6), tokens: int = LONG) -> list[Prompt]:
    return [Prompt(ids=tuple(ids), key=key, max_new_tokens=tokens) for key in keys]


def results(futures: Sequence[Future[Completion]]) -> list[Completion]:
    return [future.result(60) for future in futures]


def values(completions: Sequence[Completion]) -> list[Any]:
    return [(own.token_ids.tolist(), own.logprobs.tolist(), own.versions) for own in completions]


def move(policy: Policy, seed: int, size: float = 0.1) -> None:
    """Change the policy's weights in their places, as an optimiser does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def weights_of(policy: Policy) -> Weights:
    return {name: own.clone() for name, own in policy.model.state_dict().items()}


def begin(engine: EmbeddedEngine, act: Callable[[], object]) -> threading.Thread:
    """Start what waits for the decoding thread, which stands still, and return once that has been told."""
    thread, queue = threading.Thread(target=act, daemon=True), engine._decoder.queue
    num_before = queue.qsize()
    thread.start()
    while queue.qsize() == num_before:
        time.sleep(0.001)
    return thread


def gap(policy: Policy, own: Completion, versions: Sequence[Weights], plain_logprobs: Any) -> float:
    """How far the log-likelihoods are from those that the weights of each token's version give."""
    gaps, start = [], 0
    for version, count in own.versions:
        policy.model.load_state_dict(versions[version])
        with torch.no_grad():
            sequence = TokenSequence(prompt_ids=(4, 5, 6), response_ids=own.token_ids)
            expected = plain_logprobs(policy, [sequence])[start : start + count]
        gaps.append(float((own.logprobs[start : start + count] - expected).abs().max()))
        start += count
    assert start == len(own.token_ids)
    return max(gaps)


def decoded(policy: Policy, versions: Sequence[Weights], *, before: Sequence[int], keep: bool) -> list[Completion]:
    """What this thread decodes where the weights are replaced before the tokens of these numbers."""
    due, found = [*before], dict[int, Completion]()

    def look() -> None:
        if due and decoding.transcript.num_steps == due[0]:
            due.pop(0)
            version = len(before) - len(due)
            policy.model.load_state_dict(versions[version])
            decoding.change_weights(version, keep_cache=keep)

    policy.model.load_state_dict(versions[0])
    decoding = Decoding(
        policy=policy, prompts=prompts(1, 2), sampling=NEVER, max_rows=6, check=look, put=found.__setitem__
    )
    with torch.inference_mode():
        decoding.generate()
    return [found[number] for number in range(2)]


@pytest.mark.parametrize("policy", ["qwen3_moe", "gpt2"], indirect=True)
@pytest.mark.parametrize("shaping", [{}, {"top_p": 0.9, "stop_strings": ("1",)}, {"temperature": 0.0}], ids=str)
def test_the_copy_samples_bit_by_bit_what_the_policy_would(
    policy: Policy, made: Any, query_of: Callable[..., Query], shaping: dict[str, Any]
) -> None:
    queries = [query_of([4, 5, 6], 0), query_of([7], 1), query_of([3, 9, 8, 4, 5], 2)]
    settings = RolloutConfig(max_new_tokens=12, group_size=3).model_copy(update=shaping)
    samplers, key = (Sampler(made(max_rows=512), policy), sampler_of(policy)), SamplingKey(seed=0, step=1)
    for version in (1, 2):
        move(policy, version)
        groups = []
        for sampler in samplers:
            sampler.publish(version)
            groups.append(sampler.sample(queries, settings, key, record_experts=True))
        samples = [[sample for group in own for sample in group.samples] for own in groups]
        for there, here in zip(*samples, strict=True):
            assert there.token_ids.tolist() == here.token_ids.tolist()
            assert there.versions == here.versions == ((version, here.num_tokens),)
            assert torch.equal(there.sampler_logprobs, here.sampler_logprobs)
            assert (there.text, there.finish_reason) == (here.text, here.finish_reason)
            assert (there.full_logprobs is None) == (here.full_logprobs is None)
            assert here.full_logprobs is None or torch.equal(there.full_logprobs, here.full_logprobs)
            assert (there.experts is None) == (here.experts is None) == (policy.routing is None)
            if there.experts is not None and here.experts is not None:
                assert torch.equal(there.experts.prefix, here.experts.prefix)
                assert torch.equal(there.experts.row, here.experts.row)


@pytest.mark.parametrize("is_started", [False, True])
def test_training_the_policy_changes_nothing_of_what_the_copy_samples_until_it_is_published(
    policy: Policy, copy: Policy, made: Any, is_started: bool
) -> None:
    expected = values(results(made().submit(prompts(1, 2), NEVER)))
    engine = made()
    if is_started:
        results(engine.submit(prompts(3), NEVER))
    before = weights_of(copy)
    optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.1)
    policy.model(input_ids=torch.tensor([[4, 5, 6]])).logits.logsumexp(-1).sum().backward()
    optimizer.step()
    engine.publish(0)  # a version that is published already
    assert all(torch.equal(own, before[name]) for name, own in copy.model.state_dict().items())
    assert values(results(engine.submit(prompts(1, 2), NEVER))) == expected
    engine.publish(1)
    after = results(engine.submit(prompts(1, 2), NEVER))
    assert [own.versions for own in after] == [((1, LONG),)] * 2
    assert [own.logprobs.tolist() for own in after] != [logprobs for _, logprobs, _ in expected]


@pytest.mark.parametrize("policy", ["qwen3_moe", "gpt2", "gemma2", "gpt_oss", "mamba"], indirect=True)
def test_what_is_published_are_all_tensors(policy: Policy, copy: Policy, made: Any) -> None:
    made()
    for version in (0, 1):
        own, copied = policy.model.state_dict(), copy.model.state_dict()
        assert own.keys() == copied.keys() and all(torch.equal(own[name], copied[name]) for name in own)
        assert not {tensor.data_ptr() for tensor in own.values()} & {tensor.data_ptr() for tensor in copied.values()}
        if version == 0:
            move(policy, 1)
            made()


@pytest.mark.parametrize("policy", ["qwen3", "qwen3_moe", "gemma2"], indirect=True)
@pytest.mark.parametrize("at_publish", ["recompute", "keep"])
def test_weights_that_come_in_the_midst_draw_the_tokens_after(
    policy: Policy, copy: Policy, made: Any, gate: Gate, at_publish: AtPublish, plain_logprobs: Any
) -> None:
    """They come while token 4 is read, and again some tokens later, and the completions do not wait for the trainer."""
    engine, versions = made(at_publish), [weights_of(policy)]
    keep = at_publish == "keep"
    # Of as many passes as there are tokens to be read; what is computed anew takes one.
    gate.shut_at(5, 11 + (not keep), 15)
    futures = engine.submit(prompts(1, 2), NEVER)
    for version in (1, 2):
        gate.wait()
        move(policy, version)
        versions.append(weights_of(policy))
        publishing = begin(engine, lambda: engine.publish(version))  # noqa: B023
        gate.open()
        publishing.join(60)
        assert not publishing.is_alive()
    gate.wait()
    assert not any(future.done() for future in futures)  # and it is published
    move(policy, 3)  # the trainer goes on
    gate.open()
    found = results(futures)
    first, second = (5, 6) if keep else (4, 6)  # with what was computed before, the next token is drawn already
    spans = ((0, first), (1, second), (2, LONG - first - second))
    assert [own.versions for own in found] == [spans] * 2
    expected = decoded(policy, versions, before=(4, 10), keep=keep)
    assert values(found) == values(expected)
    assert found[0].token_ids.tolist() != found[1].token_ids.tolist()
    for own in found:
        assert (gap(policy, own, versions, plain_logprobs) < 1e-5) == (not keep)


@pytest.mark.parametrize("at_publish", ["recompute", "wait", "keep"])
def test_a_later_turn_goes_on_behind_what_the_present_weights_have_read(
    policy: Policy, made: Any, at_publish: AtPublish, plain_logprobs: Any
) -> None:
    engine, session = made(at_publish), Session()
    (first,) = results(engine.submit([replace(own, session=session) for own in prompts(1, tokens=9)], NEVER))
    move(policy, 1)
    engine.publish(1)
    ids = (4, 5, 6, *first.token_ids.tolist(), 7)
    (later,) = results(engine.submit([replace(own, session=session) for own in prompts(2, ids=ids)], NEVER))
    with torch.no_grad():
        expected = plain_logprobs(policy, [TokenSequence(prompt_ids=ids, response_ids=later.token_ids)])
    assert (float((later.logprobs - expected).abs().max()) < 1e-5) == (at_publish != "keep")


def test_weights_wait_for_the_completions_under_way_and_the_next_ones_have_them(
    policy: Policy, made: Any, gate: Gate
) -> None:
    expected = values(results(made("wait").submit(prompts(1, 2), NEVER)))
    engine = made("wait")
    gate.shut_at(5)
    long = engine.submit(prompts(1, 2), NEVER)
    gate.wait()
    waiting = engine.submit(prompts(3), replace(NEVER, temperature=0.5))  # not sampled side by side with the first
    move(policy, 1)
    publishing = begin(engine, lambda: engine.publish(1))
    gate.open()
    publishing.join(60)
    assert not publishing.is_alive() and all(future.done() for future in long)
    assert values(results(long)) == expected
    assert [own.versions for own in results(waiting)] == [((1, LONG),)]
    assert results(engine.submit(prompts(1), NEVER))[0].versions == ((1, LONG),)


def test_a_stop_while_weights_wait_leaves_the_old_ones_at_work(policy: Policy, copy: Policy, gate: Gate) -> None:
    engine, interrupt = EmbeddedEngine(policy, copy=copy, at_publish="wait"), Interrupt(lambda _: None)
    engine.publish(0)
    gate.shut_at(5)
    futures = engine.submit(prompts(1, 2), NEVER)
    gate.wait()
    move(policy, 1)
    with interrupt, pytest.raises(Stopped):
        threading.Timer(0.2, lambda: setattr(interrupt, "signal", signal.SIGTERM)).start()
        engine.publish(1)
    gate.open()
    assert {own.versions for own in results(futures)} == {((0, LONG),)}
    assert results(engine.submit(prompts(1), NEVER))[0].versions == ((0, LONG),)
    engine.close()


@pytest.mark.parametrize("at_publish", ["recompute", "wait"])
def test_each_token_has_the_likelihood_of_its_own_weights_while_the_policy_is_trained(
    policy: Policy, made: Any, at_publish: AtPublish, plain_logprobs: Any
) -> None:
    engine, versions = made(at_publish), [weights_of(policy)]
    found: list[Completion] = []
    for key in range(4):
        futures = engine.submit(prompts(key, tokens=100), NEVER)
        while not futures[0].done():
            sequence = TokenSequence(prompt_ids=(4, 5), response_ids=torch.tensor([6, 7, 8]))
            plain_logprobs(policy, [sequence]).sum().backward()
            move(policy, len(versions), 0.02)
            versions.append(weights_of(policy))
            engine.publish(len(versions) - 1)
        found += results(futures)
    assert len(versions) > 3 and len({version for own in found for version, _ in own.versions}) > 2
    assert (max(len(own.versions) for own in found) > 1) == (at_publish == "recompute")
    for own in found:
        assert gap(policy, own, versions, plain_logprobs) < 1e-5


def test_a_version_that_is_published_already_waits_for_nothing(policy: Policy, made: Any, gate: Gate) -> None:
    engine = made("wait")
    expected = values(results(engine.submit(prompts(1), NEVER)))
    gate.shut_at(5)
    futures = engine.submit(prompts(1), NEVER)
    gate.wait()
    move(policy, 1)
    engine.publish(0)
    gate.open()
    assert values(results(futures)) == expected


def test_requests_are_decoded_side_by_side_as_far_as_there_are_rows_for_them(made: Any, gate: Gate) -> None:
    """Four groups of two in six rows, of which the first is under way: three, then one, of the same random numbers."""
    engine = made(max_rows=6)
    gate.shut_at(1)
    first = engine.submit(prompts(9, tokens=2), NEVER)
    gate.wait()
    groups = [engine.submit(prompts(1, 2, tokens=5), NEVER) for _ in range(4)]
    gate.open()
    results(first)
    found = [[own.token_ids.tolist() for own in results(futures)] for futures in groups]
    assert all(own == found[0] for own in found) and found[0][0] != found[0][1]
    assert gate.rows == [1, 1, *[1, 6, 6, 6, 6], *[1, 2, 2, 2, 2]]  # a prompt is read once


def test_completions_that_nobody_waits_for_end_with_the_token_under_way(made: Any, gate: Gate) -> None:
    engine = made()
    expected = values(results(engine.submit(prompts(1, 2), NEVER)))
    other = replace(NEVER, temperature=0.5)
    expected_other = values(results(engine.submit(prompts(3), other)))
    gate.shut_at(5)
    futures = engine.submit(prompts(1, 2), NEVER)
    gate.wait()
    waiting = engine.submit(prompts(3), other)
    futures[0].cancel()
    gate.open()
    assert values(results(futures[1:])) == expected[1:]  # as long as anyone waits for one
    assert values(results(waiting)) == expected_other
    gate.shut_at(5)
    futures = engine.submit(prompts(1, 2), NEVER)
    gate.wait()
    waiting = engine.submit(prompts(3), other)
    assert all(future.cancel() for future in futures)
    gate.open()
    assert values(results(waiting)) == expected_other
    assert gate.num_passes == 5 + LONG  # the prompt, and all tokens but the last
    assert values(results(engine.submit(prompts(1, 2), NEVER))) == expected


def test_a_close_in_the_midst_ends_the_thread(made: Any, gate: Gate) -> None:
    engine = made()
    gate.shut_at(5)
    futures = engine.submit(prompts(1, 2), NEVER)
    gate.wait()
    futures += engine.submit(prompts(3), replace(NEVER, temperature=0.5))
    closing = begin(engine, engine.close)
    gate.open()
    closing.join(60)
    assert not closing.is_alive() and engine._thread.done() and gate.num_passes == 5
    for future in futures:
        with pytest.raises(CancelledError):
            future.result(0)
    engine.close()


def test_an_engine_that_nobody_holds_ends_its_thread(policy: Policy, copy: Policy) -> None:
    engine = EmbeddedEngine(policy, copy=copy)
    results(engine.submit(prompts(1), NEVER))
    thread = engine._thread
    del engine
    gc.collect()
    assert thread is not None
    thread.result(60)


def test_what_fails_is_in_its_futures_and_the_next_request_is_served(made: Any) -> None:
    engine = made()
    expected = values(results(engine.submit(prompts(1, 2), NEVER)))
    for future in engine.submit(prompts(1, 2, ids=[10**6]), NEVER):
        with pytest.raises(IndexError):
            future.result(60)
    assert values(results(engine.submit(prompts(1, 2), NEVER))) == expected


def test_trainer_and_engine_have_so_many_threads_each_until_it_is_closed(policy: Policy, copy: Policy) -> None:
    found: list[int] = []
    copy.model.get_input_embeddings().register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    engine = EmbeddedEngine(policy, copy=copy, num_threads=before + 1)
    try:
        assert torch.get_num_threads() == before + 1
        results(engine.submit(prompts(1, tokens=3), NEVER))
        assert {*found} == {before + 1}
    finally:
        engine.close()
    assert torch.get_num_threads() == before
