"""Which step and query of a run are meant, found without reading more of its rollouts than it takes."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path

from gspo.errors import UserError, visible
from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, read_groups
from gspo.report.shapes import section
from gspo.run.plain_files import content_of

Groups = Mapping[str, Sequence[Sample]]

_NAMED = 5  # queries, where there are too many to name them all
_COMPARED = 10_000  # queries with one that is nowhere, from the last step backwards


@dataclass(frozen=True, kw_only=True)
class Found:
    """The responses to a query of a step, among those to the step's others."""

    step: int
    query: str
    groups: Groups


def find_group(run: RunFiles, step: int | None, query: str | None) -> Found:
    """The step, by default the last one there is, and its query, by default its first; UserError where it is not there.

    With a query alone, the step is the last that has it.
    """
    files = _files(run)
    if step is None:
        return _last(run, files, query)
    if step not in files:
        nearest = sorted(sorted(files, key=lambda other: abs(other - step))[:2])
        fix = f"name one that has, the nearest: {', '.join(map(str, nearest))}"
        raise UserError(f"step {step} has no rollouts", where=str(run.path / "rollouts"), fix=fix)
    groups = read_groups(files[step])
    if not groups:
        raise _not_written(run, files[step])
    if query is not None and query not in groups:
        fix = f"name one of {_some(query, list(groups))}"
        if steps := steps_with(run, query):
            fix = f"{in_words(steps)} it; or {fix}"
        raise UserError(f"step {step} has no query {visible(query)}", where=str(files[step]), fix=fix)
    return Found(step=step, query=next(iter(groups)) if query is None else query, groups=groups)


def _last(run: RunFiles, files: Mapping[int, Path], query: str | None) -> Found:
    for step in reversed(list(files)):
        groups = read_groups(files[step]) if query is None or _has(files[step], query) else {}
        if groups and (query is None or query in groups):
            return Found(step=step, query=next(iter(groups)) if query is None else query, groups=groups)
    if query is None:
        raise _not_written(run, run.path / "rollouts")
    ids = dict.fromkeys(islice(chain.from_iterable(_ids(files[step]) for step in reversed(list(files))), _COMPARED))
    fix = f"name one of {_some(query, list(ids))}" if ids else None
    raise UserError(f"no step has the query {visible(query)}", where=str(run.path / "rollouts"), fix=fix)


def _files(run: RunFiles) -> Mapping[int, Path]:
    """The run's rollouts by step; UserError where it has none."""
    files = run.rollout_files
    if files:
        return files
    resume = f"gspo resume {shlex.quote(str(run.path))}"
    if section(run.recipe, "report").get("rollouts") is False:
        fix = f"{resume} report.rollouts=true writes those of the steps to come"
        raise UserError("this run writes no rollouts: report.rollouts is false", where=str(run.path), fix=fix)
    fix = "wait for the end of its first step" if run.state in ("running", "unknown") else f"go on with it: {resume}"
    raise UserError("this run has no rollouts yet", where=str(run.path), fix=fix)


def _not_written(run: RunFiles, where: Path) -> UserError:
    fix = "wait for the end of the step" if run.state in ("running", "unknown") else "name another step, if there is"
    return UserError("no response is written whole in it", where=str(where), fix=fix)


def _some(query: str, ids: Sequence[str]) -> str:
    """Up to five of the ids, those spelt like the query first."""
    near = get_close_matches(query, ids, n=_NAMED)
    return some([*near, *(other for other in ids if other not in near)])


def some(ids: Sequence[str]) -> str:
    """The first five."""
    return ", ".join([*map(visible, ids[:_NAMED]), *(["…"] if len(ids) > _NAMED else [])])


def in_words(steps: Sequence[int]) -> str:
    """`step 3 has`, `steps 1, 2, 3 have`; of very many the last ones."""
    left_out = f"{len(steps)} steps, the last of them " if len(steps) > 4 * _NAMED else ""
    named = ", ".join(map(str, steps[-4 * _NAMED :]))
    return f"step {named} has" if len(steps) == 1 else f"{left_out or 'steps '}{named} have"


def steps_with(run: RunFiles, query: str) -> list[int]:
    """The steps that have a response to the query."""
    return [step for step, path in run.rollout_files.items() if _has(path, query)]


def _has(path: Path, query: str) -> bool:
    """Whether a response of the file is one to the query: its bytes are searched, for to read every line takes long."""
    name = json.dumps(query, ensure_ascii=False).encode("utf-8", "backslashreplace")
    content = b"\n" + _whole_lines(path)  # a line begins with it: a column may be called query, too
    return any(content.find(b'\n{"query":' + space + name) >= 0 for space in (b"", b" "))


def _ids(path: Path) -> Iterator[str]:
    for match in re.finditer(rb'^\{"query": ?("(?:[^"\\]|\\.)*")', _whole_lines(path), re.MULTILINE):
        with suppress(ValueError):  # what is quoted may be no text of JSON's all the same
            yield json.loads(match[1])


def _whole_lines(path: Path) -> bytes:
    """A file without the line that is still being written; empty where a resumed run has just removed it."""
    content = content_of(path)
    return content[: content.rfind(b"\n") + 1]
