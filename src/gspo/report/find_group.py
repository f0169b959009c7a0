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
    found = _most_to_see(files, steps) if query is None else _with_query(files, steps, query)
    if found is None:
        raise _not_there(run, files, step, query)
    return found


def _most_to_see(files: Mapping[int, Path], steps: Sequence[int]) -> Group | None:
    """Of the first few of these steps that have responses, the first group that shows most."""
    there = ((step, groups) for step in steps if (groups := read_groups(files[step])))
    best, most = None, -1
    for step, groups in islice(there, _LOOKED_THROUGH):
        query = max(groups, key=lambda name: interest(groups[name]))
        if (worth := min(2, interest(groups[query]))) > most:
            best, most = Group(step=step, query=query, groups=groups), worth
        if most == 2:
            break
    return best


def _with_query(files: Mapping[int, Path], steps: Sequence[int], query: str) -> Group | None:
    """The first of these steps that has the query, or one whose id alone ends so; UserError where several do."""
    for step in steps:
        ids = queries_in(files[step])
        named = [query] if query in ids else [name for name in ids if name.endswith(f":{query}")]
        if len(named) > 1:
            fix = f"name one of {first_of(named)}"
            raise UserError(f"several queries end with {visible(query)}", where=str(files[step]), fix=fix)
        if named and named[0] in (groups := read_groups(files[step])):
            return Group(step=step, query=named[0], groups=groups)
    return None


def _not_there(run: RunFiles, files: dict[int, Path], step: int | None, query: str | None) -> UserError:
    where = run.path / "rollouts" if step is None else files[step]
    steps = reversed(files) if step is None else [step]
    ids = list(islice(dict.fromkeys(name for other in steps for name in queries_in(files[other])), _COMPARED))
    if query is None or not ids:
        is_going_on = run.state in ("running", "unknown")
        fix = "wait for the end of the step" if is_going_on else "name another step, if there is"
        return UserError("no response is written whole in it", where=str(where), fix=fix)
    fix = f"name one of {first_of(list(dict.fromkeys([*get_close_matches(query, ids, n=_NAMED), *ids])))}"
    if step is not None and (having := steps_with(run, query, but=step)):
        fix = f"{in_words(having)} it; or {fix}"
    what = "no step has the query" if step is None else f"step {step} has no query"
    return UserError(f"{what} {visible(query)}", where=str(where), fix=fix)


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


def steps_with(run: RunFiles, query: str, *, but: int) -> list[int]:
    """The other steps that have a response to the query."""
    return [step for step, path in run.rollout_files.items() if step != but and query in queries_in(path)]


def queries_in(path: Path) -> Sequence[str]:
    """The ids in a file, but for a line that is being written: its bytes are searched, which is faster than reading."""
    content, ids = content_of(path), dict[str, None]()
    for quoted in dict.fromkeys(_ID.findall(content[: content.rfind(b"\n") + 1])):
        with suppress(ValueError):  # what is quoted may be no text of JSON
            ids[json.loads(quoted)] = None
    return list(ids)
