"""How long a run takes at most on this machine: measured in a second and computed, without weights."""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from gspo.model.load import empty_model
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig
from gspo.run.prepare import Inputs

_SIDE, _ROWS, _TRIES = 2048, 8, 3  # of the matrices that are multiplied, of the thin one, and how often
_EFFICIENCY = 0.5  # of the rate of large products: what passes of whole models reach
_SMALL = 50_000_000  # parameters


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of a device.

    Example: Rates(operations=4.8e11, weights=5e9) of two cores
    """

    operations: float  # floating-point operations, in large products
    weights: float  # numbers of a matrix that is multiplied by a few rows: what decoding waits for


def measured_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of a device in a dtype, from the fastest of a few products."""
    matrix, few = (torch.ones(rows, _SIDE, device=device, dtype=dtype) for rows in (_SIDE, _ROWS))
    return Rates(
        operations=2 * _SIDE**3 / _fastest(matrix, matrix),
        weights=_SIDE**2 / _fastest(few, matrix),
    )


def _fastest(one: torch.Tensor, other: torch.Tensor) -> float:
    seconds = []
    for _ in range(1 + _TRIES):
        start = time.perf_counter()
        float((one @ other)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def time_line_of_inputs(recipe: Recipe, inputs: Inputs, rates: Rates) -> str | None:
    """Return what `gspo check` says of it: see time_line."""
    prompt_tokens = fmean(len(query.prompt_ids) for query in inputs.queries.train)
    evaluated = [(len(each.queries), each.sampling) for each in inputs.evaluation_sets]
    return time_line(recipe, inputs.config, rates, prompt_tokens=prompt_tokens, evaluated=evaluated)


def time_line(
    recipe: Recipe,
    config: Any,
    rates: Rates,
    *,
    prompt_tokens: float,
    evaluated: Sequence[tuple[int, RolloutConfig]],
) -> str | None:
    """The longest that steps and evaluations take, in words, without reward functions; None of a small model.

    `evaluated` are the numbers of queries of each evaluation, and how they are sampled. What a small model takes is not
    its products: the first step of a run says more.
    """
    model = empty_model(recipe.model, deepcopy(config))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters < _SMALL:
        return None
    rollout = recipe.rollout
    sampling = _sampling_seconds(rollout.queries_per_step, rollout, num_parameters, prompt_tokens, rates)
    training = _training_seconds(recipe, num_parameters, prompt_tokens, rates)
    evaluating = sum(
        _sampling_seconds(num_queries, own, num_parameters, prompt_tokens, rates) for num_queries, own in evaluated
    )
    num_evaluations = 2 + (recipe.steps // recipe.evaluation.every if recipe.evaluation.every else 0)
    total = recipe.steps * (sampling + training) + num_evaluations * evaluating
    return (
        f"up to about {in_words(total)} on this machine, if responses are as long as they may be: "
        f"{recipe.steps} steps of {in_words(sampling)} sampling and {in_words(training)} training, "
        f"{num_evaluations} evaluations of {in_words(evaluating)}; rewards come on top"
    )


def _sampling_seconds(
    num_queries: int, sampling: RolloutConfig, num_parameters: int, prompt_tokens: float, rates: Rates
) -> float:
    """The longer of computing all tokens and of reading the weights for each token of a round."""
    num_rows = num_queries * sampling.group_size
    num_tokens = num_rows * sampling.max_new_tokens + num_queries * prompt_tokens
    num_rounds = math.ceil(num_rows / sampling.max_rows)
    reading = num_rounds * sampling.max_new_tokens * num_parameters / rates.weights
    return max(2 * num_parameters * num_tokens / (rates.operations * _EFFICIENCY), reading)


def _training_seconds(recipe: Recipe, num_parameters: int, prompt_tokens: float, rates: Rates) -> float:
    """The time of all passes; a group shares its prompt."""
    rollout = recipe.rollout
    num_tokens = rollout.queries_per_step * (rollout.group_size * rollout.max_new_tokens + prompt_tokens)
    return operations(recipe) * num_parameters * num_tokens / (rates.operations * _EFFICIENCY)


def operations(recipe: Recipe) -> float:
    """The operations of a step's training for each parameter and token: two forwards, four backwards."""
    actor = recipe.actor
    update = 4.0 if recipe.model.lora else 6.0  # frozen weights have no gradient
    number = (update + 2 * actor.gradient_checkpointing) * actor.epochs
    number += 2 * (actor.kl.coefficient > 0) + 2 * recipe.teacher.is_on
    if actor.old_logprobs == "recompute":
        number += 2 * (1 - 1 / actor.mini_batches)
    if actor.advantage == "gae" and recipe.critic.trunk == "own":
        number += 6 * actor.epochs + 2
    return number


def in_words(seconds: float) -> str:
    """Return such as 40 s, 12 minutes or 3.5 hours."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
