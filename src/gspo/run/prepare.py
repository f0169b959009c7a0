"""Everything a run or an evaluation needs, loaded and checked before the first token is sampled."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from gspo.engine.make import check_engine
from gspo.errors import UserError, did_you_mean
from gspo.evaluation.held_out import EvaluationSet, evaluation_notes
from gspo.evaluation.sets import GivenRows, SetRows, make_sets, name_of_held_out, read_sets, set_notes
from gspo.interrupt import check_stop
from gspo.learner.check import check_training
from gspo.learner.served_teacher import check_server
from gspo.learner.sft import encode_demonstrations
from gspo.learner.trainer import Trainer
from gspo.metrics.definitions import definition_of, families
from gspo.model.inputs import check_lengths, read_model
from gspo.model.packing import TokenSequence
from gspo.model.policy import device_of
from gspo.queries.bridge import PLAIN
from gspo.queries.demonstrations import Demonstration, load_demonstrations
from gspo.queries.refresh import Refresh
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet, load_rows, query_notes, taught, texts_of
from gspo.recipe.rules import ineffective_settings
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import REPLACED_FILE, QueriesConfig
from gspo.reward.arguments import arguments_of
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import Given, fit_to_rows, load_rewards, own_answer_notes, probe
from gspo.reward.reply import TrainerState
from gspo.reward.score import judging
from gspo.rollout.shaping import sampling_notes
from gspo.rollout.tools import Tools
from gspo.run.checkpoint.store import COLD_START, Checkpoint, finished_cold_start
from gspo.run.hooks import Hook, load_hooks
from gspo.run.resume import check_rows, kept_rows
from gspo.run.tools import agent_notes, fit_tools, open_set, positions_for_rows, rendered, try_environment
from gspo.types import Score

Rows = Iterable[Mapping[str, Any]]  # given from Python, instead of the recipe's
Functions = Given | Sequence[Given]


@dataclass(frozen=True, kw_only=True)
class FromPython:
    """The objects that `gspo.train` is given beside the recipe, or instead of its own.

    Example: FromPython(queries=[{"prompt": "2 + 3 =", "answer": "5"}])
    """

    queries: Rows | None = None
    reward: Functions | None = None
    on_step: Hook | None = None
    evaluation: GivenRows | None = None


NOTHING = FromPython()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The things that a recipe names, but for the weights, found to fit together: `gspo check` needs no more.

    Example: load_inputs(recipe).probed == {"": [("5", Score(reward=1.0, …)), ("I do not know.", Score(…))]}
    """

    functions: Sequence[RewardFunction]
    hooks: Mapping[str, Hook]  # by name
    rows: RowSet
    set_rows: Sequence[SetRows]  # of the sets to evaluate on beside the held-out rows
    pairs: Sequence[tuple[Row, Demonstration]]  # demonstrations of the cold start: a row and its completion
    config: Any  # of the model, as transformers has it
    tokenizer: Any
    queries: QuerySet  # the rows as the model reads them
    rendering: QueriesConfig  # by which it does: with the recipe's tools
    render: Callable[[RowSet], QuerySet]  # does so, with rows to come
    refresh: Refresh | None  # which asks for them
    tools: Tools | None  # that the policy may call
    evaluation_sets: Sequence[EvaluationSet]  # the held-out queries, where there are any, and the suites
    # By source the scores of the first row's answer, where it has one, and of junk, by text.
    probed: Mapping[str, Sequence[tuple[str, Score]]]
    notes: Sequence[str]  # what one would not expect: of the evaluation, of settings without effect
    demonstrations: Sequence[TokenSequence] = ()  # the pairs as the model reads them, once it is loaded


