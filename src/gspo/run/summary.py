"""The text before and after a run: an introduction to it, and a summary of its results."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from gspo.metrics.evaluation import measured, measures
from gspo.model.policy import Policy
from gspo.queries.source import QuerySet
from gspo.recipe.schema import Recipe
from gspo.reward.calls import RewardFunction


def introduction(recipe: Recipe, policy: Policy, queries: QuerySet, functions: Sequence[RewardFunction]) -> str:
    """Model, data and the derived arithmetic of a run, in four lines."""
    rollout, actor, model = recipe.rollout, recipe.actor, policy.model
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    about = f"{type(model).__name__}, {policy.num_parameters:,} parameters, {dtype} on {policy.device}"
    if not policy.supports_packing:
        about += "; trained padded, for its attention takes no packed sequences: slower"
    if (routing := policy.routing) is not None:
        about += f"; {routing.top_k} of {routing.num_experts} experts a token in {routing.num_layers} layer(s)"
        about += f", replay: {actor.routing_replay}"
    if policy.unknown_routers is not None:
        about += f"; its experts are not measured ({policy.unknown_routers})"
    names = ", ".join(function.name for function in functions)
    return (
        f"{recipe.name}: {about}\n"
        f"{len(queries.train):,} queries to train on, {len(queries.held_out):,} held out; reward: {names}\n"
        f"objective: {objective(recipe)}\n"
        f"{arithmetic(rollout.queries_per_step, rollout.group_size, actor.mini_batches, recipe.steps)}"
    )


def objective(recipe: Recipe) -> str:
    """The objective in a line: its ratio, its range, its advantages and its further terms."""
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
    """A sentence with the numbers of sequences and updates that follow from those of a recipe."""
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
    """The short table at the end: scores before and after, the place of the model and how to load it."""
    rows = []
    if signal is not None:
        num_steps = max((line["step"] for line in lines), default=0)
        rows.append(("ended early", f"by {Signals(signal).name} after {num_steps} steps"))
    rows += [*_scores(lines), ("time", f"{int(seconds // 60)} min {seconds % 60:.0f} s")]
    rows += [("diagnosis", sentence) for sentence in diagnoses.values()]
    rows += [("model", str(model)), ("load it", f'AutoModelForCausalLM.from_pretrained("{model}")')]
    if lines:
        run = model.parent if signal is None else model.parents[2]
        rows.append(("metrics", str(run / "metrics.jsonl")))
    if report is not None:
        rows.append(("report", str(report)))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)


def _scores(lines: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    evaluated = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    for measure in measures(evaluated) if len(evaluated) > 1 else ():
        before, after = measured(evaluated[0], measure), measured(evaluated[-1], measure)
        yield measure.label, f"{before} before → {after} after"
    if steps := [line for line in lines if line["step"] > 0]:
        first, last = steps[0], steps[-1]
        yield "reward", f"{first['reward/mean']:.3f} → {last['reward/mean']:.3f} in {last['step']} steps"
        yield "response tokens", f"{first['response/mean_tokens']:.1f} → {last['response/mean_tokens']:.1f}"
