"""What a run has left on the disk so far, read without its lock, whether it still runs, has ended or was killed."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

from gspo.errors import UserError, listed
from gspo.metrics.numbers import numbers
from gspo.recipe.yaml_text import read_yaml
from gspo.run.lock import is_locked
from gspo.run.plain_files import read_json_lines, read_plain, rollout_files

Waiting = Callable[[str], AbstractContextManager[object]]  # a block whose name is shown once it takes seconds
State = Literal["running", "finished", "stopped", "interrupted", "failed", "killed", "unknown"]

_LARGEST_WHOLE = 2**53  # that every reader of JSON has exactly
_NAME_A_RUN = "name the directory that a run has made, such as runs/arithmetic"


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
        return str(self.recipe.get("name", self.path.name))

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
        """How many are done."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def rollout_files(self) -> Mapping[int, Path]:
        """By step."""
        return rollout_files(self.path)

    def last(self, *events: str) -> Mapping[str, Any]:
        """The last line of the history of these kinds; empty where there is none."""
        return next((line for line in reversed(self.history) if line.get("event") in events), {})


def read_run(path: Path) -> RunFiles:
    """Read a run's directory; UserError where there is none, or another thing's."""
    recipe = _recipe(path)
    lines, num_bad_lines = read_json_lines(path / "metrics.jsonl")
    of_steps = [line for line in lines if is_step(line.get("step"))]
    by_step = {line["step"]: numbers(line) for line in of_steps}
    history, num_bad_events = read_json_lines(path / "history.jsonl")
    cold_start, _ = read_json_lines(path / "cold_start.jsonl")
    not_read = {
        "line(s) of metrics.jsonl could not be read": num_bad_lines + len(lines) - len(of_steps),
        "line(s) of history.jsonl could not be read": num_bad_events,
    }
    return RunFiles(
        path=path,
        recipe=recipe,
        lines=[by_step[step] for step in sorted(by_step)],
        cold_start=[numbers(line) for line in cold_start],
        history=history,
        state=state_of(path, history),
        notes=[f"{number} {what}" for what, number in not_read.items() if number],
    )


def is_step(value: Any) -> TypeGuard[int]:
    """Whether it numbers a step."""
    return type(value) is int and 0 <= value <= _LARGEST_WHOLE


def section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A section of a recipe; empty where that of another version has something else there, or nothing."""
    value = tree.get(name)
    return value if isinstance(value, Mapping) else {}


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """The name of each run; of runs that share a name the path."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.path) for run in runs]


def _recipe(path: Path) -> Mapping[str, Any]:
    file = path / "recipe.yaml"
    if not os.path.lexists(path):  # False, not an error, where no such name can be
        near = runs_in(path.parent)
        fix = f"there are: {listed(near)}" if near else _NAME_A_RUN
        raise UserError("no such directory", where=str(path), fix=fix)
    if path.is_file() or (path / "manifest.json").is_file():
        what = "this is a file, not a run's directory" if path.is_file() else "this is a checkpoint, not a run"
        runs = [parent for parent in path.parents if (parent / "recipe.yaml").is_file()]
        fix = f"name the run: {runs[0]}" if runs else f"name the directory of its run, such as runs/{path.stem}"
        raise UserError(what, where=str(path), fix=fix)
    try:
        tree = read_yaml(read_plain(file).decode(), where=str(file))
    except FileNotFoundError:
        near = runs_in(path)
        fix = f"name the runs in it: {listed(near)}" if near else _NAME_A_RUN
        raise UserError("this is not a run's directory: it has no recipe.yaml", where=str(path), fix=fix) from None
    except (OSError, UnicodeDecodeError, UserError) as error:
        why = error.what if isinstance(error, UserError) else " ".join(str(error).split())
        raise UserError(f"cannot be read: {why}", where=str(file), fix="copy it from a checkpoint") from None
    if not (isinstance(tree, dict) and {"name", "steps", "model"} <= tree.keys()):
        raise UserError("this is no recipe of a run: it has no name, steps and model", where=str(file), fix=_NAME_A_RUN)
    return tree


def runs_in(path: Path) -> list[str]:
    """The runs' directories in a directory."""
    return sorted(str(entry.parent) for entry in path.glob("*/recipe.yaml")) if os.path.lexists(path) else []


def state_of(path: Path, history: Sequence[Mapping[str, Any]]) -> State:
    """What the last line of a run's history, and the lock that a process holds while it goes on, say of it."""
    last = history[-1] if history else {}
    if last.get("event") == "ended" and last.get("how") in ("finished", "stopped", "interrupted", "failed"):
        return last["how"]
    if last.get("event") not in ("begun", "resumed"):
        return "unknown"
    if is_locked(path):
        return "running"
    return "killed" if last.get("host") == socket.gethostname() else "unknown"
