"""Everything a run needs, loaded and checked before the first token is sampled."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

from gspo.engine.make import check_engine
from gspo.errors import UserError
from gspo.evaluation.held_out import EvaluationSet, evaluation_notes
from gspo.evaluation.sets import GivenRows, SetRows, make_sets, read_sets
from gspo.learner.optimizer import check_optimizer
from gspo.learner.sft import encode_demonstrations
from gspo.model.load import (
    check_reference,
    empty_model,
    load_config,
    make_tokenizer,
    max_positions,
    turn_end,
    weights_left_out,
)
from gspo.model.neighbours import check_positions
from gspo.model.packing import TokenSequence
from gspo.model.parameters import freeze, matching
from gspo.model.policy import Policy, checkpoint_gradients, device_of, dtype_of, load_policy, try_save
from gspo.model.routing import check_declared, refuse_experts
from gspo.model.sharding import check_shardable, sharding_of
from gspo.queries.render import remark_notes, render_all, variable_notes
from gspo.queries.row import Row, repetition_notes
from gspo.queries.source import (
    QuerySet,
    RowSet,
    load_demonstrations,
    load_rows,
    render_rows,
    source_notes,
)
from gspo.ranks import from_first, num_ranks, on_all
from gspo.recipe.rules import ineffective_settings, refusals
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ModelConfig, RewardConfig
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import Given, check_origin, check_tests, load_functions, own_answer_notes, probe
from gspo.reward.log import TrainerState
from gspo.rollout.shaping import sampling_notes
from gspo.run.best import check_watched
from gspo.run.checkpoint.store import COLD_START, Checkpoint
from gspo.run.hooks import Hook, load_hooks
from gspo.run.resume import check_rows, finished_cold_start
from gspo.types import Score

Rows = Iterable[Mapping[str, Any]]  # given from Python, instead of the recipe's
Functions = Given | Sequence[Given]


@dataclass(frozen=True, kw_only=True)
class FromPython:
    """What `gspo.train` is given beside the recipe, or instead of its own.

    Example: FromPython(queries=[{"prompt": "2 + 3 =", "answer": "5"}])
    """

    queries: Rows | None = None
    reward: Functions | None = None
    on_step: Hook | None = None
    evaluation: GivenRows | None = None


NOTHING = FromPython()


@dataclass(frozen=True, kw_only=True)
class Data:
    """What a recipe names to train and to be judged on, before a model reads it.

    Example: load_inputs(recipe).rows.train[0].columns == {"answer": "5"}
    """

    functions: Sequence[RewardFunction]
    rows: RowSet
    set_rows: Sequence[SetRows]  # of the sets to evaluate on beside the held-out rows
    pairs: Sequence[tuple[Row, str]]  # demonstrations of the cold start: a row and its completion
    hooks: Mapping[str, Hook]  # by name


@dataclass(frozen=True, kw_only=True)
class Inputs(Data):
    """What a recipe names, but for the weights, found to fit together: `gspo check` needs no more.

    Example: load_inputs(recipe).probed == [("5", Score(reward=1.0, …)), ("I do not know.", Score(…))]
    """

    config: Any  # of the model, as transformers has it
    tokenizer: Any
    queries: QuerySet  # the rows as the model reads them
    evaluation_sets: Sequence[EvaluationSet]  # the held-out queries, where there are any, and the suites
    probed: Sequence[tuple[str, Score]]  # the scores of the first row's answer, where it has one, and of junk, by text
    notes: Sequence[str]  # what one would not expect: of the evaluation, of settings without effect


@dataclass(frozen=True, kw_only=True)
class Prepared(Inputs):
    """What the loop works with.

    Example: prepare(recipe).queries.train[0] is a Query; where actor.kl.coefficient is 0, its reference is None.
    """

    policy: Policy
    demonstrations: Sequence[TokenSequence]  # the pairs as the model reads them
    reference: Policy | None  # that a KL term measures from; with weights of its own only where the recipe names some
    value_trunk: Policy | None  # what a critic of its own is made of


def load_inputs(
    recipe: Recipe,
    given: FromPython = NOTHING,
    *,
    saved: Checkpoint | None = None,
    say: Callable[[str], object] = lambda _: None,
    check_stop: Callable[[], None] = lambda: None,
    output: int = 2,
    num_ranks: int = 1,
) -> Inputs:
    """Load and try everything but the weights, the cheapest first; UserError at the first fault.

    `num_ranks` processes will share the model.
    Where a run is resumed, its rows must be those of `saved`. `say` is called with what is waited for next, and
    `check_stop` while a function is; what a function's process prints goes to the file descriptor `output`.
    """
    quiet_transformers()
    device = device_of(recipe.model.device)
    recipe, data = _load_data(recipe, given, saved, say, output)
    say(f"loading the tokenizer of {recipe.model.path or 'a new model'}, and reading the queries with it")
    config, tokenizer = _load_tokenizer(recipe, data)
    notes = [*weights_left_out(config), *_try_training(recipe, config, num_ranks)]
    queries = render_rows(data.rows, tokenizer, recipe=recipe, max_positions=max_positions(config))
    notes += _notes_on_queries(recipe, data.rows, queries, config, tokenizer)
    say("starting and trying the reward functions")
    options: dict[str, Any] = {"max_positions": max_positions(config), "output": output, "check_stop": check_stop}
    sets = make_sets(recipe, data.set_rows, queries.held_out, data.functions, tokenizer, **options)
    check_lengths(recipe, config, queries, sets)
    check_engine(recipe, device=device, longest_sequence=longest_sequence(recipe, queries, sets))
    options = {"segment_separator": recipe.rollout.segment_separator, "check_stop": check_stop}
    options["state"] = TrainerState(max_steps=recipe.steps)
    probed = probe(queries.train, queries.held_out, data.functions, tokenizer, **options)
    notes += _notes_on_answers(recipe, data, queries, sets, tokenizer)
    notes += [*evaluation_notes(recipe, len(data.rows.held_out), probed), *ineffective_settings(recipe)]
    made: dict[str, Any] = {"queries": queries, "evaluation_sets": sets, "probed": probed, "notes": notes}
    return Inputs(**vars(data), config=config, tokenizer=tokenizer, **made)


def _load_data(
    recipe: Recipe, given: FromPython, saved: Checkpoint | None, say: Callable[[str], object], output: int
) -> tuple[Recipe, Data]:
    """Rows and demonstrations, which must be those of the run that is resumed, functions and hooks.

    The recipe has the rewards that Python gives, for the rules hold of them, too.
    """
    hooks = load_hooks(recipe.hooks, given.on_step)
    separator = recipe.rollout.segment_separator
    functions = load_functions(recipe.reward, given.reward, segment_separator=separator, output=output)
    if given.reward is not None:
        rewards = tuple(RewardConfig(function=f.name, weight=f.weight, per=f.per) for f in functions)
        recipe = recipe.model_copy(update={"reward": rewards})
        if sentences := refusals(recipe):
            raise UserError("\n  ".join(sentences), where="reward, from Python")
    say("reading what to evaluate on")
    sets = read_sets(recipe, given.evaluation)
    say(f"reading {recipe.queries.path or 'the queries'}")
    check_watched(recipe, [set_rows.name for set_rows in sets])
    num_streamed = 0 if saved is None else saved.manifest.get("num_streamed", 0)
    rows = load_rows(recipe, given.queries, num_streamed=num_streamed)
    # A resumed run that reads more of a stream draws its demonstrations where it drew them before.
    pairs = load_demonstrations(recipe, rows.of_first(num_streamed)) if recipe.cold_start.steps else []
    if saved is not None:
        check_rows(saved, recipe, rows, pairs, sets)
    functions = check_origin([*rows.train, *rows.held_out], functions)
    check_tests([*rows.train, *rows.held_out], functions)
    return recipe, Data(functions=functions, rows=rows, set_rows=sets, pairs=pairs, hooks=hooks)


def _load_tokenizer(recipe: Recipe, data: Data) -> tuple[Any, Any]:
    """The model's configuration, and the tokenizer."""
    config = load_config(recipe.model)
    check_declared(recipe.actor, config)
    tokenizer = make_tokenizer(recipe.model, _fitting_texts(recipe, data))
    check_reference(recipe.actor.kl, tokenizer, trust_remote_code=recipe.model.trust_remote_code)
    return config, tokenizer


