"""The cold start: supervised learning on demonstrations before reinforcement learning."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gspo.errors import UserError
from gspo.learner.balance import shares
from gspo.learner.optimizer import Optimizer, StepReport
from gspo.learner.ranks import add_up, gathered, highest, num_ranks, rank
from gspo.model.neighbours import check_positions
from gspo.model.packing import EMPTY, TokenSequence, micro_batches
from gspo.model.policy import Policy, response_likelihood
from gspo.queries.bridge import Bridge
from gspo.queries.demonstrations import Demonstration
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import QueriesConfig


def encode_demonstrations(
    policy: Policy,
    queries: QueriesConfig,
    demonstrations: Sequence[tuple[Row, Demonstration]],
    bridge: Bridge | None = None,
) -> list[TokenSequence]:
    """Prompt and completion tokens of each demonstration, the completion closed by the tokenizer's end token.

    Results of tools stand in a completion as they do in a rollout, by the `bridge`, and carry no loss.
    """
    end, limit = policy.tokenizer.eos_token_id, policy.max_positions
    if not demonstrations:
        return []
    if end is None:
        raise UserError("the tokenizer has no end token, so completions could not be closed", where="cold_start")
    texts = [completion if isinstance(completion, str) else "" for _, completion in demonstrations]
    completions = policy.tokenizer(texts, add_special_tokens=False).input_ids
    prompts = render_all([row for row, _ in demonstrations], policy.tokenizer, queries=queries)
    examples = []
    for query, ids, (_, completion) in zip(prompts, completions, demonstrations, strict=True):
        example = TokenSequence(prompt_ids=query.prompt_ids, response_ids=torch.tensor([*ids, end]))
        if not isinstance(completion, str):
            assert bridge is not None  # of a recipe with several turns
            response_ids, loss_mask = _of_turns(completion, policy.tokenizer, bridge)
            example = replace(example, response_ids=response_ids, loss_mask=loss_mask)
        if limit is not None and example.num_tokens > limit:
            problem = f"prompt and completion have {example.num_tokens} tokens, the model {limit} positions"
            raise UserError(problem, where=f"cold start, row {query.id}", fix="shorten or remove such rows")
        examples.append(example)
    lengths = [example.num_tokens for example in examples]
    check_positions(policy.model, shortest=min(lengths), longest=max(lengths), where="cold_start")
    return examples


def _of_turns(messages: Sequence[Mapping[str, str]], tokenizer: Any, bridge: Bridge) -> tuple[Tensor, Tensor]:
    """The tokens of a conversation with tools or an environment, and which of them the policy writes."""
    ids, mask, end = list[int](), list[bool](), [tokenizer.eos_token_id]
    turns = [[*turn] for _, turn in groupby(messages, key=lambda message: message["role"])]
    for number, turn in enumerate(turns, 1):
        texts, is_written = [message["content"] for message in turn], turn[0]["role"] == "assistant"
        if is_written:
            own = tokenizer(texts[0], add_special_tokens=False).input_ids
            added = own if bridge.call_ends_turn and number < len(turns) else [*own, *end]
        else:
            added = bridge.tokens(texts, last=ids[-1])
        ids += added
        mask += [is_written] * len(added)
    return torch.tensor(ids), torch.tensor(mask)


def rows_of_steps(examples: Sequence[TokenSequence], recipe: Recipe) -> list[Sequence[TokenSequence]]:
    """The examples of each step: all of them once an epoch, in an order that the recipe's seed decides."""
    settings, rng = recipe.cold_start, random.Random(f"cold start order {recipe.seed}")
    num_epochs = math.ceil(settings.steps * settings.rows_per_step / len(examples))
    order = [row for _ in range(num_epochs) for row in rng.sample(examples, len(examples))]
    size = settings.rows_per_step
    return [order[step * size : (step + 1) * size] for step in range(settings.steps)]


def fit(
    policy: Policy,
    optimizer: Optimizer,
    rows: Sequence[TokenSequence],
    *,
    micro_batch_tokens: int,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[float, StepReport]:
    """Make an optimiser step that raises the mean log-likelihood of the rows' completions; the loss before it.

    That is the mean negative log-likelihood of a completion token, in nats. `check_stop` is called before each pass,
    where nothing but gradients has changed, and may raise. All ranks call it.
    """
    num_tokens, loss = sum(len(row.scored_ids) for row in rows), 0.0
    rows_of_rank = [rows[index] for index in shares([[float(row.num_tokens)] for row in rows], num_ranks())[rank()]]
    parts = micro_batches(rows_of_rank, micro_batch_tokens)
    for number in range(highest(len(parts))):
        check_stop()
        part = [rows_of_rank[index] for index in parts[number]] if number < len(parts) else []
        part_loss = -response_likelihood(policy, part or [EMPTY]).logprobs.sum() / num_tokens
        if not part:  # other ranks have more passes
            part_loss = part_loss * 0.0
        part_loss.backward()
        loss += part_loss.item()
    loss = sum(gathered(loss))
    if num_ranks() > 1:
        add_up(optimizer.gradient())
    return loss, optimizer.step(loss_is_finite=math.isfinite(loss))
