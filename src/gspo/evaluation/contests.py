"""CodeForces contests from files: problems with tests, standings and ratings as the site's API gives them."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo.errors import UserError
from gspo.queries.row import RawRow, read_rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """A contest with its P problems, and its N rated humans in the order of the standings.

    Example: Contest(id=2024, name="Codeforces Round 980 (Div. 2)", problems=("A", "B"), …)
    """

    id: int
    name: str
    problems: Sequence[str]  # the index of each
    max_points: Float[np.ndarray, "P"]  # NaN of a problem that counts 1, as in Educational and Div. 3 rounds
    ratings: Float[np.ndarray, "N"]  # shown before the contest; 0 of who had none
    solved: Bool[np.ndarray, "N P"]
    wrong_tries: Int[np.ndarray, "N P"]  # of a problem that is solved: before it was


def read_contests(directory: Path) -> list[Contest]:
    """The contests in `directory`/contests/<id>/{standings,ratings}.json, by id; UserError where one is odd."""
    folder = directory / "contests"
    folders = [path for path in folder.glob("*") if path.is_dir() and path.name.isdecimal()]
    if not folders:
        raise UserError("no contest is here", where=str(folder), fix="make a folder for each, such as contests/2024")
    return [_read_contest(path) for path in sorted(folders, key=lambda path: int(path.name))]


def read_problems(directory: Path, contests: Sequence[Contest]) -> list[RawRow]:
    """The rows of `directory`/problems.jsonl with the statement as prompt; UserError for one that cannot be used."""
    path, rows = directory / "problems.jsonl", list[RawRow]()
    left: list[Any] = [(contest.id, index) for contest in contests for index in contest.problems]
    for number, row in enumerate(read_rows(str(path)), start=1):
        problem, where, fix = (
            (row.get("contest"), row.get("index")),
            f"{path}, row {number}",
            "correct the row, or remove it",
        )
        if problem not in left:
            what = f"contest {problem[0]!r} has no problem {problem[1]!r}, or the row was given before"
            raise UserError(what, where=where, fix=fix)
        left.remove(problem)
        try:
            texts = [row["statement"], *(test[name] for test in row["tests"] for name in ("input", "output"))]
        except (LookupError, TypeError):
            texts = []
        if len(texts) < 3 or not all(isinstance(text, str) for text in texts):
            raise UserError("it needs a statement, and tests with an input and an output", where=where, fix=fix)
        prompt = row.pop("statement")
        rows.append({**row, "prompt": prompt})
    if not rows:
        raise UserError("no problem is here", where=str(path), fix="write one problem a line")
    return rows


def _read_contest(folder: Path) -> Contest:
    """The rows count of who took part officially and alone, and is in ratings.json."""
    with _answer(folder / "ratings.json", "contest.ratingChanges") as changes:
        ratings = {change["handle"]: float(change["oldRating"]) for change in changes}
    with _answer(folder / "standings.json", "contest.standings") as standings:
        rows, problems = dict[str, Any](), standings["problems"]
        for row in standings["rows"]:
            handles = [member["handle"] for member in row["party"]["members"]]
            if row["party"]["participantType"] == "CONTESTANT" and len(handles) == 1 and handles[0] in ratings:
                rows[handles[0]] = row["problemResults"]
        if not any(ratings[handle] for handle in rows):
            raise ValueError(f"none of the {len(ratings)} humans of ratings.json has a row and had a rating before")
        shape, results = (len(rows), len(problems)), [result for row in rows.values() for result in row]
        return Contest(
            id=int(folder.name),
            name=str(standings["contest"]["name"]),
            problems=tuple(problem["index"] for problem in problems),
            max_points=np.array([float(problem.get("points", math.nan)) for problem in problems]),
            ratings=np.array([ratings[handle] for handle in rows]),
            solved=np.array([result["points"] > 0 for result in results]).reshape(shape),
            wrong_tries=np.array([int(result["rejectedAttemptCount"]) for result in results]).reshape(shape),
        )


@contextmanager
def _answer(path: Path, method: str) -> Iterator[Any]:
    """Read a saved answer of the API, with or without its envelope of status and result; name the file in any fault."""
    content = b""
    try:
        answer = json.loads(content := path.read_bytes())
        yield answer["result"] if "status" in answer else answer
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"this cannot be used: {type(error).__name__}: {error}; it begins {content[:80]!r}"
        fix = f"save the whole answer of the API's method {method} there, of a rated contest that is over"
        raise UserError(what, where=str(path), fix=fix) from None
