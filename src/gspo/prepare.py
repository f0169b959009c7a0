"""Everything a run needs, loaded and checked before the first token is sampled."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.coldstart import encode_demonstrations
from gspo.config import Recipe
from gspo.errors import UserError
from gspo.policy.likelihood import Conditioned
from gspo.policy.model import Policy, load_policy, make_tokenizer
from gspo.queries.demonstrations import load_demonstrations
from gspo.queries.order import check_enough_queries
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet, load_rows, render_rows
from gspo.report.run_directory import check_absent
from gspo.reward.functions import RewardFunction, load_functions


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the loop works with."""

    policy: Policy
    queries: QuerySet
    functions: Sequence[RewardFunction]
    demonstrations: Sequence[Conditioned]


def prepare(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
) -> Prepared:
    """Load reward functions, queries, tokenizer and policy, the cheapest first; UserError at the first fault."""
    check_absent(recipe)
    functions = load_functions(recipe.reward, reward)
    rows = load_rows(recipe, queries)
    pairs = load_demonstrations(recipe, rows.train) if recipe.cold_start.steps else []
    with quiet_transformers():
        tokenizer = make_tokenizer(recipe.model, fitting_texts(rows, pairs))
        policy = load_policy(recipe.model, tokenizer, seed=recipe.seed, stop_tokens=recipe.rollout.stop_tokens)
    if recipe.actor.gradient_checkpointing:
        _checkpoint_gradients(policy)
    rendered = render_rows(rows, tokenizer, recipe=recipe, max_positions=policy.max_positions)
    check_enough_queries(len(rendered.train), recipe.rollout.queries_per_step)
    prompts = render_all([row for row, _ in pairs], tokenizer, queries=recipe.queries, max_prompt_tokens=None)
    return Prepared(
        policy=policy,
        queries=rendered,
        functions=functions,
        demonstrations=encode_demonstrations(policy, prompts, pairs) if pairs else (),
    )


@contextlib.contextmanager
def quiet_transformers() -> Any:
    """No progress bars or advice from transformers while it loads: errors come as ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork otherwise
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def fitting_texts(rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> Iterable[str]:
    """What a fitted tokenizer must be able to write."""
    for row in (*rows.train, *rows.held_out):
        yield row.prompt if isinstance(row.prompt, str) else " ".join(str(m.get("content")) for m in row.prompt)
    for _, completion in pairs:
        yield completion


def _checkpoint_gradients(policy: Policy) -> None:
    # transformers recomputes only in training mode; there is no dropout for that mode to switch on.
    try:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise UserError(str(error), where="actor.gradient_checkpointing") from None
    policy.model.train()
