"""CodeForces contests from files: problems with their tests, standings and ratings as the site's API gives them."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Int

from gspo.errors import UserError
from gspo.queries.row import RawRow, read_rows

T = TypeVar("T")

_KINDS = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """A contest with its P problems, and its N rated humans in the order of the standings.

    Example: Contest(id=2024, name="Codeforces Round 980 (Div. 2)", problems=("A", "B"), max_points=[500, 750], …)
    """

    id: int
    name: str
    problems: Sequence[str]  # the index of each
    max_points: Float[np.ndarray, "P"]  # NaN of a problem that counts 1, as in Educational and Div. 3 rounds
    ratings: Float[np.ndarray, "N"]  # shown before the contest; 0 of who had none
    solved: Bool[np.ndarray, "N P"]
    wrong_tries: Int[np.ndarray, "N P"]  # of a problem that is solved: before it was

    @property
    def division(self) -> str:
        """As the name says it: "Div. 1 + Div. 2"; empty where it says nothing."""
        return " + ".join(re.findall(r"Div\. ?\d", self.name))


def read_contests(directory: Path) -> list[Contest]:
    """The contests in `directory`/contests/<id>/{standings,ratings}.json, ordered by id.

    Raises UserError for a missing or unreadable file, a value of a wrong type, and a contest without a rated human.
    """
    folder = directory / "contests"
    folders = [path for path in folder.glob("*") if path.is_dir()] if folder.is_dir() else []
    fix = "give each contest a folder named by its number, such as contests/2024, with standings.json and ratings.json"
    if not folders:
        raise UserError("no contest is here", where=str(folder), fix=fix)
    for path in folders:
        if not path.name.isdecimal():
            raise UserError("this folder is not named by the number of a contest", where=str(path), fix=fix)
    return [_read_contest(path) for path in sorted(folders, key=lambda path: int(path.name))]


def read_problems(directory: Path, contests: Sequence[Contest]) -> list[RawRow]:
    """The rows of `directory`/problems.jsonl for the judge: prompt, tests, contest, index, and what other columns hold.

    Raises UserError for a missing column, a value of a wrong type, a problem given twice or unknown to its contest.
    """
    path = directory / "problems.jsonl"
    known, seen = {contest.id: contest.problems for contest in contests}, set()
    rows = []
    for number, row in enumerate(read_rows(str(path)), start=1):
        where = f"{path}, row {number}"
        contest, index = _field(row, "contest", int, where), _field(row, "index", str, where)
        if contest not in known:
            fix = "add the contest's folder, or remove the row"
            raise UserError(f"there is no folder contests/{contest}", where=where, fix=fix)
        if index not in known[contest]:
            fix = f"its problems are {', '.join(known[contest])}"
            raise UserError(f"contest {contest} has no problem {index!r}", where=where, fix=fix)
        if (contest, index) in seen:
            raise UserError(f"problem {contest}{index} is given twice", where=where, fix="keep one of the rows")
        seen.add((contest, index))
        tests = _field(row, "tests", list, where)
        for test in tests:
            _field(test, "input", str, f"{where}, tests"), _field(test, "output", str, f"{where}, tests")
        if not tests:
            raise UserError("the problem has no tests", where=where, fix="add tests, or remove the row")
        others = {name: value for name, value in row.items() if name != "statement"}
        rows.append({**others, "prompt": _field(row, "statement", str, where)})
    if not rows:
        raise UserError("no problem is here", where=str(path), fix="write one problem a line")
    return rows


def _read_contest(folder: Path) -> Contest:
    standings = _read_answer(folder / "standings.json", dict, "contest.standings")
    changes = _read_answer(folder / "ratings.json", list, "contest.ratingChanges")
    where, rated = str(folder / "standings.json"), str(folder / "ratings.json")
    ratings = {_field(change, "handle", str, rated): _field(change, "oldRating", float, rated) for change in changes}
    problems = _field(standings, "problems", list, where)
    rows = {
        handle: row
        for row in _field(standings, "rows", list, where)
        if (handle := _handle(row, where)) is not None and handle in ratings
    }
    if not rows:
        fix = "save the contest's whole answers: of a rated contest that is over"
        raise UserError(f"none of the {len(ratings)} humans of ratings.json has a row", where=where, fix=fix)
    results = [_field(row, "problemResults", list, where) for row in rows.values()]
    if odd := next((own for own in results if len(own) != len(problems)), None):
        fix = "save the API's whole answer"
        raise UserError(f"a row has {len(odd)} problemResults for {len(problems)} problems", where=where, fix=fix)
    return Contest(
        id=int(folder.name),
        name=_field(_field(standings, "contest", dict, where), "name", str, where),
        problems=tuple(_field(problem, "index", str, where) for problem in problems),
        max_points=np.array(
            [_field(problem, "points", float, where) if "points" in problem else math.nan for problem in problems]
        ),
        ratings=np.array([ratings[handle] for handle in rows]),
        solved=np.array([[_field(result, "points", float, where) > 0 for result in own] for own in results]),
        wrong_tries=np.array(
            [[_field(result, "rejectedAttemptCount", int, where) for result in own] for own in results]
        ),
    )


def _handle(row: Any, where: str) -> str | None:
    """Of who took part officially and alone; None of virtual participants, of those out of competition and of teams."""
    party = _field(row, "party", dict, where)
    members = _field(party, "members", list, where)
    if _field(party, "participantType", str, where) != "CONTESTANT" or len(members) != 1:
        return None
    return _field(members[0], "handle", str, where)


def _read_answer(path: Path, kind: type[T], method: str) -> T:
    """What the API answered, with or without the envelope of `status` and `result`."""
    fix = f"save the answer of the API's method {method} there"
    try:
        answer = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"it cannot be read: {error}", where=str(path), fix=fix) from None
    if isinstance(answer, dict) and "status" in answer:
        if answer["status"] != "OK":
            raise UserError(f"the API answered {answer['status']}: {answer.get('comment')}", where=str(path), fix=fix)
        answer = answer.get("result")
    if not isinstance(answer, kind):
        raise UserError(f"the answer is not {_KINDS[kind]}", where=str(path), fix=fix)
    return answer


def _field(row: Any, name: str, kind: type[T], where: str) -> T:
    """The value of a name, of that kind: an integer is a number, too."""
    if not isinstance(row, Mapping):
        raise UserError(f"{row!r} is not an object with {name!r}", where=where, fix=f"write {{{name!r}: …}}")
    if name not in row:
        fix = f"add {name!r}, {_KINDS[kind]}"
        raise UserError(f"{name!r} is missing: there are {', '.join(row) or 'no names'}", where=where, fix=fix)
    value = row[name]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"{name!r} is {value!r}, not {_KINDS[kind]}", where=where, fix=f"make it {_KINDS[kind]}")
    return value
