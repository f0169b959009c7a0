"""The rows of a recipe: to train on, and held out; no question is in both."""

import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from gspo.errors import UserError, did_you_mean
from gspo.queries.placeholders import fill_in
from gspo.queries.render import remark_notes, render_all, variable_notes
from gspo.queries.row import Row, distinct, lay_out, read_rows, repetition_notes
from gspo.queries.template import with_text
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import MAX_DRAWN, ProceduralConfig, QueriesConfig, names_file
from gspo.types import Query

HELD_OUT_FRACTION = 0.1
# Not the recipe's seed: runs that differ in their seed are scored on the same questions.
HELD_OUT_SEED = 250718071
# reasoning-gym draws item i of a data set from Random(seed + i), so that seeds 0 and 1 share all items but one.
# Seeds are therefore spaced further apart than any data set is long; numpy, used by some tasks, ends at 2**32.
SEED_SPACING = 4 * MAX_DRAWN
NUM_SEEDS = 2**32 // SEED_SPACING
# A small task repeats itself: this many times the wanted rows are drawn before fewer are accepted.
MAX_DRAWS_PER_ROW = SEED_SPACING // MAX_DRAWN
T = TypeVar("T", Row, Query)


@dataclass(frozen=True, kw_only=True)
class Split(Generic[T]):
    """A set to train on and one that only the evaluation asks: rows before the tokenizer, queries after it.

    Example: RowSet(train=(Row(id="data:2", prompt="1+1="),), held_out=(Row(id="data:1", prompt="2+2="),)).
    """

    train: tuple[T, ...]
    held_out: tuple[T, ...]
    num_streamed: int = 0  # rows that were read of a stream, which are taken in their order; 0: no stream

    def of_first(self, num_streamed: int) -> Self:
        """Return what the first rows of a stream gave: more of them are read where a resumed run gets more steps."""
        first = [row for row in self.train if int(row.id.rpartition(":")[2]) <= num_streamed]
        return replace(self, train=tuple(first)) if num_streamed else self


RowSet = Split[Row]
QuerySet = Split[Query]


def load_rows(
    recipe: Recipe,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    num_streamed: int = 0,
    held_out: Sequence[Row] | None = None,
) -> RowSet:
    """Training and held-out rows; `rows` given from Python stand in for what `queries` names.

    `num_streamed` is how many a run that is resumed has read of a stream so far; `held_out` is what a run that reads
    its rows anew has held out before.
    Raises UserError where there are no rows, and where those not held out are too few for a step.
    """
    queries = recipe.queries
    if queries.sources:
        return _rows_of_sources(recipe, held_out)
    task = queries.procedural if rows is None else None
    given, num_streamed = (None, 0) if rows is None else _read_given(rows, recipe, num_streamed)
    data = _data_rows(queries, given) if task is None else []
    data = data if num_streamed else distinct(data)  # a stream is as it comes
    if held_out is None:
        held_out = _held_out_rows(recipe, task, data, is_stream=num_streamed > 0)
    excluded = {str(row.prompt) for row in held_out}
    if task is not None:
        train = procedural_rows(task, seed=recipe.seed, size=task.size, excluded=excluded)
    else:
        train = [row for row in data if str(row.prompt) not in excluded]
    train, needed = train[: queries.limit], recipe.rollout.queries_per_step
    if len(train) < needed:
        what = f"a step takes {needed} different queries and the data has {len(train)} for training"
        fix = "lower rollout.queries_per_step or evaluation.num_queries, give more data, or a wider task"
        raise UserError(f"{what}, besides {len(held_out)} held out for evaluation", where="queries", fix=fix)
    return RowSet(train=tuple(train), held_out=tuple(held_out), num_streamed=num_streamed)


