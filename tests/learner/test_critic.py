"""The critic: its loss reaches what it should and nothing else, it learns, and it goes on as it was."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.samples import accumulated, changed, learner_of, sequence_of, sequences_of, updates, with_old
from torch import Tensor

from gspo.learner.critic import Critic
from gspo.learner.forward_passes import compute_old_logprobs, score_with_models
from gspo.learner.loss import Denominators
from gspo.learner.micro_batching import trained_samples
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import MiniBatchReport
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy
from gspo.recipe.sections import CriticConfig, OptimizerConfig
from gspo.types import Batch

NewPolicy = Callable[..., Policy]
PPO = {"advantage": "gae", "importance_sampling_level": "token", "clip_low": 0.2, "clip_high": 0.2}
REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.5], [0.0, None], [2.0, 0.0, 1.0, 0.5]]
TRUNKS = pytest.mark.parametrize("trunk", ["own", "shared"])


def critic_of(
    new_policy: NewPolicy, policy: Policy, trunk: Any, *, opinionated: bool = True, **settings: Any
) -> Critic:
    """With a head that is not the zero of the beginning, through which nothing would reach the trunk."""
    dtype = str(policy.head.weight.dtype).removeprefix("torch.")
    own = new_policy(seed=5, dtype=dtype) if trunk == "own" else None
    critic = Critic(CriticConfig(trunk=trunk, **settings), policy, own, total_steps=9)
    if opinionated:
        with torch.no_grad():
            critic._head.weight.copy_(
                torch.randn(critic._head.weight.shape, generator=torch.Generator().manual_seed(0))
            )
            critic._head.bias.fill_(0.3)
    return critic


def plain_values(policy: Policy, critic: Critic, sequence: TokenSequence) -> Tensor:
    """From a plain pass over one sequence; the state before token t is that of the token before it."""
    model = policy.model if critic._own is None else critic._own.model
    ids = torch.tensor([[*sequence.prompt_ids, *sequence.response_ids.tolist()]])
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(sequence.prompt_ids) - 1 : -1]
    return (states.float() @ critic._head.weight[0]) + critic._head.bias


def to_learn(batch: Batch, returns: Callable[[int, TokenSequence], Tensor]) -> Batch:
    """No advantages, so that all of the gradient is the value loss's; the old values are near 0."""
    sequences, samples = sequences_of(batch), batch.samples
    old = [None if s.reward is None else torch.linspace(-0.1, 0.1, s.num_tokens) for s in samples]
    aims = [
        None if sample.reward is None else returns(index, sequence)
        for index, (sample, sequence) in enumerate(zip(samples, sequences, strict=True))
    ]
    return changed(batch, advantage=[0.0] * len(samples), values=old, returns=aims)


def some_returns(index: int, sequence: TokenSequence) -> Tensor:
    return torch.randn(len(sequence.response_ids), generator=torch.Generator().manual_seed(index))


def gradients(model: Any) -> Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def cleared(*models: Any) -> None:
    for model in models:
        model.zero_grad()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10**6])