def load_inputs(
    recipe: Recipe,
    given: FromPython = NOTHING,
    *,
    trains: bool = True,
    saved: Checkpoint | None = None,
    say: Callable[[str], object] = lambda _: None,
    output: int = 2,
    num_ranks: int = 1,
) -> Inputs:
    """Load and try everything but the weights, the cheapest first; UserError at the first fault.

    `num_ranks` processes will share the model; what only evaluates, and does not train, has no rows but those of sets.
    Where a run is resumed, its rows must be those of `saved`. `say` is called with what is waited for next; what a
    function's process prints goes to the file descriptor `output`.
    """
    hooks = load_hooks(recipe.hooks, given.on_step)
    refresh = Refresh(recipe) if recipe.queries.refresh and trains else None
    recipe, functions = load_rewards(recipe, given.reward, output=output) if trains else (recipe, ())
    set_rows, rows, pairs = _read_rows(recipe, given, saved, say, trains=trains)
    functions = fit_to_rows(functions, [*rows.train, *rows.held_out])
    say(f"loading the tokenizer of {recipe.model.path or 'a new model'}, and reading the queries with it")
    model = read_model(recipe, _fitting_texts(recipe, rows, set_rows, pairs))
    config, tokenizer = model.config, model.tokenizer
    longest_recipe, set_rows, tools = fit_tools(recipe.at_longest, rows, set_rows, pairs, tokenizer, output=output)
    max_positions = positions_for_rows(recipe.rollout, model.max_positions)
    limits: dict[str, Any] = {"max_positions": max_positions, "length_key": recipe.length_key}
    render = partial(rendered, longest_recipe, tokenizer, tools, limits)
    queries = render(rows)
    notes = [*model.notes, *check_training(recipe, config, num_ranks=num_ranks)]
    notes += [*query_notes(rows, queries, longest_recipe, tokenizer), *sampling_notes(recipe, tokenizer, config)]
    notes += agent_notes(tools, tokenizer)
    say("starting and trying the reward functions")
    try_environment(tools, queries.train)
    sets = make_sets(longest_recipe, set_rows, queries.held_out, functions, tokenizer, output=output, **limits)
    sets = tuple(each if each.queries is queries.held_out else open_set(each, tools) for each in sets)
    _check_sequences(recipe, config, tokenizer, queries, sets)
    probed, own_notes = _try_functions(recipe, functions, queries, sets, tokenizer, trains=trains)
    notes += [*set_notes(sets, set_rows), *own_notes, *(_training_notes(recipe, rows, probed) if trains else ())]
    return Inputs(
        functions=functions,
        hooks=hooks,
        rows=rows,
        set_rows=set_rows,
        pairs=pairs,
        config=config,
        tokenizer=tokenizer,
        queries=queries,
        rendering=longest_recipe.queries,
        render=render,
        refresh=refresh,
        tools=tools,
        evaluation_sets=sets,
        probed=probed,
        notes=notes,
    )


def _check_sequences(
    recipe: Recipe, config: Any, tokenizer: Any, queries: QuerySet, sets: Sequence[EvaluationSet]
) -> None:
    """Raise UserError where the model, the engine or the teacher's server does not take sequences of these lengths."""
    asked = [*queries.train, *(query for eval_set in sets for query in eval_set.queries)]
    shortest = min(len(query.prompt_ids) for query in asked)
    taught = [len(query.teacher_ids) for query in queries.train if query.teacher_ids]
    teachers_longest = max(taught) + recipe.at_longest.rollout.max_new_tokens if taught else 0
    longest, trained = (longest_sequence(recipe.at_longest, queries, own) for own in (sets, ()))
    if recipe.teacher.url is not None:
        check_server(recipe.teacher, tokenizer, longest=max(trained, teachers_longest))
    lengths = {"shortest": shortest, "longest": longest, "trained": trained, "teachers_longest": teachers_longest}
    check_lengths(recipe, config, **lengths)
    check_engine(recipe, config, device=device_of(recipe.model.device), longest_sequence=longest)


def _try_functions(
    recipe: Recipe,
    functions: Sequence[RewardFunction],
    queries: QuerySet,
    sets: Sequence[EvaluationSet],
    tokenizer: Any,
    *,
    trains: bool,
) -> tuple[dict[str, list[tuple[str, Score]]], list[str]]:
    """Return what the functions give the first row's answer and junk, and notes on own answers that they fail."""
    options: dict[str, Any] = {"segment_separator": recipe.rollout.segment_separator}
    probed, state = dict[str, list[tuple[str, Score]]](), TrainerState(max_steps=recipe.steps)
    for source in dict.fromkeys(query.source for query in queries.train if trains):
        train, held_out = ([own for own in part if own.source == source] for part in (queries.train, queries.held_out))
        probed[source] = probe(train, held_out, judging(functions, train[0]), tokenizer, state=state, **options)
    of_no_source = [own for own in queries.held_out if trains and not own.source and "" not in probed]
    for function in functions if of_no_source else ():
        try:
            arguments_of(of_no_source[0], (), function, state)
        except UserError as error:
            what = "rows of evaluation.path are of no source, so every function judges them"
            fix = f"{what}: give its parameters a default, and return None where they do not apply"
            raise UserError(error.what, where=error.where, fix=fix if recipe.queries.sources else error.fix) from None
    judged = [(eval_set.queries, eval_set.functions) for eval_set in sets if eval_set.probed]
    judged = [([*queries.train, *queries.held_out], functions), *judged]
    return probed, [note for asked, judges in judged for note in own_answer_notes(asked, judges, tokenizer, **options)]


