"""The cold start: supervised learning on demonstrations before reinforcement learning."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gspo.errors import UserError
from gspo.learner.balance import shares
from gspo.learner.optimizer import Optimizer
from gspo.model.packing import EMPTY, TokenSequence, micro_batches
from gspo.model.policy import Policy, response_likelihood
from gspo.queries.row import Row
from gspo.ranks import gathered, highest, num_ranks, rank
from gspo.recipe.schema import Recipe
from gspo.types import Query


@dataclass(frozen=True, kw_only=True)
class ColdStep:
    """One supervised optimiser step.

    Example: ColdStep(step=3, loss=1.7, learning_rate=8e-4, applied=True)
    """

    step: int
    loss: float  # mean negative log-likelihood of a completion token, in nats
    learning_rate: float
    applied: bool  # False: loss or gradient was not finite, the weights are unchanged


def encode_demonstrations(
    policy: Policy, queries: Sequence[Query], demonstrations: Sequence[tuple[Row, str]]
) -> list[TokenSequence]:
    """Prompt and completion tokens of each demonstration, the completion closed by the tokenizer's end token."""
    end, limit = policy.tokenizer.eos_token_id, policy.max_positions
    if end is None:
        raise UserError("the tokenizer has no end token, so completions could not be closed", where="cold_start")
    texts = [completion for _, completion in demonstrations]
    completions = policy.tokenizer(texts, add_special_tokens=False).input_ids
    examples = []
    for query, ids in zip(queries, completions, strict=True):
        example = TokenSequence(prompt_ids=query.prompt_ids, response_ids=torch.tensor([*ids, end]))
        if limit is not None and example.num_tokens > limit:
            problem = f"prompt and completion have {example.num_tokens} tokens, the model {limit} positions"
            raise UserError(problem, where=f"cold start, row {query.id}", fix="shorten or remove such rows")
        examples.append(example)
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
    settings, rng = recipe.cold_start, random.Random(f"cold start order {recipe.seed}")
    num_epochs = math.ceil(settings.steps * settings.rows_per_step / len(examples))
    order = [row for _ in range(num_epochs) for row in rng.sample(examples, len(examples))]
    for step in range(num_done, settings.steps):
        rows = order[step * settings.rows_per_step : (step + 1) * settings.rows_per_step]
        num_tokens, loss = sum(len(row.response_ids) for row in rows), 0.0
        rows_of_rank = [rows[index] for index in shares([[float(row.num_tokens)] for row in rows], num_ranks())[rank()]]
        parts = micro_batches(rows_of_rank, recipe.actor.micro_batch_tokens)
        for number in range(highest(len(parts))):
            check_stop()
            part = [rows_of_rank[index] for index in parts[number]] if number < len(parts) else []
            part_loss = -response_likelihood(policy, part or [EMPTY]).logprobs.sum() / num_tokens
            if not part:  # other ranks have more passes
                part_loss = part_loss * 0.0
            part_loss.backward()
            loss += part_loss.item()
        loss = sum(gathered(loss))
        report = optimizer.step(loss_is_finite=math.isfinite(loss))
        yield ColdStep(step=step + 1, loss=loss, learning_rate=report.learning_rate, applied=report.applied)
