"""Responses whose tokens several policies drew: s and the gradient, against the equations in float64."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.samples import advantaged, learner_of, sample_of, updates
from torch import Tensor

from gspo.engine.embedded.decoding import Decoding
from gspo.engine.engine import Completion, Prompt, Sampling
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy
from gspo.recipe.sections import OptimizerConfig
from gspo.types import Batch, Group, Query

NewPolicy = Callable[..., Policy]
SIZE, LENGTH, CHANGES = 4, 18, (6, 11)  # before which tokens the weights are replaced
WIDE = {"clip_low": 1.0, "clip_high": 10.0, "mini_batches": 1}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch that three policies drew, and a fourth one that learns from it."""

    policy: Policy
    batch: Batch
    drawn: Sequence[Tensor]  # for each response, in float64, what each token's own policy gave it
    now: Sequence[Tensor]  # what the policy gives it, with gradients
    model: Any  # the policy's in float64, whose parameters these are of


def moved(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))


def likelihood(model: Any, prompt: Sequence[int], response: Tensor) -> Tensor:
    ids = torch.tensor([[*prompt, *response.tolist()]])
    table = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    return torch.stack([table[len(prompt) + t - 1, token] for t, token in enumerate(response.tolist())])


@pytest.fixture
def case(new_policy: NewPolicy, query_of: Callable[..., Query]) -> Case:
    policy = new_policy()
    queries, models, due = (
        [query_of([4, 5, 6], 0), query_of([7], 1)],
        [copy.deepcopy(policy.model).double()],
        list(CHANGES),
    )

    def look() -> None:
        if due and decoding.transcript.num_steps == due[0]:
            moved(policy, due.pop(0))
            with torch.inference_mode(False):
                models.append(copy.deepcopy(policy.model).double())
            decoding.change_weights(4 * len(models) - 4, keep_cache=False)

    found = dict[int, Completion]()
    decoding = Decoding(
        policy=policy,
        prompts=[
            Prompt(ids=queries[number // SIZE].prompt_ids, key=number, max_new_tokens=LENGTH)
            for number in range(2 * SIZE)
        ],
        sampling=Sampling(stop_ids=policy.stop_ids),
        max_rows=2 * SIZE,
        check=look,
        put=found.__setitem__,
    )
    with torch.inference_mode():
        decoding.generate()
    samples, drawn = [], []
    for number, response in sorted(found.items()):
        query, end, parts = queries[number // SIZE], 0, list[Tensor]()
        for version, count in response.versions:
            whole = likelihood(models[version // 4], query.prompt_ids, response.token_ids).detach()
            parts.append(whole[end : (end := end + count)])
        drawn.append(torch.cat(parts))
        own = {"sampler_logprobs": response.logprobs, "versions": response.versions, "text": "a"}
        samples.append(sample_of(query, response.token_ids, **own))
    assert max(len(sample.versions) for sample in samples) == 3
    moved(policy, 99)
    model = copy.deepcopy(policy.model).double()
    now = [likelihood(model, sample.query.prompt_ids, sample.token_ids) for sample in samples]
    groups = [Group(samples=tuple(samples[:SIZE])), Group(samples=tuple(samples[SIZE:]))]
    batch = advantaged(groups, [float((3 * n) % 5) for n in range(2 * SIZE)])
    return Case(policy=policy, batch=batch, drawn=drawn, now=now, model=model)


def gradient_norm(case: Case, objective: Tensor) -> float:
    case.model.zero_grad()
    (-objective).backward()
    parameters = {id(own): own for own in case.model.parameters()}.values()
    return float(torch.stack([own.grad.square().sum() for own in parameters if own.grad is not None]).sum().sqrt())


def advantages(case: Case) -> list[float]:
    found = [sample.advantage for sample in case.batch.samples]
    return [own for own in found if own is not None]


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_by_the_engine_each_token_is_compared_with_the_policy_that_drew_it(
    level: str, case: Case, actor_of: Any
) -> None:
    actor = actor_of(old_logprobs="engine", importance_sampling_level=level, **WIDE)
    step = _step(case, actor)
    terms = []
    for place, (now, drawn, advantage) in enumerate(zip(case.now, case.drawn, advantages(case), strict=True)):
        ratio = (now - drawn).mean().exp() if level == "sequence" else (now - drawn).exp()
        terms.append((ratio * advantage).mean())
        assert step.trained[place].sequence_ratio == pytest.approx(float((now - drawn).mean().exp().detach()), rel=1e-5)
        torch.testing.assert_close(step.trained[place].old_logprobs.double(), drawn, rtol=0, atol=1e-5)
    assert step.report.step.grad_norm == pytest.approx(gradient_norm(case, torch.stack(terms).mean()), rel=1e-4)


def test_recomputed_the_ratio_is_1_and_what_the_steps_in_between_changed_is_nowhere(case: Case, actor_of: Any) -> None:
    step = _step(case, actor_of(old_logprobs="recompute", **WIDE))
    terms = []
    for place, (now, advantage) in enumerate(zip(case.now, advantages(case), strict=True)):
        assert step.trained[place].sequence_ratio == 1.0
        terms.append((now - now.detach()).mean().exp() * advantage)
    assert step.report.step.grad_norm == pytest.approx(gradient_norm(case, torch.stack(terms).mean()), rel=1e-4)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_each_token_is_weighed_by_what_they_changed_of_it(level: str, case: Case, actor_of: Any) -> None:
    own = {"old_logprobs": "recompute", "correction": "decoupled", "correction_level": level}
    step = _step(case, actor_of(**own, **WIDE))
    terms = []
    for place, (now, drawn, advantage) in enumerate(zip(case.now, case.drawn, advantages(case), strict=True)):
        log_weight = (now - drawn).detach()
        weight = log_weight.exp() if level == "token" else log_weight.mean().exp()
        assert step.trained[place].sequence_ratio == 1.0
        assert step.trained[place].correction_weight == pytest.approx(float(weight.mean()), rel=1e-5)
        terms.append((weight * (now - now.detach()).mean().exp() * advantage).mean())
    assert step.report.step.grad_norm == pytest.approx(gradient_norm(case, torch.stack(terms).mean()), rel=1e-4)


def _step(case: Case, actor: Any) -> Any:
    batch = compute_old_logprobs(case.batch, learner_of(case.policy, actor))
    optimizer = Optimizer(case.policy.model, OptimizerConfig(lr=1e-3), total_steps=1)
    (step,) = updates(case.policy, optimizer, batch, actor)
    assert len(step.trained) == len([own for own in advantages(case) if own])
    return step