def _notes_on_queries(recipe: Recipe, rows: RowSet, queries: QuerySet, config: Any, tokenizer: Any) -> Iterator[str]:
    """Sentences on what is trained on, and how responses to it are drawn."""
    yield from source_notes(rows, queries)
    sizes = recipe.model.architecture or vars(config.get_text_config())
    yield from sampling_notes(recipe, tokenizer, sizes.get("vocab_size", len(tokenizer)))
    asked = [*queries.train, *queries.held_out]
    yield from variable_notes(asked, tokenizer, recipe.queries)
    yield from remark_notes(asked, "prompts")


def _notes_on_answers(
    recipe: Recipe, data: Data, queries: QuerySet, sets: Sequence[EvaluationSet], tokenizer: Any
) -> Iterator[str]:
    """Sentences on the sets to evaluate on, and on rows whose own answers the functions do not take."""
    for eval_set, of_set in zip(sets[bool(queries.held_out) :], data.set_rows, strict=True):
        yield from repetition_notes(of_set.rows, f"rows of {of_set.name}")
        yield from remark_notes(eval_set.queries, f"prompts of {of_set.name}")
    judged = [(eval_set.queries, eval_set.functions) for eval_set in sets if eval_set.probed]
    for asked, functions in [([*queries.train, *queries.held_out], data.functions), *judged]:
        yield from own_answer_notes(asked, functions, tokenizer, segment_separator=recipe.rollout.segment_separator)


