"""Which step and query of a run are meant, without reading more of its rollouts than that takes."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from gspo.errors import UserError, visible
from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, interest, read_groups
from gspo.report.shapes import section
from gspo.run.plain_files import content_of

_NAMED = 5  # queries, where there are too many to name them all
_LOOKED_THROUGH = 10  # steps, for a group that shows something
_COMPARED = 10_000  # queries with one that is nowhere, from the last step backwards
_ID = re.compile(rb'^\{"query": ?("(?:[^"\\]|\\.)*")', re.MULTILINE)  # a line begins with it


@dataclass(frozen=True, kw_only=True)
class Group:
    """The responses to a query of a step, among those to the step's other queries."""

    step: int
    query: str
    groups: Mapping[str, Sequence[Sample]]


def find_group(run: RunFiles, step: int | None, query: str | None) -> Group:
    """The step, by default the last one that has the query, and its query, by default one that shows most of learning.

    The end of a query's id names it, such as `3` for `prompts.jsonl:3`, where one id of the step alone ends so.
    Raises UserError where there is no such group.
    """
    files = _files(run)
    if step is not None and step not in files:
        nearest = sorted(sorted(files, key=lambda other: abs(other - step))[:2])
        fix = f"name one that has, the nearest: {', '.join(map(str, nearest))}"
        raise UserError(f"step {step} has no rollouts", where=str(run.path / "rollouts"), fix=fix)
    steps = list(reversed(files)) if step is None else [step]
    if query is None and (best := _most_to_see(files, steps)):
        return best
    for number in steps:
        meant = None if query is None else _meant(query, queries_in(files[number]), where=files[number])
        if meant and meant in (groups := read_groups(files[number])):
            return Group(step=number, query=meant, groups=groups)
    if query is None or (step is not None and not queries_in(files[step])):
        fix = (
            "wait for the end of the step" if run.state in ("running", "unknown") else "name another step, if there is"
        )
        where = run.path / "rollouts" if step is None else files[step]
        raise UserError("no response is written whole in it", where=str(where), fix=fix)
    raise _no_query(run, files, step, query)


def _most_to_see(files: Mapping[int, Path], steps: Sequence[int]) -> Group | None:
    """Of the first few of these steps that have responses, the first group that shows most."""
    best, most = None, -1
    there = ((step, groups) for step in steps if (groups := read_groups(files[step])))
    for step, groups in islice(there, _LOOKED_THROUGH):
        query = max(groups, key=lambda name: interest(groups[name]))
        if (worth := min(2, interest(groups[query]))) > most:
            best, most = Group(step=step, query=query, groups=groups), worth
        if most == 2:
            break
    return best


def _meant(query: str, ids: Sequence[str], where: Path) -> str | None:
    """The id that a name stands for; None where there is none, UserError where there are several."""
    named = [query] if query in ids else [name for name in ids if name.endswith(f":{query}")]
    if len(named) > 1:
        fix = f"name one of {first_of(named)}"
        raise UserError(f"several queries end with {visible(query)}", where=str(where), fix=fix)
    return named[0] if named else None


def _no_query(run: RunFiles, files: Mapping[int, Path], step: int | None, query: str) -> UserError:
    searched = list(files.values())[::-1] if step is None else [files[step]]
    ids = list(islice(dict.fromkeys(name for path in searched for name in queries_in(path)), _COMPARED))
    near = get_close_matches(query, ids, n=_NAMED)
    fix = f"name one of {first_of([*near, *(other for other in ids if other not in near)])}" if ids else None
    if step is None:
        return UserError(f"no step has the query {visible(query)}", where=str(run.path / "rollouts"), fix=fix)
    if steps := steps_with(run, query):
        fix = f"{in_words(steps)} it; or {fix}"
    return UserError(f"step {step} has no query {visible(query)}", where=str(files[step]), fix=fix)


def _files(run: RunFiles) -> dict[int, Path]:
    """The run's rollouts by step; UserError where it has none."""
    if run.rollout_files:
        return dict(run.rollout_files)
    resume = f"gspo resume {shlex.quote(str(run.path))}"
    if section(run.recipe, "report").get("rollouts") is False:
        fix = f"{resume} report.rollouts=true writes those of the steps to come"
        raise UserError("this run writes no rollouts: report.rollouts is false", where=str(run.path), fix=fix)
    fix = "wait for the end of its first step" if run.state in ("running", "unknown") else f"go on with it: {resume}"
    raise UserError("this run has no rollouts yet", where=str(run.path), fix=fix)


def first_of(ids: Sequence[str]) -> str:
    """The first five."""
    return ", ".join([*map(visible, ids[:_NAMED]), *(["…"] if len(ids) > _NAMED else [])])


def in_words(steps: Sequence[int]) -> str:
    """`step 3 has`, `steps 1, 2, 3 have`; of very many the last ones."""
    left_out = f"{len(steps)} steps, the last of them " if len(steps) > 4 * _NAMED else ""
    named = ", ".join(map(str, steps[-4 * _NAMED :]))
    return f"step {named} has" if len(steps) == 1 else f"{left_out or 'steps '}{named} have"


def steps_with(run: RunFiles, query: str) -> list[int]:
    """The steps that have a response to the query."""
    return [step for step, path in run.rollout_files.items() if query in queries_in(path)]


def queries_in(path: Path) -> Sequence[str]:
    """The ids in a file, but for a line that is being written: its bytes are searched, which is faster than reading."""
    content, ids = content_of(path), dict[str, None]()
    for quoted in dict.fromkeys(_ID.findall(content[: content.rfind(b"\n") + 1])):
        with suppress(ValueError):  # what is quoted may be no text of JSON
            ids[json.loads(quoted)] = None
    return list(ids)
