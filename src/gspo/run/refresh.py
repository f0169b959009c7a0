"""New queries in the course of a run: `queries.refresh` at the top of a step."""

from dataclasses import replace
from typing import Any

from gspo.errors import UserError
from gspo.queries.refresh import Refresh, from_text, to_text
from gspo.queries.source import RowSet
from gspo.reward.arguments import arguments_of
from gspo.reward.functions import fit_to_rows
from gspo.reward.score import judging
from gspo.run.progress import Progress
from gspo.run.resume import rows_digest, tokens_digest
from gspo.run.run import Run


def refreshed(run: Run, refresh: Refresh, progress: Progress) -> Progress:
    """The progress with the rows of the next step, which a checkpoint holds from now on; what is ahead is of none.

    UserError where they cannot be used; the state is that of before.
    """
    step, before = progress.steps + 1, run.parts.rows
    try:
        if rows := refresh.rows(step, before):
            num_new = len({row.id for row in rows.train} - {row.id for row in before.train})
            run.display.note(f"from step {step}: {len(rows.train)} queries, {num_new} of them new ({refresh.name})")
        elif refresh.call is None and not progress.rows:
            rows = from_text(to_text(before))  # the file may be another when the run is resumed
        return progress if rows is None else _with_rows(run, progress, rows)
    except UserError as error:
        what = f"the rows for step {step} cannot be used: {error.what}"
        raise UserError(what, where=f"queries.refresh, {error.where}", fix=f"{error.fix}; then resume") from None


def _with_rows(run: Run, progress: Progress, rows: RowSet) -> Progress:
    parts, source = run.parts, run.source
    queries = replace(parts.queries, train=parts.render(replace(rows, held_out=())).train)
    functions = fit_to_rows(parts.functions, rows.train)
    for query in {query.source: query for query in queries.train}.values():
        for function in judging(functions, query):
            arguments_of(query, (), function)
    text, own = to_text(rows), {query.id for query in queries.train}
    digests = {"rows_sha256": rows_digest(rows, (), parts.set_rows), "tokens_sha256": tokens_digest(queries)}
    if source is not None:
        run.close_source()
        source.ahead.clear()
        source.num_taken.clear()
    assert run.checkpointer is not None
    run.parts = replace(parts, rows=rows, queries=queries, functions=functions)
    run.about = run.checkpointer.about = {**run.about, **digests}
    rates = {query: rate for query, rate in progress.pass_rates.items() if query in own}
    empty: dict[str, Any] = {"ahead": (), "num_taken": {}}
    return replace(progress, rows=text, rows_since=progress.batches_drawn, pass_rates=rates, **empty)
