"""The cold start: supervised learning on demonstrations before reinforcement learning."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gspo.errors import UserError
from gspo.learner.optimizer import Optimizer
from gspo.model.packing import TokenSequence, micro_batches
from gspo.model.policy import Policy, response_likelihood
from gspo.queries.row import Row
from gspo.recipe.schema import Recipe
from gspo.types import Query


@dataclass(frozen=True, kw_only=True)
class ColdStep:
    """One supervised optimiser step."""

    step: int
    loss: float  # mean negative log-likelihood of a completion token, in nats
    learning_rate: float
    applied: bool  # False: loss or gradient was not finite, the weights are unchanged


def encode_demonstrations(
    policy: Policy, queries: Sequence[Query], demonstrations: Sequence[tuple[Row, str]]
) -> list[TokenSequence]:
    """Prompt and completion tokens of each demonstration, the completion closed by the tokenizer's end token."""
    end = policy.tokenizer.eos_token_id
    if end is None:
        raise UserError("the tokenizer has no end token, so completions could not be closed", where="cold_start")
    texts = [completion for _, completion in demonstrations]
    completions = policy.tokenizer(texts, add_special_tokens=False).input_ids
    examples = [
        TokenSequence(prompt_ids=query.prompt_ids, response_ids=torch.tensor([*ids, end]))
        for query, ids in zip(queries, completions, strict=True)
    ]
    for query, example in zip(queries, examples, strict=True):
        if policy.max_positions is not None and example.num_tokens > policy.max_positions:
            raise UserError(
                f"prompt and completion have {example.num_tokens} tokens, the model {policy.max_positions} positions",
                where=f"cold start, row {query.id}",
                fix="shorten or remove such rows",
            )
    return examples


def cold_start(
    policy: Policy,
    optimizer: Optimizer,
    examples: Sequence[TokenSequence],
    recipe: Recipe,
    *,
    num_done: int = 0,
    check_stop: Callable[[], None] = lambda: None,
) -> Iterator[ColdStep]:
    """Maximise the mean log-likelihood of the completions' tokens; yields after every optimiser step after `num_done`.

    `check_stop` may raise: it is called where nothing but gradients has changed since the last step.
    """
    order = _epochs(len(examples), recipe.cold_start.rows_per_step, random.Random(f"cold start order {recipe.seed}"))
    for step in range(1, recipe.cold_start.steps + 1):
        rows, loss = [examples[index] for index in next(order)], 0.0
        if step <= num_done:
            continue
        num_tokens = sum(len(row.response_ids) for row in rows)
        for part in micro_batches(rows, recipe.actor.micro_batch_tokens):
            check_stop()
            likelihood = response_likelihood(policy, [rows[index] for index in part])
            part_loss = -likelihood.logprobs.sum() / num_tokens
            part_loss.backward()
            loss += part_loss.item()
        report = optimizer.step(loss_is_finite=math.isfinite(loss))
        yield ColdStep(step=step, loss=loss, learning_rate=report.learning_rate, applied=report.applied)


def _epochs(num_rows: int, rows_per_step: int, rng: random.Random) -> Iterator[list[int]]:
    """Endless steps of row indices, each row once an epoch."""
    waiting: list[int] = []
    while True:
        while len(waiting) < rows_per_step:
            waiting += rng.sample(range(num_rows), num_rows)
        yield waiting[:rows_per_step]
        waiting = waiting[rows_per_step:]
