"""Everything a run needs, loaded and checked before the first token is sampled."""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.evaluation.notes import evaluation_notes
from gspo.learner.sft import encode_demonstrations
from gspo.model.load import check_reference, load_config, make_tokenizer
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients, load_policy
from gspo.model.routing import check_declared, refuse_experts
from gspo.queries.order import check_enough_queries
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet, load_demonstrations, load_rows, render_rows
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ModelConfig
from gspo.reward.functions import RewardFunction, load_functions
from gspo.reward.probe import check_origin, probe
from gspo.rollout.engine import Engine, make_engine
from gspo.run.checkpoint.position import COLD_START
from gspo.run.resume import Saved, check_rows, finished_cold_start, rows_digest


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the loop works with."""

    policy: Policy
    engine: Engine  # samples from the policy's weights; whoever prepares closes it
    queries: QuerySet
    functions: Sequence[RewardFunction]
    demonstrations: Sequence[TokenSequence]
    reference: Policy | None  # that a KL term measures from; with weights of its own only where the recipe names some
    value_trunk: Policy | None  # what a critic of its own is made of
    rows_sha256: str  # of the data as it was before the tokenizer
    notes: Sequence[str]  # what data and rewards make of the recipe's evaluation


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a recipe names, but for the weights: `gspo check` needs no more."""

    functions: Sequence[RewardFunction]
    rows: RowSet
    pairs: Sequence[tuple[Row, str]]  # demonstrations of the cold start: a row and its completion
    config: Any  # of the model, as transformers has it
    tokenizer: Any


def load_inputs(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    saved: Saved | None = None,
) -> Inputs:
    """Load reward functions, rows and tokenizer, the cheapest first; UserError at the first fault.

    Where a run is resumed, its rows must be those of `saved`.
    """
    functions = load_functions(recipe.reward, reward, segment_separator=recipe.rollout.segment_separator)
    rows = load_rows(recipe, queries)
    check_origin([*rows.train, *rows.held_out], functions)
    pairs = load_demonstrations(recipe, rows) if recipe.cold_start.steps else []
    if saved is not None:
        check_rows(saved, rows, pairs)
    with quiet_transformers():
        config = load_config(recipe.model)
        check_declared(recipe.actor, config)
        tokenizer = make_tokenizer(recipe.model, _fitting_texts(recipe, rows, pairs))
        check_reference(recipe.actor.kl, tokenizer, trust_remote_code=recipe.model.trust_remote_code)
    return Inputs(functions=functions, rows=rows, pairs=pairs, config=config, tokenizer=tokenizer)


def prepare(
    recipe: Recipe,
    *,
    queries: Iterable[Mapping[str, Any]] | None = None,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
    saved: Saved | None = None,
) -> Prepared:
    """Load everything and prove that it fits together; UserError at the first fault.

    Where a run is resumed, its `saved` weights stand in for those of recipe.model.
    """
    inputs = load_inputs(recipe, queries=queries, reward=reward, saved=saved)
    functions, rows, pairs, tokenizer = inputs.functions, inputs.rows, inputs.pairs, inputs.tokenizer
    with quiet_transformers():
        policy = load_policy(
            recipe.model,
            tokenizer,
            seed=recipe.seed,
            stop_tokens=recipe.rollout.stop_tokens,
            weights=None if saved is None else saved.path / "model",
        )
        reference, value_trunk = _load_auxiliary_models(recipe, tokenizer, saved)
    if policy.routing is None:
        refuse_experts(recipe.actor, type(policy.model).__name__, policy.unknown_routers)
    if recipe.actor.gradient_checkpointing:
        checkpoint_gradients(policy)
    rendered = render_rows(rows, tokenizer, recipe=recipe, max_positions=policy.max_positions)
    check_enough_queries(len(rendered.train), recipe.rollout.queries_per_step)
    separator = recipe.rollout.segment_separator
    probed = probe(rendered.train, rendered.held_out, functions, tokenizer, segment_separator=separator)
    prompts = render_all([row for row, _ in pairs], tokenizer, queries=recipe.queries, max_prompt_tokens=None)
    return Prepared(
        policy=policy,
        queries=rendered,
        functions=functions,
        reference=reference,
        value_trunk=value_trunk,
        demonstrations=encode_demonstrations(policy, prompts, pairs) if pairs else (),
        rows_sha256=rows_digest(rows, pairs),
        notes=evaluation_notes(recipe, len(rendered.held_out), probed),
        engine=make_engine(recipe, policy),  # last, for nobody would close it if anything failed after it
    )


def _load_auxiliary_models(recipe: Recipe, tokenizer: Any, saved: Saved | None) -> tuple[Policy | None, Policy | None]:
    """Reference and value model, where the recipe has them; loaded, for a copy of a watched model would not do.

    Those that are to take the policy's weights are made from the same files as it. The reference of a resumed run is
    the policy as reinforcement learning started: what the cold start ended with, else the model of the recipe.
    """
    kl, settings, reference, value_trunk = recipe.actor.kl, recipe.model, None, None

    def load(model: ModelConfig, weights: Path | None) -> Policy:
        stop_tokens = recipe.rollout.stop_tokens
        return load_policy(model, tokenizer, seed=recipe.seed, stop_tokens=stop_tokens, weights=weights)

    if kl.coefficient and kl.reference is not None:
        other = {"path": kl.reference, "architecture": None, "tokenizer": None}
        reference = load(settings.model_copy(update=other), None)
    elif kl.coefficient:
        weights = None
        if saved is not None and not saved.is_cold_start and recipe.cold_start.steps:
            weights = _cold_started_model(recipe.run_dir)
        reference = load(settings, weights)
    if recipe.actor.advantage == "gae" and recipe.critic.trunk == "own":
        value_trunk = load(settings, None if saved is None else saved.path / "model")
        if recipe.actor.gradient_checkpointing:
            checkpoint_gradients(value_trunk)
    return reference, value_trunk


def _cold_started_model(run: Path) -> Path:
    if cold_start := finished_cold_start(run):
        return cold_start.path / "model"
    fix = "restore it from a copy: every update so far was made against it"
    raise UserError("the reference model is not there", where=str(run / COLD_START), fix=fix)


@contextlib.contextmanager
def quiet_transformers() -> Any:
    """No progress bars or advice from transformers while it loads: errors come as ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork otherwise
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub = getLogger("huggingface_hub")  # it reports each of its retries
    hub_level = hub.level
    hub.setLevel("ERROR")
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.setLevel(hub_level)


def _fitting_texts(recipe: Recipe, rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> Iterable[str]:
    """What a fitted tokenizer must be able to write."""
    yield from filter(None, (recipe.queries.template, recipe.queries.system))
    for row in (*rows.train, *rows.held_out):
        yield row.prompt if isinstance(row.prompt, str) else " ".join(str(m.get("content")) for m in row.prompt)
    for _, completion in pairs:
        yield completion