def _training_notes(recipe: Recipe, rows: RowSet, probed: Mapping[str, Sequence[tuple[str, Score]]]) -> Iterator[str]:
    """Yield what is odd about the held-out rows and about settings, and what becomes odd in a phase."""
    yield from dict.fromkeys(
        note for own in probed.values() for note in evaluation_notes(recipe, len(rows.held_out), own)
    )
    notes, recipes = ineffective_settings(recipe), (recipe, *recipe.recipes_of_phases)
    unused = [name for name in recipe.queries.sources if not any(own.queries.shares[name] for own in recipes)]
    if unused:
        notes.append(f"queries.sources.{', '.join(unused)}: the weight is 0 all along, so this is never asked")
    for index, now in enumerate(recipe.recipes_of_phases):
        said = ineffective_settings(now)
        notes += [f"in phases.{index}: {sentence}" for sentence in said if sentence not in notes]
    yield from notes


def _read_rows(
    recipe: Recipe,
    given: FromPython,
    saved: Checkpoint | None,
    say: Callable[[str], object],
    *,
    trains: bool,
) -> tuple[Sequence[SetRows], RowSet, Sequence[tuple[Row, Demonstration]]]:
    """Return rows of sets, own rows and demonstrations, which must be those of the run that is resumed."""
    say("reading what to evaluate on")
    set_rows = read_sets(recipe, given.evaluation)
    if not trains:
        return set_rows, RowSet(train=(), held_out=()), []
    say(f"reading {recipe.queries.path or 'the queries'}")
    refresh = recipe.queries.refresh
    _check_watched(recipe, [each.name for each in set_rows])
    if saved is not None and (kept := kept_rows(saved)):
        check_rows(saved, recipe, kept, (), set_rows)
        return set_rows, kept, []
    num_streamed = 0 if saved is None else saved.manifest.get("num_streamed", 0)
    rows = load_rows(recipe, given.queries, num_streamed=num_streamed)
    own = {"queries.sampler: difficulty": recipe.queries.sampler == "difficulty", "queries.refresh": refresh}
    if rows.num_streamed and (where := ", ".join(key for key, is_set in own.items() if is_set)):
        fix = "leave it out, or give the rows as a list"
        raise UserError("a stream's rows are taken as they come", where=where, fix=fix)
    if given.queries is not None and refresh == REPLACED_FILE:
        what = "queries come from Python, and not of a file"
        raise UserError(what, where="queries.refresh: file", fix="name a function that gives the new ones")
    # A resumed run that reads more of a stream draws its demonstrations where it drew them before.
    pairs = load_demonstrations(recipe, rows.of_first(num_streamed)) if recipe.cold_start.steps else []
    if saved is not None:
        check_rows(saved, recipe, rows, pairs, set_rows)
    return set_rows, rows, pairs


def _check_watched(recipe: Recipe, sets: Sequence[str]) -> None:
    """Raise UserError for a watched metric that no run of the recipe has; `sets` are beside the held-out one."""
    homes = [f"evaluation/{name}/" for name in (name_of_held_out(recipe), *sets)]
    general = [name for family in families() for name in family.metrics]
    names = [name.replace("evaluation/<set>/", home) for home in homes for name in general]
    watched = {key: attrgetter(key)(recipe) for key in ("checkpoint.best", "early_stop.metric")}
    watched |= {f"phases.{n}.when.metric": phase.when.metric for n, phase in enumerate(recipe.phases) if phase.when}
    for key, metric in watched.items():
        is_of_another_set = metric and metric.startswith("evaluation/") and not metric.startswith(tuple(homes))
        family, _, rest = (metric or "").partition("/")
        is_of_no_source = (
            family == "queries" and recipe.queries.sources and rest.split("/")[0] not in recipe.queries.sources
        )
        if metric and (definition_of(metric) is None or is_of_another_set or is_of_no_source):
            fix = did_you_mean(metric, names, "see docs/reference/metrics.md", most=3, cutoff=0.5)
            raise UserError(f"no metric is called {metric}", where=key, fix=fix)
        if needed := _needed_for(recipe).get(family):
            raise UserError(f"a run has {metric} with {needed} only", where=key, fix="set that, or name another metric")
        if key.startswith("phases.") and (metric == "phase" or metric.startswith(("time/", "throughput/", "memory/"))):
            what = f"{metric} depends on the machine, or on the phases, and a resumed run would have other phases"
            raise UserError(what, where=key, fix="name a metric of the responses or of the update")


