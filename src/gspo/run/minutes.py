"""The time that sampling and training take at most: computed from sizes and a device's speed, without weights."""

import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch

from gspo.model.load import empty_model
from gspo.model.shape import active_parameters, heads_of
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import RolloutConfig
from gspo.run.prepare import Inputs

_SIDE, _ROWS, _TRIES = 2048, 8, 3  # of the matrices that are multiplied, of the thin one, and how often
_EFFICIENCY = 0.5  # of the rate of large products: what passes of whole models reach
_SMALL = 50_000_000  # parameters


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed that passes of whole models reach on a device.

    Example: Speed(operations=2.4e11, reading=2e10) of two cores
    """

    operations: float  # floating-point operations a second
    reading: float  # bytes of weights and cache a second, which decoding waits for
    launch: float = 0.0  # seconds in which a layer's kernels are started for a token


@dataclass(frozen=True, kw_only=True)
class Work:
    """The sizes of a model that time goes by.

    Example: of Qwen3-30B-A3B, parameters = 30.5e9, active = 3.3e9 and in_experts = 29e9.
    """

    parameters: int
    active: int  # of which a token's products are made
    in_experts: int
    chosen: float  # the part of its experts that a token goes through; 1 without experts
    layers: int
    width: int  # bytes of a number
    cached: int  # bytes of a token's keys and values
    prompt_tokens: float


@cache
def measured_speed(device: torch.device, dtype: torch.dtype) -> Speed:
    """The speed of a device of this machine in a dtype, from the fastest of a few products."""
    matrix, few = (torch.ones(rows, _SIDE, device=device, dtype=dtype) for rows in (_SIDE, _ROWS))
    return Speed(
        operations=_EFFICIENCY * 2 * _SIDE**3 / _fastest(matrix, matrix),
        reading=matrix.nbytes / _fastest(few, matrix),
    )


def work_of(recipe: Recipe, config: Any, prompt_tokens: float, width: int) -> Work:
    """The sizes of the recipe's model in numbers of so many bytes; it is made without weights."""
    model, text = empty_model(recipe.model, deepcopy(config)), config.get_text_config()
    active, in_experts = active_parameters(model, text)
    total = sum(parameter.numel() for parameter in model.parameters())
    _, keys, size = heads_of(text)
    return Work(
        parameters=total,
        active=active,
        in_experts=in_experts,
        chosen=1 - (total - active) / in_experts if in_experts else 1.0,
        layers=text.num_hidden_layers,
        width=width,
        cached=width * 2 * text.num_hidden_layers * keys * size,
        prompt_tokens=prompt_tokens,
    )


def _fastest(one: torch.Tensor, other: torch.Tensor) -> float:
    seconds = []
    for _ in range(1 + _TRIES):
        start = time.perf_counter()
        float((one @ other)[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def time_line_of_inputs(recipe: Recipe, inputs: Inputs, speed: Speed, width: int) -> str | None:
    """Return what `gspo check` says of it: see time_line."""
    prompt_tokens = fmean(len(query.prompt_ids) for query in inputs.queries.train)
    evaluated = [(len(each.queries), each.sampling) for each in inputs.evaluation_sets]
    return time_line(recipe, work_of(recipe, inputs.config, prompt_tokens, width), speed, evaluated)


def time_line(recipe: Recipe, work: Work, speed: Speed, evaluated: Sequence[tuple[int, RolloutConfig]]) -> str | None:
    """The longest that steps and evaluations take, in words, without reward functions; None of a small model.

    `evaluated` are the numbers of queries of each evaluation, and how they are sampled. What a small model takes is not
    its products: the first step of a run says more.
    """
    if work.parameters < _SMALL:
        return None
    sampling = sampling_seconds(recipe.rollout.queries_per_step, recipe.rollout, work, speed)
    training = training_seconds(recipe, work, speed)
    evaluating = sum(sampling_seconds(num_queries, own, work, speed) for num_queries, own in evaluated)
    num_evaluations = 2 + (recipe.steps // recipe.evaluation.every if recipe.evaluation.every else 0)
    total = recipe.steps * (sampling + training) + num_evaluations * evaluating
    return (
        f"up to about {in_words(total)} on this machine, if responses are as long as they may be: "
        f"{recipe.steps} steps of {in_words(sampling)} sampling and {in_words(training)} training, "
        f"{num_evaluations} evaluations of {in_words(evaluating)}; rewards come on top"
    )


def sampling_seconds(
    num_queries: float, sampling: RolloutConfig, work: Work, speed: Speed, most_rows: float | None = None
) -> float:
    """The seconds for so many queries: of the prompts their products, and of each token of a round the longest of all.

    That is its rows' products, or reading the weights and half of the cache, or starting the kernels. A round has
    `most_rows` rows, by default those of the settings.
    """
    rows = math.ceil(num_queries * sampling.group_size)
    at_once = max(1, min(rows, int(most_rows or sampling.max_rows)))
    reached = 1 - (1 - work.chosen) ** at_once  # the part of the experts that some of the rows go through
    read = work.width * (work.parameters - work.in_experts * (1 - reached))
    read += at_once * work.cached * (work.prompt_tokens + sampling.max_new_tokens / 2)
    token = max(2 * work.active * at_once / speed.operations, read / speed.reading, work.layers * speed.launch)
    prompts = 2 * work.active * num_queries * work.prompt_tokens / speed.operations
    return prompts + math.ceil(rows / at_once) * sampling.max_new_tokens * token


def training_seconds(recipe: Recipe, work: Work, speed: Speed, num_ranks: int = 1, link: float = math.inf) -> float:
    """The seconds of a step's passes, where a group shares its prompt: of products, or of what ranks exchange.

    That is the weights, gathered twice, and their gradient in float32 for each micro-batch, at `link` bytes a second;
    an adapter's gradient is small.
    """
    rollout, actor = recipe.rollout, recipe.actor
    tokens = rollout.queries_per_step * (rollout.group_size * rollout.max_new_tokens + work.prompt_tokens)
    computing = operations(recipe) * work.active * tokens / (num_ranks * speed.operations)
    if num_ranks == 1:
        return computing
    gradient = 0 if recipe.model.lora else 4
    if recipe.trainer.sharding == "none":  # added up once an update, there and back
        return max(computing, 2 * gradient * work.parameters * actor.updates_per_step / link)
    micro_batches = math.ceil(tokens / actor.mini_batches / num_ranks / actor.micro_batch_tokens)
    moved = (2 * work.width + gradient) * work.parameters * actor.updates_per_step * micro_batches
    return max(computing, moved / link)


def operations(recipe: Recipe) -> float:
    """The operations of a step's training for each parameter and token: two forwards, four backwards."""
    actor = recipe.actor
    update = 4.0 if recipe.model.lora else 6.0  # frozen weights have no gradient
    number = (update + 2 * actor.gradient_checkpointing) * actor.epochs
    is_taught = recipe.teacher.is_on and not recipe.teacher.url
    number += 2 * ((actor.kl.coefficient > 0) + is_taught + (actor.advantage == "optimal_token_baseline"))
    if actor.old_logprobs == "recompute":
        number += 2 * (1 - 1 / actor.mini_batches)
    if actor.advantage == "gae" and recipe.critic.trunk == "own":
        number += 6 * actor.epochs + 2
    return number


def in_words(seconds: float) -> str:
    """Return such as 40 s, 12 minutes or 3.5 hours."""
    if seconds < 100:
        return f"{float(f'{seconds:.2g}'):g} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
