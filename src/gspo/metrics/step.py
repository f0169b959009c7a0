"""The numbers of a step and of an evaluation, under the names that docs/reference/metrics.md defines."""

import math
import resource
import statistics
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import torch

from gspo.errors import FailureKind
from gspo.evaluation.held_out import Numbers
from gspo.learner.advantages import rewards_differ
from gspo.learner.optimizer import Noise
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.metrics.numbers import Metrics, fraction, mean
from gspo.metrics.sequences import sequence_metrics, trained_rows
from gspo.queries.order import PassRates
from gspo.recipe.sections import ActorConfig
from gspo.types import Batch, Group, Sample


def step_metrics(
    batch: Batch,
    reports: Sequence[MiniBatchReport],
    seconds: Mapping[str, float],
    actor: ActorConfig,
    sampling: str = "rollout",
    turn_marks: Collection[str] = (),
) -> Metrics:
    """Return everything a line of metrics.jsonl holds besides the step and evaluations.

    `sampling` is the stage that tokens are sampled in: where groups are sampled ahead, all of a step, `total`. One of
    `turn_marks` stands in a text that goes on behind its turn.
    """
    samples, rows = batch.samples, trained_rows(batch.samples)
    # Of all that was sampled: what dynamic sampling has kept would say more of the choice than of the policy.
    groups = (*batch.groups, *batch.dropped)
    sampled = [sample for group in groups for sample in group.samples]
    cut = [sample for sample in sampled if sample.finish_reason == "length"]
    run_on = [sample for sample in cut if any(mark in sample.answer for mark in turn_marks)]
    generated = sum(sample.num_written for sample in sampled)
    return {
        **_reward_metrics(sampled),
        **logged_metrics(batch.logged),
        **_source_metrics(groups, actor),
        "group/sampled": float(len(groups)),
        "group/zero_variance_fraction": 1 - sum(rewards_differ(groups, actor=actor)) / len(groups),
        "response/mean_tokens": mean([sample.num_tokens for sample in sampled]),
        "response/truncated_fraction": len(cut) / len(sampled),
        "response/run_on_fraction": len(run_on) / len(sampled),
        "response/masked_fraction": sum(sample.masked for sample in samples) / len(samples),
        **sequence_metrics(rows, len(reports), actor),
        **_update_metrics(reports),
        **_reference_metrics(samples, reports, actor),
        **_teacher_metrics(samples),
        **_critic_metrics(samples, reports),
        **_mismatch_metrics(samples),
        **_sampling_metrics(sampled),
        **_turn_metrics(sampled, reports, actor),
        **expert_metrics(samples, reports),
        **{f"time/{name}_seconds": value for name, value in seconds.items()},
        **{f"reward/{name}/seconds": value for name, value in batch.reward_seconds.items()},
        "throughput/generated_tokens_per_second": generated / max(seconds[sampling], 1e-9),
        "throughput/trained_tokens_per_second": sum(rows["num_tokens"]) / max(seconds["update"], 1e-9),
        "memory/peak_bytes": float(peak_bytes()),
    }


def curriculum_metrics(rates: PassRates, num_queries: int) -> Metrics:
    """Return how much of the queries is known, and how hard they are for the policy."""
    known = [rate for rate, _ in rates.values()]
    return {
        "curriculum/seen_fraction": len(known) / num_queries,
        "curriculum/pass_rate": mean(known),
        "curriculum/solved_fraction": mean([float(rate == 1) for rate in known]),
        "curriculum/hopeless_fraction": mean([float(rate == 0) for rate in known]),
    }


def evaluation_metrics(numbers: Numbers, logged: Mapping[str, tuple[float, int]], set_name: str) -> Metrics:
    """Return the metrics of an evaluation, under the same names for every one of a run."""
    functions = numbers["function_means"] if len(numbers["function_means"]) > 1 else {}
    home = f"evaluation/{set_name}"
    return {
        f"{home}/pass_at_1": numbers["pass_at_1"],
        f"{home}/standard_error": numbers["error_over_questions"],
        f"{home}/standard_error_samples": numbers["error_over_samples"],
        **{f"{home}/pass_at_{k}": rate for k, rate in numbers["pass_at_k"].items()},
        f"{home}/reward_mean": numbers["reward_mean"],
        f"{home}/reward_standard_error": numbers["reward_error"],
        f"{home}/unjudged_fraction": numbers["num_unjudged"] / numbers["num_responses"],
        f"{home}/failed_fraction": numbers["num_failed"] / numbers["num_responses"],
        f"{home}/mean_tokens": numbers["mean_response_tokens"],
        f"{home}/truncated_fraction": numbers["truncated_fraction"],
        **{f"{home}/{function}/mean": mean for function, mean in functions.items()},
        **logged_metrics(logged, f"{home}/"),
    }