def _try_training(recipe: Recipe, config: Any, num_ranks: int) -> list[str]:
    """Try the optimisers, and choose parameters by their names, without weights; sentences on what to expect of it."""
    actor, model, notes = recipe.actor, recipe.model, list[str]()
    settings = {"actor.optimizer": actor.optimizer}
    settings |= {"cold_start.optimizer": recipe.cold_start.optimizer} if recipe.cold_start.steps else {}
    critics = {"critic.optimizer": recipe.critic.optimizer} if actor.advantage == "gae" else {}
    for where, optimizer in (settings | critics).items():
        if optimizer.name != "adamw" or optimizer.options:
            notes += check_optimizer(optimizer, where=where, device=device_of(model.device), num_ranks=num_ranks)
    if num_ranks > 1:
        check_shardable(empty_model(model, config))
    if (
        model.attn_implementation
        or model.frozen
        or any(optimizer.no_decay for optimizer in (settings | critics).values())
    ):
        empty = empty_model(model, config)
        freeze(empty, model.frozen)
        trained = [name for name, parameter in empty.named_parameters() if parameter.requires_grad]
        for where, optimizer in settings.items():
            matching(optimizer.no_decay, trained, where=f"{where}.no_decay")
        if critics:
            trunk = dict(empty.base_model.named_parameters()) if recipe.critic.trunk == "own" else {}
            names = ["head.weight", "head.bias", *(f"trunk.{name}" for name in trunk)]
            matching(recipe.critic.optimizer.no_decay, names, where="critic.optimizer.no_decay")
    return notes


def longest_sequence(recipe: Recipe, queries: QuerySet, sets: Sequence[EvaluationSet]) -> int:
    """The most tokens that a prompt and its response may have, in training or in an evaluation."""
    asked = [(queries.train, recipe.rollout), *((eval_set.queries, eval_set.sampling) for eval_set in sets)]
    lengths = [
        len(query.prompt_ids) + sampling.max_new_tokens for asked_queries, sampling in asked for query in asked_queries
    ]
    return max(lengths, default=0)  # other ranks than 0 have no queries


def check_lengths(recipe: Recipe, config: Any, queries: QuerySet, sets: Sequence[EvaluationSet]) -> None:
    """UserError where a sequence could change the table of positions that others beside it have; loads no weights."""
    asked = [*queries.train, *(query for eval_set in sets for query in eval_set.queries)]
    shortest = min((len(query.prompt_ids) for query in asked), default=1)
    limits = {"shortest": shortest, "longest": longest_sequence(recipe, queries, sets)}
    check_positions(empty_model(recipe.model, config), **limits, where=recipe.model.path or "model.architecture")
    if recipe.actor.kl.coefficient and (named := recipe.actor.kl.reference):
        model = ModelConfig(path=named, trust_remote_code=recipe.model.trust_remote_code)
        check_positions(empty_model(model, load_config(model)), **limits, where=f"actor.kl.reference: {named}")


