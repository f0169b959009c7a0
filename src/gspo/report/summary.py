"""The words before and after a run: what is about to happen, and what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gspo.config import Recipe
from gspo.prepare import Prepared


def introduction(recipe: Recipe, parts: Prepared) -> str:
    """Model, data and the derived arithmetic of a run, in three lines."""
    policy, rollout, actor = parts.policy, recipe.rollout, recipe.actor
    kind = type(policy.model).__name__
    dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
    return "\n".join(
        [
            f"{recipe.name}: {kind}, {policy.num_parameters:,} parameters, {dtype} on {policy.device}",
            f"{len(parts.queries.train):,} queries to train on, {len(parts.queries.held_out):,} held out; "
            f"reward: {', '.join(function.name for function in parts.functions)}",
            arithmetic(rollout.queries_per_step, rollout.group_size, actor.mini_batches, recipe.steps),
        ]
    )


def arithmetic(queries_per_step: int, group_size: int, mini_batches: int, steps: int) -> str:
    """The numbers that follow from a recipe's, in a sentence."""
    sequences = queries_per_step * group_size
    return (
        f"{queries_per_step} queries × {group_size} responses = {sequences} sequences a step, "
        f"in {mini_batches} mini-batch(es) of {sequences // mini_batches}; "
        f"{steps} steps = {steps * mini_batches} optimiser steps"
    )


def summary_table(
    lines: Sequence[Mapping[str, Any]], diagnoses: Mapping[str, str], model: Path, seconds: float
) -> Table:
    """The short table at the end: scores before and after, where the model lies and how to load it."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    evaluated = [line for line in lines if any(key.startswith("evaluation/") for key in line)]
    if len(evaluated) > 1:
        for key in (key for key in evaluated[0] if key.startswith("evaluation/") and key.endswith("pass_at_1")):
            error = key.replace("pass_at_1", "standard_error")
            first, last = evaluated[0], evaluated[-1]
            table.add_row(
                f"pass@1 ({key.split('/')[1]})",
                f"{first[key]:.3f} ± {first[error]:.3f} before → {last[key]:.3f} ± {last[error]:.3f} after",
            )
    steps = [line for line in lines if line["step"] > 0]
    if steps:
        first, last = steps[0], steps[-1]
        table.add_row("reward", f"{first['reward/mean']:.3f} → {last['reward/mean']:.3f} in {last['step']} steps")
        name = "response/mean_tokens"
        table.add_row("response tokens", f"{first[name]:.1f} → {last[name]:.1f}")
    table.add_row("time", f"{int(seconds // 60)} min {seconds % 60:.0f} s")
    for sentence in diagnoses.values():
        table.add_row("diagnosis", sentence)
    table.add_row("model", str(model))
    table.add_row("load it", f'AutoModelForCausalLM.from_pretrained("{model}")')
    table.add_row("metrics", str(model.parent / "metrics.jsonl"))
    return table
