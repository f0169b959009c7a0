"""The responses that a page carries: the first ones to each question, as many as fit."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gspo.errors import printable
from gspo.report.evaluation.data import Questions, Response
from gspo.report.page.sample_data import packed
from gspo.report.sample_index import readable

MAX_SIZE = 24_000_000  # characters of responses in a page: packed a third of that, or less
_IN_CHUNK = 16  # questions, which a browser unpacks at once
_OWN_SIZE = 200  # characters that a response has beside its texts
_SHOWN = ("completion", "passed", "reward", "rewards", "failure", "extra", "tokens", "finish_reason")


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a page has of a suite's responses."""

    places: Mapping[str, tuple[int, int] | None]  # of each question: its chunk, and where in that
    chunks: Sequence[str]
    coverage: str  # a sentence


def carried_responses(questions: Sequence[Questions], changed: Collection[str], max_size: int) -> Carried:
    """What fits of each model's responses; those to questions that `changed` come first."""
    names = dict.fromkeys(query for rows in questions for query in rows)
    turns = sorted(  # each question gets its first response before any gets its second
        (number, query not in changed, rank, model, query)
        for rank, query in enumerate(names)
        for model, rows in enumerate(questions)
        for number in range(len(rows.get(query, ())))
    )
    sizes = accumulate(_size(questions[model][query][number], number) for number, _, _, model, query in turns)
    counts = Counter((query, model) for *_, model, query in turns[: bisect_right([*sizes], max_size)])
    shown = [query for query in names if any((query, model) in counts for model in range(len(questions)))]
    places = names | {query: divmod(number, _IN_CHUNK) for number, query in enumerate(shown)}
    contents = [_shown(query, questions, counts) for query in shown]
    chunks = [packed(contents[start : start + _IN_CHUNK]) for start in range(0, len(contents), _IN_CHUNK)]
    page = f"This page carries {counts.total():,} of {len(turns):,} responses, the first ones to each question"
    coverage = "All responses." if counts.total() == len(turns) else f"{page}; evaluation.json has all."
    return Carried(places=places, chunks=chunks, coverage=coverage)


def _size(response: Response, number: int) -> int:
    names = ("completion", "extra") if number else ("completion", "extra", "prompt")  # a question has its prompt once
    return _OWN_SIZE + sum(len(str(response[name])) for name in names)


def _shown(query: str, questions: Sequence[Questions], counts: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """A question as the page shows it: its prompt, columns, and of each model the responses that are carried."""
    rows = [rows.get(query, ())[: counts[query, model]] for model, rows in enumerate(questions)]
    lead = next(row[0] for row in rows if row)
    columns = "; ".join(f"{name}: {value}" for name, value in lead["columns"].items())
    shown = [[readable({name: response.get(name) for name in _SHOWN}) for response in row] for row in rows]
    return {"prompt": printable(lead["prompt"]), "columns": printable(columns), "responses": shown}
