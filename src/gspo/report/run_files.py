"""What a run has left on the disk so far, read without its lock, whether it still runs, has ended or was killed."""

import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from gspo.errors import UserError, listed, writable
from gspo.metrics.numbers import numbers
from gspo.recipe.yaml_text import read_yaml
from gspo.run.lock import is_locked
from gspo.run.plain_files import parsed, read_json_lines, rollout_files

Waiting = Callable[[str], AbstractContextManager[object]]  # a block whose name is shown once it takes seconds
State = Literal["running", "finished", "stopped", "interrupted", "failed", "killed", "unknown"]
LAST = sys.maxsize  # the number of a step after all others
_NUM_TABLES, _NUM_ROWS = 20, 8  # of a run, and of a table
_COLUMNS = ("query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason")
Table = list[Mapping[str, Any]]  # its rows, all with the same columns


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """A run as it is on the disk."""

    path: Path
    recipe: Mapping[str, Any]  # as YAML has it: that of another version of gspo is read, too
    lines: Sequence[Mapping[str, Any]]  # metrics.jsonl, a line a step, NaN for null; step 0: before training
    cold_start: Sequence[Mapping[str, Any]]
    history: Sequence[Mapping[str, Any]]  # begun, resumed, ended
    state: State
    notes: Sequence[str]  # what could not be read

    @property
    def name(self) -> str:
        """The recipe's."""
        return str(self.recipe["name"])

    @property
    def project(self) -> str:
        """The project of trackio and wandb."""
        return str(section(self.recipe, "report").get("project", "gspo"))

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """The lines of steps of reinforcement learning."""
        return [line for line in self.lines if line["step"] > 0]

    @property
    def num_steps(self) -> int:
        """Return how many are done."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def rollout_files(self) -> Mapping[int, Path]:
        """The files of responses, by step."""
        return rollout_files(self.path)

    def last(self, *events: str) -> Mapping[str, Any]:
        """The last line of the history of these kinds; empty where there is none."""
        return next((line for line in reversed(self.history) if line["event"] in events), {})


def read_run(path: Path) -> RunFiles:
    """Read a run's directory; UserError where there is none, or another thing's."""
    recipe = _recipe(path)
    lines, num_bad_lines = read_json_lines(path / "metrics.jsonl")
    history, num_bad_events = read_json_lines(path / "history.jsonl")
    cold_start, _ = read_json_lines(path / "cold_start.jsonl")
    by_step = {line["step"]: numbers(line) for line in lines}
    not_read = {"metrics.jsonl": num_bad_lines, "history.jsonl": num_bad_events}
    return RunFiles(
        path=path,
        recipe=recipe,
        lines=[by_step[step] for step in sorted(by_step)],
        cold_start=[numbers(line) for line in cold_start],
        history=history,
        state=_state_of(path, history),
        notes=[f"{number} line(s) of {name} could not be read" for name, number in not_read.items() if number],
    )


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where that of another version has something else there, or nothing."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """The name of each run; of runs that share a name the path."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def runs_in(path: Path) -> list[str]:
    """The runs' directories in a directory."""
    return sorted(str(entry.parent) for entry in path.glob("*/recipe.yaml")) if os.path.lexists(path) else []


def lines_up_to(path: Path, announced: Iterable[int]) -> Iterator[Mapping[str, Any]]:
    """The lines of a run's metrics.jsonl up to each step that is announced, and with LAST to the end of the file.

    A step is announced when all of its files are written. Each line is read once; the whole file is never in memory.
    """
    place = 0
    for last in announced:
        with suppress(FileNotFoundError), (path / "metrics.jsonl").open("rb") as file:
            file.seek(place)
            for text in file:
                line = parsed(text)
                if not text.endswith(b"\n") or (line and line["step"] > last):
                    break  # still being written
                place += len(text)
                if line:
                    yield line
        if last == LAST:
            return


def table_of(run: RunFiles, step: int) -> Table:
    """The first responses of a step, for about 20 steps evenly spread, the last among them; none for the others."""
    steps, path = run.recipe["steps"], run.rollout_files.get(step)
    if not path or step * _NUM_TABLES // steps == (step - 1) * _NUM_TABLES // steps:
        return []
    with path.open("rb") as file:
        samples = [sample for line in islice(file, _NUM_ROWS) if (sample := parsed(line))]
    return [writable({column: sample[column] for column in _COLUMNS}) for sample in samples]


def _recipe(path: Path) -> Mapping[str, Any]:
    file, is_there = path / "recipe.yaml", os.path.lexists(path)  # False, not an error, where no such name can be
    near = runs_in(path if is_there else path.parent)
    fix = f"there are: {listed(near)}" if near else "name the directory that a run has made, such as runs/arithmetic"
    if is_there and (path.is_file() or (path / "manifest.json").is_file()):
        runs = [f"name the run: {parent}" for parent in path.parents if (parent / "recipe.yaml").is_file()]
        raise UserError("this is a file or a checkpoint, not a run's directory", where=str(path), fix=[*runs, fix][0])
    if not is_there or not file.is_file():
        what = "this is not a run's directory: it has no recipe.yaml" if is_there else "no such directory"
        raise UserError(what, where=str(path), fix=fix)
    recipe = read_yaml(file.read_text(encoding="utf-8"), where=str(file))
    if not (isinstance(recipe, dict) and {"name", "steps", "model"} <= recipe.keys()):
        raise UserError("this is no recipe of a run: it has no name, steps and model", where=str(file), fix=fix)
    return recipe


def _state_of(path: Path, history: Sequence[Mapping[str, Any]]) -> State:
    """Return what the last line of a run's history, and the lock that a process holds while it goes on, say of it."""
    if not history:
        return "unknown"
    last: Mapping[str, Any] = history[-1]
    if last["event"] == "ended":
        return last["how"]
    if is_locked(path):
        return "running"
    return "killed" if last["host"] == socket.gethostname() else "unknown"
