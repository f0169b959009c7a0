"""The cold start: supervised learning on demonstrations before reinforcement learning."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from gspo.config import Actor, ColdStart
from gspo.errors import RunError, UserError
from gspo.policy.likelihood import response_likelihood
from gspo.policy.model import Policy
from gspo.policy.optimizer import MAX_SKIPPED_IN_A_ROW, Optimizer
from gspo.policy.packing import Conditioned, micro_batches
from gspo.queries.row import Row
from gspo.records import Query


@dataclass(frozen=True, kw_only=True)
class ColdStep:
    """One supervised optimiser step."""

    step: int
    loss: float  # mean negative log-likelihood of a completion token, in nats
    learning_rate: float


def encode_demonstrations(
    policy: Policy, queries: Sequence[Query], demonstrations: Sequence[tuple[Row, str]]
) -> list[Conditioned]:
    """Prompt and completion tokens of each demonstration, the completion closed by the tokenizer's end token."""
    end = policy.tokenizer.eos_token_id
    if end is None:
        raise UserError("the tokenizer has no end token, so completions could not be closed", where="cold_start")
    texts = [completion for _, completion in demonstrations]
    completions = policy.tokenizer(texts, add_special_tokens=False).input_ids
    examples = [
        Conditioned(prompt_ids=query.prompt_ids, response_ids=torch.tensor([*ids, end]))
        for query, ids in zip(queries, completions, strict=True)
    ]
    for query, example in zip(queries, examples, strict=True):
        if policy.max_positions is not None and example.num_tokens > policy.max_positions:
            raise UserError(
                f"prompt and completion have {example.num_tokens} tokens, the model {policy.max_positions} positions",
                where=f"cold start, row {query.id}",
                mend="shorten or remove such rows",
            )
    return examples


def cold_start(
    policy: Policy, examples: Sequence[Conditioned], recipe: ColdStart, actor: Actor, *, seed: int
) -> Iterator[ColdStep]:
    """Maximise the mean log-likelihood of the completions' tokens; yields after every optimiser step."""
    optimizer = Optimizer(policy.model, recipe.optimizer, total_steps=recipe.steps)
    order = _epochs(len(examples), recipe.rows_per_step, random.Random(f"cold start order {seed}"))
    skipped_in_a_row = 0
    try:
        for step in range(1, recipe.steps + 1):
            loss = _accumulate_gradient(policy, [examples[index] for index in next(order)], actor)
            report = optimizer.step(loss_is_finite=math.isfinite(loss))
            skipped_in_a_row = 0 if report.applied else skipped_in_a_row + 1
            if skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise RunError(
                    f"cold start, step {step}: loss or gradient was not finite {skipped_in_a_row} times in a row\n"
                    "  mend: lower cold_start.optimizer.lr"
                )
            yield ColdStep(step=step, loss=loss, learning_rate=report.learning_rate)
    finally:
        optimizer.close()


def _accumulate_gradient(policy: Policy, rows: Sequence[Conditioned], actor: Actor) -> float:
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