def _held_out_rows(
    recipe: Recipe, task: ProceduralConfig | None, data: Sequence[Row], *, is_stream: bool
) -> Sequence[Row]:
    evaluation = recipe.evaluation
    if evaluation.path is not None and evaluation.num_queries:
        return distinct(_read(evaluation.path, recipe.queries, split=evaluation.split))[: evaluation.num_queries]
    if task is not None:
        return procedural_rows(task, seed=None, size=evaluation.num_queries)
    if is_stream:
        return data[: evaluation.num_queries]
    # A fixed draw of at most a tenth of the rows, at least one where any is asked for.
    size = min(evaluation.num_queries, max(1, int(len(data) * HELD_OUT_FRACTION)))
    return [data[index] for index in sorted(random.Random(HELD_OUT_SEED).sample(range(len(data)), size))]


def _rows_of_sources(recipe: Recipe, held_before: Sequence[Row] | None) -> RowSet:
    """The rows of each source, of which each holds out its part of what is asked for; ids begin with its name."""
    train, held_out, sources = list[Row](), list[Row](), recipe.queries.sources
    before = {name: [row for row in held_before or () if row.source == name] for name in ("", *sources)}
    asked, path = recipe.evaluation.num_queries, recipe.evaluation.path
    if held_before is not None:
        held_out, asked = before[""], 0
    elif path is not None:
        rows_of_file = _read(path, recipe.queries, split=recipe.evaluation.split) if asked else []
        held_out, asked = distinct(rows_of_file)[:asked], 0
    for number, (name, source) in enumerate(sources.items()):
        own = {**vars(source), "prompt": source.prompt or recipe.queries.prompt, "sources": {}, "weights": {}}
        own_queries = recipe.queries.model_copy(update=own)
        share = {"num_queries": (asked + number) // len(sources), "path": None}
        evaluation = recipe.evaluation.model_copy(update=share)
        rollout = recipe.rollout.model_copy(update={"queries_per_step": 1})
        own_recipe = recipe.model_copy(update={"queries": own_queries, "evaluation": evaluation, "rollout": rollout})
        try:
            rows = load_rows(own_recipe, held_out=None if held_before is None else before[name])
        except UserError as error:
            where = f"queries.sources.{name}" + f", {error.where}" * (error.where not in (None, "queries"))
            raise UserError(error.what, where=where, fix=error.fix) from None
        train += [_of_source(row, name) for row in rows.train]
        held_out += [_of_source(row, name, f"{name}.held-out") for row in rows.held_out]
    held_out = distinct(held_out)
    excluded = {str(row.prompt) for row in held_out}
    train = [row for row in train if str(row.prompt) not in excluded]
    if few := _too_few_of_a_source(recipe, train):
        name, most, number = few
        what = f"a step takes {most} different queries and the data has {number} for training"
        fix = "lower rollout.queries_per_step, evaluation.num_queries or its weight, or give more data"
        raise UserError(what, where=f"queries.sources.{name}", fix=fix)
    return RowSet(train=tuple(train), held_out=tuple(held_out))


def _too_few_of_a_source(recipe: Recipe, train: Sequence[Row | Query]) -> tuple[str, int, int] | None:
    """Return a source that has fewer queries than a step may take of it, these, and how many it has."""
    recipes = (recipe, *recipe.recipes_of_phases)
    for name in recipe.queries.sources:
        share = max(each.queries.shares[name] for each in recipes)
        most = max(1, math.ceil(recipe.rollout.queries_per_step * share - 1e-9))  # but for rounding
        number = sum(row.source == name for row in train)
        if number < most:
            return name, most, number
    return None


def _of_source(row: Row, name: str, prefix: str | None = None) -> Row:
    return replace(row, id=f"{prefix or name}:{row.id.rpartition(':')[2]}", source=name)


def _read_given(rows: Any, recipe: Recipe, num_streamed: int) -> tuple[list[Any], int]:
    """Return rows given from Python, and how many were read of a stream; 0: all were, for they have an end.

    A stream has no length and more rows than the run can use, or had when the run began.
    """
    if isinstance(rows, Sized) or not isinstance(rows, Iterable):
        return list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows], 0
    rollout, evaluation = recipe.rollout, recipe.evaluation
    num_train = recipe.steps * rollout.queries_per_step * (rollout.max_rounds if rollout.dynamic_sampling else 1)
    num_held_out = 0 if evaluation.path else evaluation.num_queries
    most = max(num_streamed, num_held_out + min(num_train, recipe.queries.limit or num_train))
    given = list(islice(rows, most + 1))
    return given[:most], min(most, len(given)) if num_streamed or len(given) > most else 0