def logged_metrics(logged: Mapping[str, tuple[float, int]], home: str = "") -> Metrics:
    """Return what reward functions have logged by themselves, under names that no metric of ours can have."""
    return {f"{home}logged/{name}": total / count for name, (total, count) in logged.items()}


def peak_bytes() -> int:
    """The most memory held so far: on the GPU where there is one, else by this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reward_metrics(samples: Sequence[Sample]) -> Metrics:
    scores = [sample.score for sample in samples if sample.score is not None]
    rewards = [score.reward for score in scores if score.reward is not None]
    failures = Counter(score.failure.kind for score in scores if score.failure is not None)
    parts = {name: [score.parts[name] for score in scores] for name in scores[0].parts}
    applied = {name: [value for value in values if value is not None] for name, values in parts.items()}
    return {
        "reward/mean": mean(rewards),
        "reward/std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "reward/unscored_fraction": 1 - len(rewards) / len(scores),
        "reward/masked_fraction": failures.total() / len(scores),
        **{f"reward/{kind}_rollouts": float(failures[kind]) for kind in get_args(FailureKind)},
        **{f"reward/{name}/mean": mean(values) for name, values in applied.items() if values and len(parts) > 1},
    }


def _source_metrics(groups: Sequence[Group], actor: ActorConfig) -> Metrics:
    """Return the numbers of each of several sources of queries."""
    found = Metrics()
    for source in sorted({group.query.source for group in groups} - {""}):
        own = [group for group in groups if group.query.source == source]
        rewards = [sample.score.reward for group in own for sample in group.samples if sample.score]
        found[f"queries/{source}/sampled"] = float(len(own))
        found[f"queries/{source}/reward_mean"] = mean([reward for reward in rewards if reward is not None])
        found[f"queries/{source}/zero_variance_fraction"] = 1 - sum(rewards_differ(own, actor=actor)) / len(own)
    return found


def _turn_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport], actor: ActorConfig) -> Metrics:
    turns = [turn for sample in samples for turn in sample.turns]
    if not turns:
        return {}
    calls = sum(turn.num_calls for turn in turns)
    losses = [report.observation_loss for report in reports]
    return {
        **({"turns/observation_loss": mean(losses)} if actor.observation_loss else {}),
        "turns/mean": sum(turn.role == "assistant" for turn in turns) / len(samples),
        "turns/most_fraction": sum(sample.finish_reason == "turns" for sample in samples) / len(samples),
        "turns/written_fraction": sum(s.num_written for s in samples) / sum(s.num_tokens for s in samples),
        "tools/calls_mean": calls / len(samples),
        "tools/error_fraction": sum(turn.num_errors for turn in turns) / calls if calls else 0.0,
    }


def _update_metrics(reports: Sequence[MiniBatchReport]) -> Metrics:
    noises = [report.noise or Noise(signal=0.0, noise=0.0) for report in reports]
    return {
        "clip/low": reports[-1].clip_range[0],
        "clip/high": reports[-1].clip_range[1],
        "balance/slowest_over_mean": mean([report.slowest_over_mean for report in reports]),
        "time/update_slowest_over_mean": mean([report.measured_slowest_over_mean for report in reports]),
        # Sums before the quotient: that of one mini-batch is a poor estimate, and can be negative.
        "gradient/signal_to_noise": fraction(
            sum(noise.signal for noise in noises), sum(noise.noise for noise in noises)
        ),
        "gradient/signal_to_noise_by_mini_batch": [fraction(noise.signal, noise.noise) for noise in noises],
        "policy/loss": mean([report.loss for report in reports]),
        "policy/grad_norm": mean([report.step.grad_norm for report in reports]),
        "policy/learning_rate": reports[-1].step.learning_rate,
        "policy/skipped_updates": float(sum(not report.step.applied for report in reports)),
    }


def _mismatch_metrics(samples: Sequence[Sample]) -> Metrics:
    """Engine against π_old, token by token; exactly 0 where the engine's own log-likelihoods are π_old."""
    gaps = [(s.stats.old_logprobs - s.engine_logprobs).abs() for s in samples if s.stats is not None]
    gap = torch.cat(gaps) if gaps else torch.zeros(1)
    return {"mismatch/logprob_gap_mean": float(gap.mean()), "mismatch/logprob_gap_max": float(gap.max())}


