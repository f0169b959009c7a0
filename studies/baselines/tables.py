"""The tables, in markdown, from the results alone."""

from collections.abc import Callable, Mapping
from functools import partial

from studies.baselines.arms import ARMS, CONDITIONED, CONDITIONS, GRID, GRID_SEED, GRPO, GSPO, RESULTS, TASKS
from studies.harness.markdown import NONE, number, spread, table
from studies.harness.results import Result
from studies.harness.runs import Runs
from studies.harness.summary import Measure, final_pass_at_1, late_reward, mean_of
from studies.objectives.measures import last
from studies.objectives.tables import status_line, verdict

COLUMNS: Mapping[str, Measure] = {
    "held-out pass@1 after": final_pass_at_1,
    "late reward": late_reward,
    "clipped tokens": mean_of("clip/token_fraction"),
    "clipped sequences": mean_of("clip/sequence_fraction"),
    "response tokens, last step": last("response/mean_tokens"),
    "entropy, last step": last("policy/entropy"),
    "seconds": lambda result: result.seconds["run"],
}


def _rate(results: Mapping[int, Result]) -> str:
    rates = {result.overrides["actor.optimizer.lr"] for result in results.values()}
    return ", ".join(f"{rate:g}" for rate in sorted(rates)) or NONE


def arms_table(runs: Runs, task: str) -> str:
    """Each arm at the learning rate that the grid chose: mean ± standard deviation over the seeds."""
    rows = []
    for arm in ARMS:
        found = runs.of(task, arm)
        against = NONE if arm is GSPO else verdict(found, runs.of(task, GSPO), final_pass_at_1)
        cells = [spread(found, measure) for measure in COLUMNS.values()]
        rows.append([arm.label, arm.what, _rate(found), str(len(found)), *cells, against])
    return table(["", "what is set", "lr", "seeds", *COLUMNS, "pass@1 minus GSPO"], rows)


def grid_table(runs: Runs, task: str) -> str:
    """The late reward of each learning rate of the grid, on a seed that the study does not use."""
    rows = []
    for arm in ARMS:
        found = [runs.found.get((f"{task}_grid", f"{arm.name}_{rate:g}"), {}).get(GRID_SEED) for rate in GRID]
        rows.append([arm.label, *(NONE if own is None else number(late_reward(own)) for own in found)])
    return table(["late reward", *(f"lr {rate:g}" for rate in GRID)], rows)


CONDITION_WORDS = {
    "": "4 updates a batch, age 0",
    "mini_batches_1": "1 update: one mini-batch",
    "updates_16": "16 updates: four epochs of four mini-batches",
    "age_4": "4 updates, responses of an age of 4 steps",
    "vllm_bfloat16": "4 updates, vLLM in bfloat16, its likelihoods as π_old",
}


def conditions_table(runs: Runs, task: str) -> str:
    """GSPO and GRPO with fewer and more optimiser steps for one batch, and on old responses."""
    rows = []
    for name in ("", *CONDITIONS):
        pair = [runs.of(f"{task}_{name}" if name else task, arm) for arm in (GSPO, GRPO)]
        own = {seed: result for seed, result in pair[1].items() if seed in pair[0]}
        cells = [spread(found, final_pass_at_1) for found in pair]
        rows.append([CONDITION_WORDS[name], *cells, verdict(own, pair[0], final_pass_at_1)])
    return table(["held-out pass@1 after", "GSPO", "GRPO", "GRPO minus GSPO"], rows)


def cells_table(runs: Runs) -> str:
    """A row a result, with the command that makes it again."""
    rows = []
    for task in (*TASKS, *(f"{CONDITIONED}_{name}" for name in CONDITIONS)):
        for arm in ARMS if task in TASKS else (GSPO, GRPO):
            found = runs.of(task, arm)
            command = f"`python -m studies.baselines.run --only {task}/{arm.name}`"
            rows.append([task, arm.label, spread(found, final_pass_at_1), str(len(found)), command])
    return table(["task", "objective", "held-out pass@1, mean ± sd", "seeds", "command"], rows)


TABLES: Mapping[str, Callable[[Runs], str]] = {
    "status": status_line,
    **{f"{task}_arms": partial(arms_table, task=task) for task in TASKS},
    **{f"{task}_grid": partial(grid_table, task=task) for task in TASKS},
    f"{CONDITIONED}_conditions": partial(conditions_table, task=CONDITIONED),
    "cells": cells_table,
}
__all__ = ["RESULTS", "TABLES"]