def prepare(
    recipe: Recipe,
    given: FromPython = NOTHING,
    *,
    saved: Checkpoint | None = None,
    check_stop: Callable[[], None] = lambda: None,
    check_stop_of_all: Callable[[], None] = lambda: None,
    say: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> Prepared:
    """Load everything and prove that it fits together; UserError at the first fault. Options are load_inputs' own.

    Where a run is resumed, its `saved` weights stand in for those of recipe.model. A signal ends it in between,
    of one rank or of all.
    """
    quiet_transformers()
    inputs = _inputs_of_first(recipe, given, saved=saved, say=say, check_stop=check_stop, **options)
    check_stop_of_all()
    say(f"loading {recipe.model.path or 'a new model'}")
    policy, reference, value_trunk = on_all(partial(_load_models, recipe, inputs.tokenizer, saved), UserError)
    check_stop_of_all()
    return Prepared(
        **vars(inputs),
        policy=policy,
        reference=reference,
        value_trunk=value_trunk,
        demonstrations=from_first(lambda: _demonstrations(recipe, inputs, policy)),
    )


def _inputs_of_first(recipe: Recipe, given: FromPython, **options: Any) -> Inputs:
    """Rank 0 loads them, for it alone samples, scores and writes; the others get what models are made of."""
    loaded: list[Inputs] = []

    def load() -> Inputs:
        loaded.append(inputs := load_inputs(recipe, given, num_ranks=num_ranks(), **options))
        nothing: dict[str, Any] = dict.fromkeys(("functions", "set_rows", "pairs", "evaluation_sets", "probed"), ())
        nothing |= {"rows": RowSet(train=(), held_out=()), "queries": QuerySet(train=(), held_out=()), "hooks": {}}
        # Python code of a model directory has no name that another rank could unpickle it by.
        tokenizer = inputs.tokenizer if recipe.model.tokenizer == "fit" else None
        return replace(inputs, **nothing, notes=(), config=None, tokenizer=tokenizer)

    shared = from_first(load)
    others = on_all(lambda: loaded or [replace(shared, tokenizer=shared.tokenizer or make_tokenizer(recipe.model, ()))])
    return others[0]


def _demonstrations(recipe: Recipe, inputs: Inputs, policy: Policy) -> Sequence[TokenSequence]:
    left_out = {row.id for row in inputs.rows.train} - {query.id for query in inputs.queries.train}
    pairs = [pair for pair in inputs.pairs if pair[0].id not in left_out]
    prompts = render_all([row for row, _ in pairs], inputs.tokenizer, queries=recipe.queries)
    examples = encode_demonstrations(policy, prompts, pairs) if pairs else ()
    if lengths := [example.num_tokens for example in examples]:
        limits = {"shortest": min(lengths), "longest": max(lengths)}
        check_positions(policy.model, **limits, where="cold_start")
    return examples


def _load_models(
    recipe: Recipe, tokenizer: Any, saved: Checkpoint | None
) -> tuple[Policy, Policy | None, Policy | None]:
    """The policy and, where the recipe has them, reference and value model: loaded too, for none can be copied.

    Those that are to take the policy's weights are made from the same files as it. The reference of a resumed run is
    the policy as reinforcement learning started: what the cold start ended with, else the model of the recipe.
    That is for one that is never refreshed.
    """
    model, kl, named = recipe.model, recipe.actor.kl, recipe.actor.kl.reference
    ends = turn_end(tokenizer, recipe.queries) if saved is None else ()  # a saved model has those it was trained with
    stop_tokens = (*recipe.rollout.stop_tokens, *ends)
    load = partial(load_policy, tokenizer=tokenizer, seed=recipe.seed, stop_tokens=stop_tokens)
    device, dtype = device_of(model.device), dtype_of(model)
    load.keywords["sharding"] = sharding_of(recipe.trainer.sharding, device, dtype)
    weights = None if saved is None else saved.path / "model"
    policy, reference, value_trunk = load(model, weights=weights), None, None
    try_save(policy.model, tokenizer, where=str(model.path or "model.architecture"))
    if kl.coefficient and named is not None:  # whose files have none of the policy's peculiarities
        other: dict[str, Any] = {"path": named, "architecture": None, "tokenizer": None, "kwargs": {}, "frozen": ()}
        reference = load(model.model_copy(update=other))
    elif kl.coefficient and kl.refresh_steps:  # the checkpoint has its weights, too, and puts them in
        reference = load(model, weights=weights)
    elif kl.coefficient:
        is_trained = saved is not None and not saved.is_cold_start
        started = _cold_started_model(recipe.run_dir) if is_trained and recipe.cold_start.steps else None
        reference = load(model, weights=started)
    if recipe.actor.advantage == "gae" and recipe.critic.trunk == "own":
        value_trunk = load(model, weights=weights)
    if policy.routing is None:
        refuse_experts(recipe.actor, type(policy.model).__name__, policy.unknown_routers)
    if recipe.actor.gradient_checkpointing:
        for trained in filter(None, (policy, value_trunk)):
            checkpoint_gradients(trained)
    return policy, reference, value_trunk


def _cold_started_model(run: Path) -> Path:
    if cold_start := finished_cold_start(run):
        return cold_start.path / "model"
    fix = "restore it from a copy: every update so far was made against it"
    raise UserError("the reference model is not there", where=str(run / COLD_START), fix=fix)


def quiet_transformers() -> None:
    """From now on no progress bars or advice from transformers: errors come as ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # it warns at every fork otherwise
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel("ERROR")  # it reports each of its retries


def _fitting_texts(recipe: Recipe, data: Data) -> Iterable[str]:
    """What a fitted tokenizer must be able to write."""
    for queries in (recipe.queries, *(suite.queries for suite in recipe.evaluation.suites)):
        yield from filter(None, (queries.template, queries.system))
    rows = data.rows
    for row in (*rows.train, *rows.held_out, *(row for set_rows in data.set_rows for row in set_rows.rows)):
        yield row.prompt if isinstance(row.prompt, str) else " ".join(str(m.get("content")) for m in row.prompt)
    for _, completion in data.pairs:
        yield completion