def _data_rows(queries: QueriesConfig, rows: Sequence[Mapping[str, Any]] | None) -> list[Row]:
    if rows is not None:
        return lay_out(rows, source="queries", prompt_column=queries.prompt)
    if queries.path is not None:
        return _read(queries.path, queries, split=queries.split)
    fix = "set queries.path or queries.procedural.task, or give rows from Python"
    raise UserError("the recipe has no queries", where="queries", fix=fix)


def _read(path: str, queries: QueriesConfig, *, split: str) -> list[Row]:
    raw_rows = read_rows(path, config=queries.config, split=split)
    return lay_out(raw_rows, source=Path(path).name if names_file(path) else path, prompt_column=queries.prompt)


def procedural_rows(
    config: ProceduralConfig, *, seed: int | None, size: int, excluded: Collection[str] = ()
) -> list[Row]:
    """Draw up to `size` distinct questions of a seed from a task of reasoning-gym, none of which is excluded.

    Without a seed they are those that every seed holds out: they depend on the task and its options only.
    Raises UserError for an unknown task and for options that the task refuses.
    """
    slot = 0 if seed is None else 1 + seed % (NUM_SEEDS - 1)
    source = config.task if seed is not None else f"{config.task}-held-out"
    shared = {"task": config.task, "task_options": dict(config.model_extra or {})}
    rows: dict[str, Row] = {}
    draws = (
        _create_dataset(config, seed=slot * SEED_SPACING + draw * size, size=size)
        for draw in range(MAX_DRAWS_PER_ROW if size else 0)
    )
    for entry in (data[index] for data in draws for index in range(size)):
        question = entry["question"]
        if question not in excluded and question not in rows:
            columns = {"answer": entry["answer"], **shared, "entry": entry}
            row_id = f"{source}:{len(rows) + 1}"
            rows[question] = Row(id=row_id, prompt=question, columns=columns, is_procedural=True)
            if len(rows) == size:
                break
    return list(rows.values())


