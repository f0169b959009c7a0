"""The words before and after a run: what is about to happen, and what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from gspo.metrics.evaluation import measured, measures
from gspo.model.policy import Policy
from gspo.queries.source import QuerySet
from gspo.recipe.schema import Recipe
from gspo.reward.functions import RewardFunction


def introduction(recipe: Recipe, policy: Policy, queries: QuerySet, functions: Sequence[RewardFunction]) -> str:
    """Model, data and the derived arithmetic of a run, in four lines."""
    rollout, actor = recipe.rollout, recipe.actor
    kind = type(policy.model).__name__
    dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
    about = "" if policy.supports_packing else "; trained padded, for its attention takes no packed sequences: slower"
    if (routing := policy.routing) is not None:
        about += f"; {routing.top_k} of {routing.num_experts} experts a token in {routing.num_layers} layer(s)"
        about += f", replay: {actor.routing_replay}"
    if policy.unknown_routers is not None:
        about += f"; its experts are not measured ({policy.unknown_routers})"
    return "\n".join(
        [
            f"{recipe.name}: {kind}, {policy.num_parameters:,} parameters, {dtype} on {policy.device}{about}",
            f"{len(queries.train):,} queries to train on, {len(queries.held_out):,} held out; "
            f"reward: {', '.join(function.name for function in functions)}",
            f"objective: {objective(recipe)}",
            arithmetic(rollout.queries_per_step, rollout.group_size, actor.mini_batches, recipe.steps),
        ]
    )


def objective(recipe: Recipe) -> str:
    """The objective in a line: its ratio, its range, its advantages, and what is added to it."""
    actor, rollout, kl = recipe.actor, recipe.rollout, recipe.actor.kl
    ratio = "none" if actor.surrogate == "reinforce" else actor.importance_sampling_level
    scaled = "" if actor.clip_fraction is None else f" scaled to clip {actor.clip_fraction:.0%}"
    parts = {
        f"clip {actor.clip_low:g}/{actor.clip_high:g}{scaled}": actor.surrogate not in ("sapo", "reinforce"),
        f"{kl.coefficient:g} · {kl.estimator} of the KL in the {kl.place}": kl.coefficient,
        f"entropy bonus {actor.entropy_bonus:g}": actor.entropy_bonus,
        f"correction {actor.correction}": actor.correction != "none",
        f"OPSM above {actor.opsm_delta or 0:g}": actor.opsm_delta is not None,
        f"value model: {recipe.critic.trunk} trunk": actor.advantage == "gae",
        f"dynamic sampling, at most {rollout.max_rounds} rounds": rollout.dynamic_sampling,
        f"overlong responses: {rollout.overlong}": rollout.overlong != "keep",
    }
    name = f"{actor.title} (ratio: {ratio}, advantage: {actor.advantage}, length norm: {actor.length_norm})"
    return ", ".join([name, *(text for text, applies in parts.items() if applies)])


def arithmetic(queries_per_step: int, group_size: int, mini_batches: int, steps: int) -> str:
    """The numbers that follow from a recipe's, in a sentence."""
    sequences = queries_per_step * group_size
    return (
        f"{queries_per_step} queries × {group_size} responses = {sequences} sequences a step, "
        f"in {mini_batches} mini-batch(es) of {sequences // mini_batches}; "
        f"{steps} steps = {steps * mini_batches} optimiser steps"
    )


def summary(
    lines: Sequence[Mapping[str, Any]],
    diagnoses: Mapping[str, str],
    model: Path,
    seconds: float,
    *,
    signal: int | None = None,
    report: Path | None = None,
) -> str:
    """The short table at the end: scores before and after, where the model lies and how to load it."""
    done = max((line["step"] for line in lines), default=0)
    rows = [] if signal is None else [("ended early", f"by {Signals(signal).name} after {done} steps")]
    rows += [*_scores(lines), ("time", f"{int(seconds // 60)} min {seconds % 60:.0f} s")]
    rows += [("diagnosis", sentence) for sentence in diagnoses.values()]
    rows += [("model", str(model)), ("load it", f'AutoModelForCausalLM.from_pretrained("{model}")')]
    if lines:
        home = model.parent if signal is None else model.parents[2]
        rows.append(("metrics", str(home / "metrics.jsonl")))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _scores(lines: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    rows = []
    evaluated = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    if len(evaluated) > 1:
        first, last = evaluated[0], evaluated[-1]
        for measure in measures(evaluated):
            score = f"{measured(first, measure)} before → {measured(last, measure)} after"
            rows.append((measure.label, score))
    steps = [line for line in lines if line["step"] > 0]
    if steps:
        first, last = steps[0], steps[-1]
        rows.append(("reward", f"{first['reward/mean']:.3f} → {last['reward/mean']:.3f} in {last['step']} steps"))
        name = "response/mean_tokens"
        rows.append(("response tokens", f"{first[name]:.1f} → {last[name]:.1f}"))
    return rows