def _needed_for(recipe: Recipe) -> dict[str, str]:
    """Return what the recipe lacks for families of metrics."""
    rollout, actor = recipe.rollout, recipe.actor
    needs: dict[str, tuple[str, object]] = {
        "critic": ("actor.advantage: gae", actor.advantage == "gae"),
        "curriculum": ("queries.sampler: difficulty", recipe.queries.sampler == "difficulty"),
        "queries": ("queries.sources", recipe.queries.sources),
        "reference": ("actor.kl.coefficient", actor.kl.coefficient),
        "staleness": ("rollout.max_staleness", rollout.max_staleness),
        "source": ("rollout.max_staleness", rollout.max_staleness),
        "teacher": ("a teacher", recipe.teacher.is_on),
        "tools": ("rollout.tools, mcp, environment or agent", rollout.has_turns),
        "turns": ("rollout.tools, mcp, environment or agent", rollout.has_turns),
    }
    return {family: needed for family, (needed, is_there) in needs.items() if not is_there}


def longest_sequence(recipe: Recipe, queries: QuerySet, sets: Sequence[EvaluationSet]) -> int:
    """The most tokens that a prompt and its response may have, in training or in an evaluation."""
    asked = [(queries.train, recipe.rollout), *((eval_set.queries, eval_set.sampling) for eval_set in sets)]
    lengths = [len(own.prompt_ids) + sampling.max_new_tokens for each, sampling in asked for own in each]
    if recipe.queries.refresh:  # rows to come may be as long
        lengths.append((recipe.queries.max_prompt_tokens or 0) + recipe.rollout.max_new_tokens)
    return max(lengths, default=0) if recipe.rollout.agent is None else recipe.rollout.max_context


def prepare(
    recipe: Recipe,
    trainer: Trainer,
    given: FromPython = NOTHING,
    *,
    saved: Checkpoint | None = None,
    say: Callable[[str], object] = lambda _: None,
    output: int = 2,
) -> Inputs:
    """Load everything and prove that it fits together; UserError at the first fault.

    Where a run is resumed, its `saved` weights stand in for those of recipe.model, and the reference is the policy as
    reinforcement learning started: what the cold start ended with, else the model of the recipe.
    """
    inputs = load_inputs(recipe, given, saved=saved, say=say, output=output, num_ranks=trainer.num_ranks)
    check_stop()
    say(f"loading {recipe.model.path or 'a new model'}")
    is_trained = saved is not None and not saved.is_cold_start
    started = _cold_started_model(recipe.run_dir) if is_trained and recipe.cold_start.steps else None
    weights = None if saved is None else saved.path / "model"
    trainer.load(recipe, inputs.tokenizer, weights=weights, reference_weights=started)
    check_stop()
    left_out = {row.id for row in inputs.rows.train} - {query.id for query in inputs.queries.train}
    pairs = [pair for pair in inputs.pairs if pair[0].id not in left_out]
    bridge = inputs.tools.bridge if inputs.tools else None
    demonstrations = encode_demonstrations(trainer.policy, inputs.rendering, pairs, bridge)
    return replace(inputs, demonstrations=demonstrations)


def _cold_started_model(run: Path) -> Path:
    if cold_start := finished_cold_start(run):
        return cold_start.path / "model"
    fix = "restore it from a copy: every update so far was made against it"
    raise UserError("the reference model is not there", where=str(run / COLD_START), fix=fix)


def _fitting_texts(
    recipe: Recipe, rows: RowSet, set_rows: Sequence[SetRows], pairs: Sequence[tuple[Row, Demonstration]]
) -> Iterable[str]:
    """Return what a fitted tokenizer must be able to write."""
    for queries in (recipe.queries, *(suite.queries for suite in recipe.evaluation.suites)):
        yield from filter(None, (queries.template, queries.system))
    if recipe.teacher.prompt is not None:
        yield from (texts_of(taught(row, recipe.teacher.prompt)) for row in rows.train)
    for row in (*rows.train, *rows.held_out, *(row for own in set_rows for row in own.rows)):
        yield texts_of(row)
    for _, completion in pairs:
        yield completion if isinstance(completion, str) else " ".join(message["content"] for message in completion)
    if recipe.rollout.has_turns:
        yield PLAIN
