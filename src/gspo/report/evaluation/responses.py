"""The responses that a page carries: as many as fit, those to questions on which the models differ first."""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import printable
from gspo.report.evaluation.data import Questions, Response
from gspo.report.page.sample_data import packed
from gspo.report.sample_index import readable

_MAX_SIZE = 24_000_000  # characters of responses in a page: packed a third of that, or less
_MAX_QUESTIONS = 5_000  # in a suite's table
_CHUNK_SIZE = 400_000  # characters that a browser unpacks at once
_OWN_SIZE = 200  # characters that a response has beside its texts
_START, _END = 4_000, 8_000  # characters that are left of a long response, where not all of a suite fit
_SHOWN = ("completion", "passed", "reward", "rewards", "failure", "extra", "tokens", "finish_reason", "not_read")


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What a page has of a suite's responses.

    Example: Carried(places={"gsm8k:1": (0, 0), "gsm8k:2": None}, chunks=["H4sI…"], coverage="All responses.")
    """

    places: Mapping[str, tuple[int, int] | None]  # of each question in the table: its chunk, and where in that
    chunks: Sequence[str]
    coverage: str  # a sentence


def carried_responses(
    suites: Mapping[str, Sequence[Questions]], changed: Mapping[str, Collection[str]]
) -> dict[str, Carried]:
    """By suite what fits of each model's responses; those to `changed` questions come first.

    A small suite leaves its room to the others.
    """
    sizes = {name: sum(_size(rows) for rows in questions) for name, questions in suites.items()}
    carried, room = dict[str, Carried](), _MAX_SIZE
    for number, name in enumerate(sorted(sizes, key=sizes.__getitem__)):
        share = room // (len(sizes) - number)
        questions = suites[name] if sizes[name] <= share else [_shortened(rows) for rows in suites[name]]
        carried[name] = _carried(questions, changed[name], share)
        room -= min(share, sizes[name])
    return carried


def _carried(questions: Sequence[Questions], changed: Collection[str], max_size: int) -> Carried:
    names = list(dict.fromkeys(query for rows in questions for query in rows))
    hashes = {query: hashlib.sha256(query.encode(errors="replace")).digest() for query in names}
    ranked = sorted(names, key=lambda query: (query not in changed, hashes[query]))[:_MAX_QUESTIONS]
    chosen = _chosen(questions, ranked, max_size)
    listed = set(ranked)
    places: dict[str, tuple[int, int] | None] = {query: None for query in names if query in listed}
    chunks, sizes = list[list[Any]](), list[int]()
    for query in filter(chosen.__contains__, places):
        if not chunks or sizes[-1] > _CHUNK_SIZE:
            chunks.append([])
            sizes.append(0)
        places[query] = len(chunks) - 1, len(chunks[-1])
        chunks[-1].append(_shown(query, questions, chosen[query]))
        sizes[-1] += sum(_size_of(questions[model][query][place]) for model, place in chosen[query])
    num_all = sum(len(row) for rows in questions for row in rows.values())
    coverage = _coverage(sum(map(len, chosen.values())), num_all, num_unnamed=len(names) - len(places))
    return Carried(places=places, chunks=[packed(chunk) for chunk in chunks], coverage=coverage)


def _chosen(questions: Sequence[Questions], ranked: Sequence[str], max_size: int) -> dict[str, set[tuple[int, int]]]:
    """By query the responses that fit, each as the place of its model and its own.

    Each question gets a response of each verdict before any gets another.
    """
    turns = [
        (turn, rank, model, place)
        for rank, query in enumerate(ranked)
        for model, rows in enumerate(questions)
        for turn, place in enumerate(_by_verdict(rows.get(query, ())))
    ]
    chosen: dict[str, set[tuple[int, int]]] = {}
    for _, rank, model, place in sorted(turns):
        query = ranked[rank]
        response = questions[model][query][place]
        size = _size_of(response) + (0 if query in chosen else len(response["prompt"]))
        if size <= max_size:
            chosen.setdefault(query, set()).add((model, place))
            max_size -= size
    return chosen


def _by_verdict(responses: Sequence[Response]) -> Iterator[int]:
    """The places of the first response of each verdict, then the others."""
    first = {response["passed"]: place for place, response in reversed(list(enumerate(responses)))}
    yield from first.values()
    yield from (place for place in range(len(responses)) if place not in first.values())


def _size(rows: Questions) -> int:
    return sum(len(row[0]["prompt"]) + sum(map(_size_of, row)) for row in rows.values())


def _size_of(response: Response) -> int:
    return _OWN_SIZE + len(response["completion"]) + len(str(response["extra"]))


def _shortened(rows: Questions) -> Questions:
    return {
        query: [{**response, "completion": _without_middle(response["completion"])} for response in row]
        for query, row in rows.items()
    }


def _without_middle(text: str) -> str:
    num_left_out = len(text) - _START - _END
    if num_left_out <= 0:
        return text
    return f"{text[:_START]}\n[… {num_left_out:,} characters: evaluation.json has them …]\n{text[-_END:]}"


def _shown(query: str, questions: Sequence[Questions], chosen: Collection[tuple[int, int]]) -> dict[str, Any]:
    """A question as the page shows it: its prompt, columns, and of each model the responses that are carried."""
    rows = [model_questions.get(query, ()) for model_questions in questions]
    lead = next(row[0] for row in rows if row)
    columns = "; ".join(f"{name}: {value}" for name, value in lead["columns"].items())
    shown = [
        [
            readable({name: response.get(name) for name in _SHOWN})
            for place, response in enumerate(row)
            if (model, place) in chosen
        ]
        for model, row in enumerate(rows)
    ]
    return {"prompt": printable(lead["prompt"]), "columns": printable(columns), "responses": shown}


def _coverage(num_carried: int, num_all: int, *, num_unnamed: int) -> str:
    if num_carried == num_all:
        return "All responses."
    table = f" The table leaves out {num_unnamed:,} questions." if num_unnamed else ""
    chosen = "those to questions on which models differ first, then by a hash of the question"
    return f"This page carries {num_carried:,} of {num_all:,} responses: {chosen}; evaluation.json has all.{table}"
