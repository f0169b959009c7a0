"""How much of the routing an update changes, against sets of experts compared one by one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.mixtures import MIXTURES, conditioned, live_experts, turn_routers
from tests.samples import advantaged, learner_of, query_of, sample_of, updates
from tests.sampling import sample_groups

from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.optimizer import StepReport
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation, activation, watched_experts
from gspo.metrics.step import expert_metrics
from gspo.model.policy import Policy
from gspo.model.routing import Routing
from gspo.recipe.sections import RolloutConfig
from gspo.types import Batch, Experts

NewPolicy = Callable[..., Policy]
L, E, K = 3, 5, 2


def drawn(tokens: int, generator: torch.Generator) -> Experts:
    prefix, row = (torch.rand(n, L, E, generator=generator).argsort(-1)[..., :K].to(torch.uint8) for n in (2, tokens))
    return Experts(prefix=prefix, row=row)


def brute_force(now: Sequence[Experts], before: Sequence[Experts | None]) -> Activation:
    """Σ over response tokens of |experts now \\ experts before|, layer by layer; tokens without a before: no part."""
    load, changed, compared = torch.zeros(L, E, dtype=torch.long), [0] * L, [0] * L
    for one, then in zip(now, before, strict=True):
        for token, layers in enumerate(one.row.tolist()):
            for layer, experts in enumerate(layers):
                for expert in experts:
                    load[layer, expert] += 1
                if then is not None:
                    changed[layer] += len(set(experts) - set(then.row[token, layer].tolist()))
                    compared[layer] += K
    return Activation(load=load, changed=torch.tensor(changed), compared=torch.tensor(compared))


def counted(now: Sequence[Experts], before: Sequence[Experts | None], num_experts: int) -> Activation:
    routing = Routing([], num_experts=num_experts, top_k=K, gives_probabilities=False)
    found = activation(routing, now, before)
    assert found is not None
    return found


def same(found: Activation | None, expected: Activation) -> bool:
    assert found is not None
    return all(torch.equal(getattr(found, name), getattr(expected, name)) for name in ("load", "changed", "compared"))


def test_changes_and_load_are_those_of_sets_compared_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 4, 12]
    now, before = ([drawn(tokens, generator) for tokens in lengths] for _ in range(2))
    for known in ([True] * 4, [True, False, True, False], [False] * 4):
        then = [one if is_known else None for one, is_known in zip(before, known, strict=True)]
        found = counted(now, then, E)
        assert same(found, brute_force(now, then))
        assert found.load.sum(1).tolist() == [K * sum(lengths)] * L
        assert 0 < found.changed.sum() < found.compared.sum() or not any(known)
    parts = [counted([one], [then], E) for one, then in zip(now, before, strict=True)]
    assert same(parts[0] + parts[1] + parts[2] + parts[3], counted(now, list(before), E))


def test_neither_the_order_of_a_tokens_experts_nor_its_prompts_count() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = drawn(9, generator), drawn(9, generator)
    assert counted([one], [one], E).changed.tolist() == [0] * L
    turned = Experts(prefix=other.prefix, row=one.row.flip(-1))
    found = counted([turned], [one], E)
    assert found.changed.tolist() == [0] * L and found.compared.tolist() == [9 * K] * L
    assert torch.equal(found.load, counted([one], [None], E).load)


def test_all_of_a_tokens_experts_or_one_of_them_may_change() -> None:
    def row(*experts: list[int]) -> Experts:
        return Experts(prefix=torch.zeros(0, 1, 2, dtype=torch.uint8), row=torch.tensor([[one] for one in experts]))

    found = counted([row([0, 1], [0, 1], [0, 1])], [row([2, 3], [1, 2], [1, 0])], 4)
    assert found.changed.tolist() == [3] and found.compared.tolist() == [6]
    assert found.load.tolist() == [[3, 3, 0, 0]]


@pytest.fixture
def batch_of_samples(query_of: Any) -> Callable[..., Batch]:
    """What a policy samples to eight queries, some of it without an advantage."""

    def build(policy: Policy, num_queries: int = 8, **given: Any) -> Batch:
        queries = [query_of([4 + n] * (1 + 3 * n), n) for n in range(num_queries)]
        given |= {"group_size": 4, "seed": 0, "policy_version": 0}
        groups = sample_groups(policy, queries, RolloutConfig(max_new_tokens=5), **given)
        return advantaged(groups, [0.0, 1.0, 2.0, 1.0] * num_queries)

    return build


@pytest.fixture
def stepping(recording_optimizer: Any) -> Callable[..., Any]:
    """An optimiser whose steps give the routers other weights, or none."""

    def build(policy: Policy, turns: bool = True) -> Any:
        class Stepping(recording_optimizer):
            def step(self, *, loss_is_finite: bool = True) -> StepReport:
                report: StepReport = super().step(loss_is_finite=loss_is_finite)
                if turns:
                    turn_routers(policy, seed=len(self.gradients))
                return report

        return Stepping(policy.model)

    return build


def live(policy: Policy, batch: Batch, indices: Sequence[int]) -> list[Experts]:
    return [live_experts(policy, conditioned(batch.samples[index])) for index in indices]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_each_mini_batch_is_compared_with_the_policy_before_the_first_update(
    family: str, new_policy: NewPolicy, batch_of_samples: Any, stepping: Any, actor_of: Any
) -> None:
    policy = new_policy(family, **MIXTURES[family])
    batch = batch_of_samples(policy)
    trained = [index for index, sample in enumerate(batch.samples) if sample.advantage]
    assert len(trained) == 16
    before = dict(zip(trained, live(policy, batch, trained), strict=True))
    actor = actor_of(mini_batches=4, micro_batch_tokens=50)
    known = compute_old_logprobs(batch, learner_of(policy, actor))
    steps = updates(policy, stepping(policy), known, actor)
    reports: list[MiniBatchReport] = []
    for number in range(4):
        members = [index for index in trained if index // 8 == number]
        now = live(policy, batch, members)
        then = [before[index] if number else None for index in members]  # the first one's are π_old's
        reports.append(next(steps).report)
        assert same(reports[-1].activation, brute_force(now, then))
        assert reports[-1].after is None
    # The run's numbers: over all mini-batches after the first, by layer, and by the updates made before each.
    line: dict[str, Any] = dict(expert_metrics(known.samples, reports))
    later = [report.activation for report in reports[1:] if report.activation is not None]
    changed, compared = (sum(getattr(one, name) for one in later) for name in ("changed", "compared"))
    assert line["moe/expert_change_fraction"] == pytest.approx(int(changed.sum()) / int(compared.sum()))
    assert line["moe/expert_change_fraction_by_layer"] == pytest.approx((changed / compared).tolist())
    weights = [int(one.compared.sum()) for one in later]
    by_update = line["moe/expert_change_fraction_by_update"]
    assert by_update == pytest.approx([int(one.changed.sum()) / n for one, n in zip(later, weights, strict=True)])
    for values, shares in ((by_update, weights), (line["moe/expert_change_fraction_by_layer"], [1] * L)):
        mean = sum(value * share for value, share in zip(values, shares, strict=True)) / sum(shares)
        assert line["moe/expert_change_fraction"] == pytest.approx(mean)
    assert 0.2 < line["moe/expert_change_fraction"] < 1


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_where_no_weight_changes_no_expert_does(
    mini_batches: int, new_policy: NewPolicy, batch_of_samples: Any, stepping: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    batch, actor = batch_of_samples(policy), actor_of(mini_batches=mini_batches, micro_batch_tokens=50)
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    steps = updates(policy, stepping(policy, turns=False), batch, actor)
    line = expert_metrics(batch.samples, [step.report for step in steps])
    assert line["moe/expert_change_fraction"] == 0
    assert line["moe/expert_change_fraction_by_layer"] == [0] * L
    assert line["moe/expert_change_fraction_by_update"] == [0]


@pytest.mark.parametrize("num_queries", [2, 4, 8, 9])
def test_of_a_batchs_only_update_a_sample_is_read_before_and_after(
    num_queries: int, new_policy: NewPolicy, batch_of_samples: Any, stepping: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    batch, actor = batch_of_samples(policy, num_queries), actor_of()
    trained = [index for index, sample in enumerate(batch.samples) if sample.advantage]
    sample = trained[:: math.ceil(len(trained) / 8)]  # evenly spaced
    assert len(sample) == {2: 4, 4: 8, 8: 8, 9: 6}[num_queries]
    before = live(policy, batch, sample)
    ((report, _, _),) = updates(policy, stepping(policy), batch, actor)
    expected = brute_force(live(policy, batch, sample), before)
    assert same(report.after, expected)
    assert report.activation is not None and report.activation.compared.sum() == 0
    line = expert_metrics(batch.samples, [report])
    fraction = int(expected.changed.sum()) / int(expected.compared.sum())
    assert line["moe/expert_change_fraction"] == pytest.approx(fraction) and fraction > 0.2
    assert line["moe/expert_change_fraction_by_update"] == pytest.approx([fraction])


def test_a_dense_model_and_an_empty_mini_batch_have_no_sample(new_policy: NewPolicy, actor_of: Any) -> None:
    sample = sample_of(query_of([4]), [5, 6])
    assert not watched_experts(learner_of(new_policy("qwen3"), actor_of()), [sample])
    assert activation(None, [], []) is None and activation(new_policy("qwen3_moe").routing, [], []) is None
    assert not watched_experts(learner_of(new_policy("qwen3_moe"), actor_of()), [])


def test_the_sample_is_read_in_passes_within_the_budget(new_policy: NewPolicy, actor_of: Any, tokens_read: Any) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    samples = [sample_of(query_of([4 + n, 7, 8]), [5, 6, 7]) for n in range(6)]
    whole = watched_experts(learner_of(policy, actor_of(micro_batch_tokens=10**6)), samples)
    shapes = tokens_read(policy)
    cut = watched_experts(learner_of(policy, actor_of(micro_batch_tokens=12)), samples)
    assert max(rows * width for rows, width in shapes) <= 12
    found = counted(cut, whole, 5)
    assert found.changed.tolist() == [0] * 3 and found.compared.tolist() == [6 * 3 * 2] * 3


@pytest.mark.parametrize(
    ("replay", "old_logprobs"), [("none", "engine"), ("policy", "engine"), ("engine", "recompute")]
)
def test_the_first_mini_batch_is_compared_with_the_engine_where_that_has_recorded(
    replay: str, old_logprobs: str, new_policy: NewPolicy, batch_of_samples: Any, stepping: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    batch = batch_of_samples(policy, record_experts=True)
    turn_routers(policy, seed=7)  # the trainer's choice is not the engine's
    actor = actor_of(mini_batches=2, routing_replay=replay, old_logprobs=old_logprobs)
    first = [index for index, sample in enumerate(batch.samples) if sample.advantage and index < 16]
    expected = brute_force(live(policy, batch, first), [batch.samples[index].experts for index in first])
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    report, _, _ = next(updates(policy, stepping(policy), batch, actor))
    assert report.activation is not None
    # Under replay, the routers' choice is that given the replayed experts below them: none are below the first.
    layers = slice(1) if replay == "engine" else slice(None)
    assert torch.equal(report.activation.changed[layers], expected.changed[layers])
    assert torch.equal(report.activation.compared, expected.compared)
    line = expert_metrics(batch.samples, [report])
    fraction = int(report.activation.changed.sum()) / int(expected.compared.sum())
    assert line["mismatch/expert_fraction"] == pytest.approx(fraction) and fraction > 0.2


def test_a_later_mini_batch_is_compared_with_the_policy_whatever_the_engine_has_recorded(
    new_policy: NewPolicy, batch_of_samples: Any, stepping: Any, actor_of: Any
) -> None:
    policy = new_policy("qwen3_moe", **MIXTURES["qwen3_moe"])
    batch, actor = batch_of_samples(policy, record_experts=True), actor_of(mini_batches=2)
    turn_routers(policy, seed=7)  # the trainer's choice is not the engine's
    batch = compute_old_logprobs(batch, learner_of(policy, actor))
    first, second = (step.report.activation for step in updates(policy, stepping(policy, turns=False), batch, actor))
    assert first is not None and second is not None
    assert first.changed.sum() > 0 and second.changed.sum() == 0 < second.compared.sum()
