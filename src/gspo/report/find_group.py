"""Which step and query of a run are meant, without reading more of its rollouts than that takes."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from gspo.errors import UserError, did_you_mean, listed, visible
from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, interest, read_groups
from gspo.run.plain_files import content_of

_LOOKED_THROUGH = 10  # steps, for a group that shows something
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
    files = run.rollout_files
    if not files:
        fix = "wait for the end of its first step, or resume it with report.rollouts=true"
        raise UserError("this run has no rollouts yet", where=str(run.path), fix=fix)
    if step is not None and step not in files:
        fix = f"name one that has, such as {min(files, key=lambda other: abs(other - step))}"
        raise UserError(f"step {step} has no rollouts", where=str(run.path / "rollouts"), fix=fix)
    steps = sorted(files, reverse=True) if step is None else [step]
    found = _most_to_see(files, steps) if query is None else _with_query(files, steps, query)
    if found is not None:
        return found
    where, ids = str(files[steps[0]]), next(filter(None, (queries_in(files[number]) for number in steps)), [])
    if query is None or not ids:
        raise UserError("no response is written whole in it", where=where, fix="wait for the end of the step")
    what = "no step has the query" if step is None else f"step {step} has no query"
    fix = visible(did_you_mean(query, ids, f"name one of {named(ids)}"))
    raise UserError(f"{what} {visible(query)}", where=where, fix=fix)


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
        meant = [query] if query in ids else [name for name in ids if name.endswith(f":{query}")]
        if len(meant) > 1:
            fix = f"name one of {named(meant)}"
            raise UserError(f"several queries end with {visible(query)}", where=str(files[step]), fix=fix)
        if meant and meant[0] in (groups := read_groups(files[step])):
            return Group(step=step, query=meant[0], groups=groups)
    return None


def named(ids: Sequence[str]) -> str:
    """The first five."""
    return listed([*map(visible, ids)], 5)


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
