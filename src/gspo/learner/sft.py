"""The cold start: supervised learning on demonstrations before reinforcement learning."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from gspo.errors import UserError
from gspo.learner.optimizer import Optimizer
from gspo.model.likelihood import response_likelihood
from gspo.model.packing import TokenSequence, micro_batches
from gspo.model.policy import Policy
from gspo.queries.row import Row
from gspo.recipe.schema import ActorConfig, ColdStartConfig
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
    recipe: ColdStartConfig,
    actor: ActorConfig,
    *,
    seed: int,
    num_done: int = 0,
    may_stop: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Iterator[ColdStep]:
    """Maximise the mean log-likelihood of the completions' tokens; yields after every optimiser step after `num_done`.

    Within `may_stop` nothing but gradients changes.
    """
    order = _epochs(len(examples), recipe.rows_per_step, random.Random(f"cold start order {seed}"))
    for step in range(1, recipe.steps + 1):
        indices = next(order)
        if step <= num_done:
            continue
        with may_stop():
            loss = _accumulate_gradient(policy, [examples[index] for index in indices], actor)
        report = optimizer.step(loss_is_finite=math.isfinite(loss))
        yield ColdStep(step=step, loss=loss, learning_rate=report.learning_rate, applied=report.applied)


def _accumulate_gradient(policy: Policy, rows: Sequence[TokenSequence], actor: ActorConfig) -> float:
    """Add the gradient of the mean negative log-likelihood over the rows' completion tokens; returns that mean."""
    num_tokens = sum(len(row.response_ids) for row in rows)
    loss = 0.0
    for part in micro_batches(rows, actor.micro_batch_tokens):
        chosen = [rows[index] for index in part]
        likelihood = response_likelihood(policy, chosen)
        part_loss = -likelihood.logprobs.sum() / num_tokens
        part_loss.backward()
        loss += part_loss.item()
    return loss


def _epochs(num_rows: int, rows_per_step: int, rng: random.Random) -> Iterator[list[int]]:
    """Endless steps of row indices, each row once an epoch."""
    waiting: list[int] = []
    while True:
        while len(waiting) < rows_per_step:
            waiting += rng.sample(range(num_rows), num_rows)
        yield waiting[:rows_per_step]
        waiting = waiting[rows_per_step:]