def _sampling_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return how far q, which tokens are drawn from, is from π; empty where it is π."""
    pairs = [(s.full_logprobs, s.sampler_logprobs) for s in samples if s.full_logprobs is not None]
    if not pairs or pairs[0][0].isnan().all():  # of a server, which does not say how likely a token is in all of π
        return {}
    weights = torch.cat([full - drawn for full, drawn in pairs]).double().exp()
    return {
        # The mean over y ~ q of π/q is the sum of π over what q can draw.
        "sampling/kept_mass": float(weights.mean()),
        "sampling/effective_fraction": float(weights.sum() ** 2 / (len(weights) * weights.square().sum())),
    }


def _reference_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport], actor: ActorConfig) -> Metrics:
    """Return how far the policy is from its reference; empty where it has none."""
    gaps = [s.engine_logprobs - s.reference_logprobs for s in samples if s.reference_logprobs is not None]
    if gaps and actor.kl.place == "loss":
        by_mini_batch = [report.kl for report in reports]
        return {"reference/kl": mean(by_mini_batch), "reference/kl_by_mini_batch": by_mini_batch}
    return {"reference/kl": mean([float(gap.double().mean()) for gap in gaps])} if gaps else {}


def _teacher_metrics(samples: Sequence[Sample]) -> Metrics:
    """Return how far the policy is from its teacher; empty where it has none."""
    gaps = [s.engine_logprobs - s.teacher_logprobs for s in samples if s.teacher_logprobs is not None]
    return {"teacher/kl": mean([float(gap.double().mean()) for gap in gaps])} if gaps else {}


def _critic_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport]) -> Metrics:
    """Return what the value model knows of the returns, and its updates; empty where there is none."""
    pairs = [(s.returns, s.values) for s in samples if s.returns is not None and s.values is not None]
    if not pairs:
        return {}
    returns, values = (torch.cat(column).double() for column in zip(*pairs, strict=True))
    unexplained = fraction(float((returns - values).var(correction=0)), float(returns.var(correction=0)))
    steps = [report.critic_step for report in reports if report.critic_step is not None]
    return {
        "critic/explained_variance": 1 - unexplained,
        "critic/value_mean": float(values.mean()),
        "critic/loss": mean([report.value_loss for report in reports]),
        "critic/grad_norm": mean([step.grad_norm for step in steps]),
        "critic/learning_rate": steps[-1].learning_rate if steps else math.nan,
    }


def expert_metrics(samples: Sequence[Sample], reports: Sequence[MiniBatchReport]) -> Metrics:
    """Return how much of a mixture's routing an update changes, and how even the experts' load is.

    Empty for a model without routers, and where nothing was trained on.
    """
    loads = [report.activation.load for report in reports if report.activation is not None]
    if not loads:
        return {}
    load = torch.stack(loads).sum(0)  # by layer and expert
    busiest = (load / load.float().mean(-1, keepdim=True)).amax(-1)
    recorded = [experts for sample in samples for experts in (sample.experts, sample.old_experts) if experts]
    # What samples share counts once.
    tensors = {tensor.data_ptr(): tensor for experts in recorded for tensor in (experts.prefix, experts.row)}
    metrics: Metrics = {
        **_expert_changes(reports),
        "moe/busiest_expert_load": float(busiest.mean()),
        "moe/busiest_expert_load_by_layer": busiest.tolist(),
        "moe/idle_expert_fraction": float((load == 0).float().mean()),
        "moe/recorded_bytes": float(sum(tensor.nbytes for tensor in tensors.values())),
    }
    if any(report.balance_loss for report in reports):
        sums = sum(report.balance_loss * report.num_trained for report in reports)
        metrics["moe/balance_loss"] = sums / sum(report.num_trained for report in reports)
    return metrics


def _expert_changes(reports: Sequence[MiniBatchReport]) -> Metrics:
    """The changes of experts after each number of updates; of a batch's only update, on a sample."""
    metrics: Metrics = {}
    if not math.isnan(mismatch := _changed_fraction(reports[0].activation)):
        metrics["mismatch/expert_fraction"] = mismatch
    by_update = [report.activation for report in reports[1:]] or [reports[0].after]
    compared = [counts for counts in by_update if counts is not None and counts.compared.sum() > 0]
    if compared:
        total = sum(compared[1:], compared[0])
        metrics["moe/expert_change_fraction"] = _changed_fraction(total)
        metrics["moe/expert_change_fraction_by_layer"] = (total.changed / total.compared).tolist()
        metrics["moe/expert_change_fraction_by_update"] = list(map(_changed_fraction, by_update))
    return metrics


def _changed_fraction(counts: Activation | None) -> float:
    """NaN of a mini-batch without any advantage, and where nothing could be compared."""
    return math.nan if counts is None else fraction(int(counts.changed.sum()), int(counts.compared.sum()))