@TRUNKS
def test_the_gradient_is_that_of_the_value_loss_written_plainly_and_reaches_nothing_else(
    trunk: str, micro_batch_tokens: int, clip: float | None, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    critic = critic_of(new_policy, policy, trunk, clip=clip, coefficient=0.25)
    batch = to_learn(batch_of(REWARDS, vocabulary=len(policy.tokenizer)), some_returns)
    actor = actor_of(micro_batch_tokens=micro_batch_tokens, **PPO)
    samples = trained_samples(batch.groups, actor)
    assert [batch.samples.index(sample) for sample in samples] == [0, 1, 2, 3, 5, 6, 7, 8]
    seen, _ = accumulated(policy, samples, actor, Denominators(num_sequences=8), critic=critic)
    trunks = policy.model if critic._own is None else critic._own.model
    found, found_head = gradients(trunks), gradients(critic._head)
    if trunk == "own":  # there is no advantage either
        assert not gradients(policy.model).any()
    cleared(policy.model, trunks, critic._head)
    loss = torch.zeros(())
    for sample in samples:
        values = plain_values(policy, critic, sequence_of(sample))
        assert sample.values is not None and sample.returns is not None
        for value, was, aim in zip(values, sample.values, sample.returns, strict=True):
            error = (value - aim) ** 2
            if clip is not None:
                error = max(error, (was + min(max(value - was, torch.tensor(-clip)), torch.tensor(clip)) - aim) ** 2)
            loss = loss + error / 2 / len(values) / 8
    (loss * (0.25 if trunk == "shared" else 1.0)).backward()
    for gradient, model in ((found, trunks), (found_head, critic._head)):
        expected = gradients(model)
        assert expected.norm() > 1e-3 and (gradient - expected).norm() / expected.norm() <= 1e-4
    assert seen.value_loss == pytest.approx(loss.item(), rel=1e-4)
    assert not seen.loss and not seen.kl


@TRUNKS
def test_values_do_not_depend_on_what_else_is_in_the_pass(
    trunk: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    critic = critic_of(new_policy, policy, trunk)
    batch = batch_of(REWARDS, vocabulary=len(policy.tokenizer))
    sequences = sequences_of(batch)
    for tokens in (1, 30, 10**6):
        actor = actor_of(micro_batch_tokens=tokens, gradient_noise=tokens == 30)
        scored = score_with_models(batch, learner_of(policy, actor, critic=critic), None)
        values_of = {index: s.values for index, s in enumerate(scored.samples) if s.values is not None}
        assert list(values_of) == [0, 1, 2, 3, 5, 6, 7, 8]
        for index, values in values_of.items():
            with torch.no_grad():
                expected = plain_values(policy, critic, sequences[index])
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)


@TRUNKS
def test_it_begins_with_the_policys_weights_and_no_opinion(trunk: str, new_policy: NewPolicy, batch_of: Any) -> None:
    policy = new_policy()
    critic = critic_of(new_policy, policy, trunk, opinionated=False)
    assert not any(parameter.any() for parameter in critic._head.parameters())
    if critic._own is not None:
        pairs = zip(critic._own.model.parameters(), policy.model.parameters(), strict=True)
        assert all(torch.equal(p, q) and p is not q and p.data_ptr() != q.data_ptr() for p, q in pairs)
    assert (critic._own is None) == (trunk == "shared")


def trained(
    policy: Policy, critic: Critic, batch: Batch, actor: Any, *, steps: int, lr: float = 1e-6
) -> list[MiniBatchReport]:
    optimizer, reports = Optimizer(policy.model, OptimizerConfig(lr=lr), total_steps=steps), []
    for _ in range(steps):
        current = compute_old_logprobs(batch, learner_of(policy, actor))
        reports += [step.report for step in updates(policy, optimizer, current, actor, critic=critic)]
    optimizer.close()
    return reports


@TRUNKS
def test_it_learns_a_simple_return(trunk: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any) -> None:
    # The return is higher after a prompt that ends with an odd token, and falls with every token of the response.
    def simple(index: int, sequence: TokenSequence) -> Tensor:
        return 1.0 * (sequence.prompt_ids[-1] % 2) - 0.1 * torch.arange(len(sequence.response_ids))

    policy = new_policy()
    critic = critic_of(new_policy, policy, trunk, opinionated=False, clip=None, optimizer={"lr": 1e-2})
    batch = to_learn(batch_of([[0.0, 1.0]] * 8, vocabulary=len(policy.tokenizer)), simple)
    actor = actor_of(**PPO)

    def explained() -> float:
        with torch.no_grad():
            values = torch.cat([plain_values(policy, critic, sequence) for sequence in sequences_of(batch)])
        returns = torch.cat([s.returns for s in batch.samples if s.returns is not None])
        return 1 - float((returns - values).var() / returns.var())

    assert explained() == pytest.approx(0.0, abs=1e-5)
    reports = trained(policy, critic, batch, actor, steps=40, lr=1e-2)
    assert explained() > 0.5
    assert reports[-1].value_loss < 0.5 * reports[0].value_loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@TRUNKS
def test_put_back_to_where_it_was_it_goes_on_bit_by_bit(
    trunk: str, dtype: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy(dtype=dtype)
    batch = to_learn(batch_of(REWARDS, vocabulary=len(policy.tokenizer)), some_returns)
    actor, lr = actor_of(**PPO), {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 3}
    critic = critic_of(new_policy, policy, trunk, opinionated=False, optimizer=lr)
    trained(policy, critic, batch, actor, steps=2)
    state = {name: tensor.clone() for name, tensor in critic.state().items()}
    weights = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    trained(policy, critic, batch, actor, steps=3)
    expected = critic.state()
    assert any(not torch.equal(expected[name], state[name]) for name in state)
    other = new_policy(dtype=dtype, seed=8)
    other.model.load_state_dict(weights)
    again = critic_of(new_policy, other, trunk, optimizer=lr)
    again.restore(state)
    assert all(torch.equal(again.state()[name], tensor) for name, tensor in state.items())
    trained(other, again, batch, actor, steps=3)
    found = again.state()
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("fault", ["policy's loss", "policy's gradient", "value loss"])
@TRUNKS
def test_a_step_that_one_of_them_skips_the_other_skips_too(
    trunk: str, fault: str, new_policy: NewPolicy, batch_of: Any, actor_of: Any
) -> None:
    policy = new_policy()
    critic = critic_of(new_policy, policy, trunk, optimizer={"lr": 1e-2})
    batch = to_learn(batch_of(REWARDS, vocabulary=len(policy.tokenizer)), some_returns)
    first = batch.samples[0]
    batch = batch.with_changed({first: dataclasses.replace(first, advantage=1.0)})
    hooks: Sequence[Any] = ()
    if fault == "policy's loss":
        nan = {i: torch.full((s.num_tokens,), torch.nan) for i, s in enumerate(batch.samples) if s.returns is not None}
        batch = with_old(batch, nan)
    elif fault == "policy's gradient":
        hooks = [policy.head.weight.register_hook(lambda gradient: gradient * torch.nan)]
    else:
        broken = dataclasses.replace(batch.samples[0], returns=torch.full((first.num_tokens,), torch.nan))
        batch = batch.with_changed({batch.samples[0]: broken})
    policy_before = [p.detach().clone() for p in policy.model.parameters()]
    before = {name: tensor.clone() for name, tensor in critic.state().items() if not name.startswith("optimizer")}
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-2), total_steps=2)
    ((report, _, _),) = updates(policy, optimizer, batch, actor_of(**PPO), critic=critic)
    assert report.critic_step is not None
    assert not report.step.applied and not report.critic_step.applied
    assert all(torch.equal(p, q) for p, q in zip(policy.model.parameters(), policy_before, strict=True))
    assert all(torch.equal(critic.state()[name], tensor) for name, tensor in before.items())
    for hook in hooks:
        hook.remove()
    batch = with_old(to_learn(batch, some_returns), {})
    ((report, _, _),) = updates(policy, optimizer, batch, actor_of(**PPO), critic=critic)
    assert report.critic_step is not None and report.step.applied and report.critic_step.applied
    assert not torch.equal(critic.state()["head.weight"], before["head.weight"])
