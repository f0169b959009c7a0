"""The responses that a page carries: the first ones to each question, as many as fit."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
    counts = _counts(questions, sorted(names, key=lambda query: query not in changed), max_size)
    shown = [query for query in names if any((query, model) in counts for model in range(len(questions)))]
    places = names | {query: divmod(number, _IN_CHUNK) for number, query in enumerate(shown)}
    contents = [_shown(query, questions, counts) for query in shown]
    chunks = [packed(contents[start : start + _IN_CHUNK]) for start in range(0, len(contents), _IN_CHUNK)]
    num_all = sum(len(row) for rows in questions for row in rows.values())
    page = f"This page carries {counts.total():,} of {num_all:,} responses, the first ones to each question"
    coverage = "All responses." if counts.total() == num_all else f"{page}; evaluation.json has all."
    return Carried(places=places, chunks=chunks, coverage=coverage)


def _counts(questions: Sequence[Questions], queries: Sequence[str], max_size: int) -> Counter[tuple[str, int]]:
    """By query and model, how many of its first responses fit: each question gets its first before any its second."""
    turns = sorted(
        (place, rank, model)
        for rank, query in enumerate(queries)
        for model, rows in enumerate(questions)
        for place in range(len(rows.get(query, ())))
    )
    counts = Counter[tuple[str, int]]()
    for place, rank, model in turns:
        max_size -= _size(questions[model][queries[rank]][place], with_prompt=place == 0)
        if max_size < 0:
            break
        counts[queries[rank], model] += 1
    return counts


def _size(response: Response, *, with_prompt: bool) -> int:
    texts = len(response["completion"]) + len(str(response["extra"]))
    return _OWN_SIZE + texts + (len(response["prompt"]) if with_prompt else 0)


def _shown(query: str, questions: Sequence[Questions], counts: Mapping[tuple[str, int], int]) -> dict[str, Any]:
    """A question as the page shows it: its prompt, columns, and of each model the responses that are carried."""
    rows = [rows.get(query, ())[: counts[query, model]] for model, rows in enumerate(questions)]
    lead = next(row[0] for row in rows if row)
    columns = "; ".join(f"{name}: {value}" for name, value in lead["columns"].items())
    shown = [[readable({name: response.get(name) for name in _SHOWN}) for response in row] for row in rows]
    return {"prompt": printable(lead["prompt"]), "columns": printable(columns), "responses": shown}