def _create_dataset(config: ProceduralConfig, *, seed: int, size: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    task, options, where = config.task, config.model_extra or {}, "queries.procedural"
    if task not in DATASETS:
        fix = did_you_mean(task, DATASETS, "reasoning-gym's documentation lists its tasks", most=3, cutoff=0.4)
        raise UserError(f"reasoning-gym has no task {task!r}", where=f"{where}.task", fix=fix)
    if "seed" in options:
        raise UserError("the task's seed comes from the recipe's", where=f"{where}.seed", fix="set `seed` at the top")
    try:
        return create_dataset(task, **options, seed=seed, size=size)
    except Exception as error:  # tasks check their options with assert, ValueError, TypeError, …
        names = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
        fix = f"options of {task}: {', '.join(names)}"
        raise UserError(f"task {task} refuses its options: {error}", where=where, fix=fix) from None


def render_rows(
    rows: RowSet,
    tokenizer: Any,
    *,
    recipe: Recipe,
    max_positions: int | None,
    length_key: str = "rollout.max_new_tokens",
) -> QuerySet:
    """Both sets of rows as the model reads them, without prompts that are too long where queries.overlong says so.

    A prompt must leave rollout.max_new_tokens of the positions. Raises UserError, which counts those that do not, and
    calls that length as the user knows it.
    """
    queries, most, limit = recipe.queries, math.inf, ""
    render = partial(render_all, tokenizer=tokenizer, queries=queries)
    train, held_out = render(rows.train), render(rows.held_out)
    if recipe.teacher.prompt is not None:
        train = with_teacher_ids(train, rows.train, recipe.teacher.prompt, render)
    if max_positions is not None:
        most = max(0, max_positions - recipe.rollout.max_new_tokens)
        beside = f"beside the response's {recipe.rollout.max_new_tokens} ({length_key})"
        limit = f"{beside}, the model's {max_positions} positions leave {most}"
    if queries.max_prompt_tokens is not None and queries.max_prompt_tokens < most:
        most, limit = queries.max_prompt_tokens, f"queries.max_prompt_tokens is {queries.max_prompt_tokens}"
    too_long = [query for query in (*train, *held_out) if len(query.prompt_ids) > most]
    if not too_long:
        return QuerySet(train=train, held_out=held_out)
    fitting = [tuple(query for query in part if len(query.prompt_ids) <= most) for part in (train, held_out)]
    longest, num_prompts = max(too_long, key=lambda query: len(query.prompt_ids)), len(train) + len(held_out)
    which = f"{len(too_long)} of {num_prompts} prompts have too many tokens"
    what = f"{which}, and this is the longest: {len(longest.prompt_ids)}; {limit}"
    fix = f"lower {length_key}, use a model with more positions, or leave them out: queries.overlong: filter"
    if queries.overlong == "error":
        raise UserError(what, where=longest.id, fix=fix)
    few = _too_few_of_a_source(recipe, fitting[0]) if train else None
    if few or (train and len(fitting[0]) < recipe.rollout.queries_per_step) or (held_out and not fitting[1]):
        rest = f"{len(fitting[0])} training and {len(fitting[1])} held-out queries"
        rest = f"of {few[1]} queries of queries.sources.{few[0]} that a step takes {few[2]}" if few else rest
        fix = f"lower {length_key}, or give more data"
        raise UserError(f"{what}; {rest} are left, which is too few", where=longest.id, fix=fix)
    return QuerySet(train=fitting[0], held_out=fitting[1])


def with_teacher_ids(
    queries: Sequence[Query], rows: Sequence[Row], prompt: str, render: Callable[[Sequence[Row]], Sequence[Query]]
) -> tuple[Query, ...]:
    """The queries with what the teacher reads: their rows, in this text, rendered as the policy's own are.

    Raises UserError where a row lacks a column that the text names.
    """
    asked = render([taught(row, prompt) for row in rows])
    pairs = zip(queries, asked, strict=True)
    return tuple(replace(query, teacher_ids=own.prompt_ids) for query, own in pairs)


def taught(row: Row, prompt: str) -> Row:
    """The row with the text in place of its prompt's; of chat messages, in place of the user's last."""

    def filled(text: str) -> str:
        return fill_in(prompt, {**row.clean_columns, "prompt": text}, key="teacher.prompt", where=row.id)

    if isinstance(row.prompt, str):
        return replace(row, prompt=filled(row.prompt))
    messages: list[dict[str, Any]] = [with_text(message, where=row.id) for message in row.prompt]
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = filled(message["content"])
            return replace(row, prompt=messages)
    raise UserError("no message is the user's, so teacher.prompt has no place", where=row.id, fix="leave it out")


def texts_of(row: Row) -> str:
    """The text of a row's prompt, or those of its messages."""
    return row.prompt if isinstance(row.prompt, str) else " ".join(str(m.get("content")) for m in row.prompt)


def query_notes(rows: RowSet, queries: QuerySet, recipe: Recipe, tokenizer: Any) -> list[str]:
    """Sentences about prompts that were left out, rows that are alike, and what the chat template does with them."""
    num_train, num_held_out = len(rows.train) - len(queries.train), len(rows.held_out) - len(queries.held_out)
    note = f"{num_train} training and {num_held_out} held-out prompts are too long and left out"
    asked = [*queries.train, *queries.held_out]
    return [
        *[note] * bool(num_train or num_held_out),
        *repetition_notes(rows.train, "training rows"),
        *repetition_notes(rows.held_out, "held-out rows"),
        *variable_notes(asked, tokenizer, recipe.queries),
        *remark_notes(asked, "prompts"),
    ]
