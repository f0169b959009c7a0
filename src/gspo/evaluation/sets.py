"""The sets that a recipe's run is evaluated on: its held-out queries, its suites, and rows from Python."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.evaluation.held_out import HELD_OUT, EvaluationSet, held_out_set
from gspo.evaluation.rating import read_contests, read_problems
from gspo.queries.render import remark_notes
from gspo.queries.row import Row, distinct, lay_out, read_rows, repetition_notes
from gspo.queries.source import RowSet, procedural_rows, render_rows
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import DatesConfig, SuiteConfig
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import fit_to_rows, load_functions, probe
from gspo.reward.reply import TrainerState
from gspo.types import Query

GivenRows = Mapping[str, Iterable[Mapping[str, Any]]]  # from Python, by the name of their set
_MOST_DRAWN = 512  # questions of a procedural task, where queries.limit does not say


@dataclass(frozen=True, kw_only=True)
class SetRows:
    """The rows of a set, not yet as the model reads them.

    Example: SetRows(name="gsm8k", rows=rows, suite=suite); a set of rows from Python has no suite.
    """

    name: str
    rows: Sequence[Row]
    suite: SuiteConfig | None = None


def name_of_held_out(recipe: Recipe) -> str:
    """The name that evaluations on the recipe's own held-out queries have among the metrics."""
    return Path(recipe.evaluation.path).stem if recipe.evaluation.path else HELD_OUT


def read_sets(recipe: Recipe, given: GivenRows | None = None) -> list[SetRows]:
    """The rows of the recipe's suites and those given from Python; UserError for data that cannot be used."""
    sets = [SetRows(name=suite.name, rows=read_suite(suite), suite=suite) for suite in recipe.evaluation.suites]
    for name, rows in (given or {}).items():
        laid_out = distinct(lay_out(list(rows), source=name, prompt_column=recipe.queries.prompt))
        sets.append(SetRows(name=name, rows=laid_out))
    names = [name_of_held_out(recipe), *(set_rows.name for set_rows in sets)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        fix = "give one of them another name: {suite: …, name: …}"
        raise UserError(f"two sets to evaluate on are named {twice!r}", where="evaluation", fix=fix)
    return sets


@contextmanager
def _faults_of(suite: SuiteConfig | None) -> Iterator[None]:
    """Name the suite and its file in what is wrong with it."""
    try:
        yield
    except UserError as error:
        if suite is None:
            raise
        own, path, place = f"suite {suite.name}", suite.queries.path or "", error.where or ""
        parts = [own, "" if path in place else path, "" if own in place else place]
        raise UserError(error.what, where=", ".join(filter(None, parts)), fix=error.fix) from None


def read_suite(suite: SuiteConfig) -> list[Row]:
    """The rows of a suite, of its days where it has some; UserError where there are none, or without data."""
    queries, dates = suite.queries, suite.dates
    if queries.procedural is not None:
        drawn = procedural_rows(queries.procedural, seed=None, size=queries.limit or _MOST_DRAWN)
        return [replace(row, id=f"{suite.name}:{number}") for number, row in enumerate(drawn, start=1)]
    with _faults_of(suite):
        if queries.path is None:
            what = f"it has no data of its own. {suite.about}".rstrip()
            raise UserError(what, fix=f"give it: {suite.name}.queries.path=FILE")
        if suite.layout == "codeforces":  # a problem may be one of several contests
            raw_rows = read_problems(Path(queries.path), read_contests(Path(queries.path)))
            rows = lay_out(raw_rows, source=suite.name, prompt_column=queries.prompt)
        else:
            raw_rows = read_rows(queries.path, config=queries.config, split=queries.split)
            rows = distinct(lay_out(raw_rows, source=suite.name, prompt_column=queries.prompt))
        rows = [row for row in rows if dates is None or _is_of_days(row, dates)]
        if dates is not None and not rows:
            what = f"no row has a {dates.column} from {dates.first} to {dates.last}"
            raise UserError(what, fix="set dates, or dates: null for all rows")
        return rows[: queries.limit]


def _is_of_days(row: Row, dates: DatesConfig) -> bool:
    day = row.columns.get(dates.column)
    if day is None or not str(day).strip():
        fix = f"give every row a {dates.column}, or set dates: null; the columns there are: {', '.join(row.columns)}"
        raise UserError(f"it has no {dates.column}", where=row.id, fix=fix)
    return dates.first <= str(day)[: len(dates.first)] <= dates.last


def make_sets(
    recipe: Recipe,
    sets: Sequence[SetRows],
    held_out: Sequence[Query],
    functions: Sequence[RewardFunction],
    tokenizer: Any,
    *,
    max_positions: int | None,
    length_key: str = "rollout.max_new_tokens",
    output: int = 2,
) -> tuple[EvaluationSet, ...]:
    """The sets as the model reads them, the held-out queries first, with the functions that judge each, tried on a row.

    Suites with the same function share its processes, and rows from Python have the recipe's functions. UserError for
    a prompt that does not fit, and for a function that fails or needs a column that is not there.
    """
    own_set = held_out_set(recipe, held_out, functions, name_of_held_out(recipe))
    made, judges = [own_set] if held_out else [], dict[str, Sequence[RewardFunction]]()
    separator = recipe.rollout.segment_separator
    for each in sets:
        template, queries, own_key = own_set, recipe.queries, length_key
        with _faults_of(each.suite):
            if (suite := each.suite) is not None:
                queries, own_key, key = suite.queries, "the suite's max_new_tokens", str(suite.reward)
                if key not in judges:
                    judges[key] = load_functions(suite.reward, segment_separator=separator, output=output)
                sampling = recipe.rollout.model_copy(update=suite.sampling)
                template = replace(template, sampling=sampling, pass_threshold=suite.pass_threshold)
                template = replace(template, functions=judges[key])
            changed = recipe.model_copy(update={"queries": queries, "rollout": template.sampling})
            rows = RowSet(train=(), held_out=tuple(each.rows))
            limits: dict[str, Any] = {"max_positions": max_positions, "length_key": own_key}
            judging = fit_to_rows(template.functions, each.rows)
            asked = render_rows(rows, tokenizer, recipe=changed, **limits).held_out
            probed = probe(asked, (), judging, tokenizer, segment_separator=separator, state=TrainerState())
        made.append(replace(template, name=each.name, queries=asked, functions=judging, probed=probed))
    return tuple(made)


def set_notes(sets: Sequence[EvaluationSet], rows_of_sets: Sequence[SetRows]) -> Iterator[str]:
    """Yield sentences on the rows and prompts of the sets that have rows of their own."""
    for eval_set, set_rows in zip(sets[len(sets) - len(rows_of_sets) :], rows_of_sets, strict=True):
        yield from repetition_notes(set_rows.rows, f"rows of {set_rows.name}")
        yield from remark_notes(eval_set.queries, f"prompts of {set_rows.name}")
