"""CodeForces contests from files: problems with tests, standings and ratings as the site's API gives them."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo.errors import UserError
from gspo.queries.row import RawRow, read_rows

_KINDS = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number"}
_PARTY = {"participantType": str, "members": [{"handle": str}]}
_ROW = {"party": _PARTY, "problemResults": [{"points": float, "rejectedAttemptCount": int}]}
_STANDINGS = {"contest": {"name": str}, "problems": [{"index": str}], "rows": [_ROW]}
_CHANGES = [{"handle": str, "oldRating": float}]
_PROBLEM = {"contest": int, "index": str, "statement": str, "tests": [{"input": str, "output": str}]}


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
    """The contests in `directory`/contests/<id>/{standings,ratings}.json, ordered by id.

    UserError for a file that is missing or unreadable, a value of a wrong type, a contest without a rated human.
    """
    folder = directory / "contests"
    folders = [path for path in folder.glob("*") if path.is_dir() and path.name.isdecimal()]
    if not folders:
        fix = "give each a folder named by its number, such as contests/2024, with standings.json and ratings.json"
        raise UserError("no contest is here", where=str(folder), fix=fix)
    return [_read_contest(path) for path in sorted(folders, key=lambda path: int(path.name))]


def read_problems(directory: Path, contests: Sequence[Contest]) -> list[RawRow]:
    """The rows of `directory`/problems.jsonl for the judge: prompt, tests, contest, index, and any other columns.

    UserError for a missing column, a value of a wrong type, a problem given twice or unknown to its contest.
    """
    path = directory / "problems.jsonl"
    known, rows = {contest.id: contest.problems for contest in contests}, dict[tuple[int, str], RawRow]()
    for number, row in enumerate(read_rows(str(path)), start=1):
        where = f"{path}, row {number}"
        _check(row, _PROBLEM, where)
        contest, index = problem = row["contest"], row["index"]
        if index not in known.get(contest, ()):
            fix = f"the problems in contests/{contest} are: {', '.join(known.get(contest, ())) or 'none'}"
            raise UserError(f"contest {contest} has no problem {index!r}", where=where, fix=fix)
        if problem in rows or not row["tests"]:
            what = f"problem {contest}{index} {'is given twice' if problem in rows else 'has no tests'}"
            raise UserError(what, where=where, fix="remove the row, or add tests")
        rows[problem] = {**row, "prompt": row["statement"]}
        del rows[problem]["statement"]
    if not rows:
        raise UserError("no problem is here", where=str(path), fix="write one problem a line")
    return [*rows.values()]


def _read_contest(folder: Path) -> Contest:
    """Its humans are those who took part officially and alone, and whose rating it changed."""
    standings = _read_answer(folder / "standings.json", _STANDINGS, "contest.standings")
    changes = _read_answer(folder / "ratings.json", _CHANGES, "contest.ratingChanges")
    ratings = {change["handle"]: change["oldRating"] for change in changes}
    problems, results, where = standings["problems"], {}, str(folder / "standings.json")
    for row in standings["rows"]:
        handles = [member["handle"] for member in row["party"]["members"]]
        if row["party"]["participantType"] == "CONTESTANT" and len(handles) == 1 and handles[0] in ratings:
            results[handles[0]] = row["problemResults"]
    fix = "save the contest's whole answers: of a rated contest that is over"
    if not any(ratings[handle] for handle in results):
        what = f"none of the {len(ratings)} humans of ratings.json has a row here and had a rating before"
        raise UserError(what, where=where, fix=fix)
    rows = [*results.values()]
    if odd := [row for row in rows if len(row) != len(problems)]:
        what = f"a row has {len(odd[0])} problemResults for {len(problems)} problems"
        raise UserError(what, where=where, fix=fix)
    return Contest(
        id=int(folder.name),
        name=standings["contest"]["name"],
        problems=tuple(problem["index"] for problem in problems),
        max_points=np.array([problem.get("points", math.nan) for problem in problems], dtype=float),
        ratings=np.array([ratings[handle] for handle in results], dtype=float),
        solved=np.array([[result["points"] > 0 for result in row] for row in rows]),
        wrong_tries=np.array([[result["rejectedAttemptCount"] for result in row] for row in rows]),
    )


def _read_answer(path: Path, shape: Any, method: str) -> Any:
    """What the API answered, with or without the envelope of `status` and `result`."""
    fix = f"save the answer of the API's method {method} there"
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"it cannot be read: {error}", where=str(path), fix=fix) from None
    if isinstance(answer, dict):
        answer = answer.get("result", answer)
    _check(answer, shape, str(path), "the answer")
    return answer


def _check(value: Any, shape: Any, where: str, name: str = "the row") -> None:
    """UserError for a value that is not of a shape: a type, a list of a shape, or names with a shape each."""
    kind = shape if isinstance(shape, type) else type(shape)
    kinds: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if type(value) not in kinds:
        what = f"{name} is missing" if value is None else f"{name} is {value!r}, not {_KINDS[kind]}"
        raise UserError(what, where=where, fix=f"make it {_KINDS[kind]}")
    if kind is list:
        for entry in value:
            _check(entry, shape[0], where, f"an entry of {name}")
    if kind is dict:
        for key, inner in shape.items():
            _check(value.get(key), inner, where, repr(key))
