"""Two ways of doing a thing, taking turns: the ratio of their times, as a row of a table."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from gspo.learner.trainer import Trainer
from gspo.model.policy import Policy
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.prepare import prepare
from gspo.types import Query

SMALL = ["queries.procedural.size=512", "cold_start.steps=0", "evaluation.num_queries=0", "rollout.max_new_tokens=40"]
QUERIES, GROUP_SIZE = 32, 8
HEADER = "| what | seconds without | ratio (median, range) |\n|---|---|---|"


def small_run(description: str | None) -> tuple[int, Recipe, Policy, Sequence[Query]]:
    """The rounds that the command line asks for, and the default recipe with little of everything, on one thread.

    And its model, and some of its queries.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=7)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    recipe = load_recipe("recipes/arithmetic.yaml", SMALL)
    trainer = Trainer()
    parts = prepare(recipe, trainer)
    return rounds, recipe, trainer.policy, parts.queries.train[:QUERIES]


def row(name: str, without: Callable[[], object], with_it: Callable[[], object], rounds: int) -> None:
    """Print the median of the ratios with over without, and their range; a first round warms up."""
    before, ratios = [], []
    for number in range(rounds + 1):
        one, two = _seconds(without), _seconds(with_it)
        if number:  # the first warms up
            before.append(one)
            ratios.append(two / one)
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"| {name} | {statistics.median(before):.3f} | {middle:.3f} ({low:.2f}–{high:.2f}) |")


def _seconds(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
