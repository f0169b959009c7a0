"""The run directory: what a run leaves on disk, written as it goes."""

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gspo.errors import RunError, UserError
from gspo.metrics.numbers import numbers
from gspo.model.policy import Policy
from gspo.recipe.load import dump_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.writable import writable
from gspo.run.checkpoint.files import clear, move_into_place, sha256
from gspo.run.json_lines import read_json_lines, rollout_files
from gspo.run.lock import Lock
from gspo.run.plain_files import for_writing, is_unfinished, replace_text, sync

LOGS = ("metrics.jsonl", "cold_start.jsonl")  # they grow by a line a step; a checkpoint holds what they were


class RunDirectory:
    """Writes recipe, metrics, cold start, rollouts and final model of one run; locked against any other."""

    def __init__(self, path: Path, lock: Lock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, recipe: Recipe) -> "RunDirectory":
        """Make the recipe's directory; UserError where it exists, for a run never overwrites another."""
        check_absent(recipe)
        path = recipe.run_dir
        try:
            path.mkdir(parents=True, exist_ok=True)
            directory = cls(path, Lock(path))
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix="set output_dir") from None
        try:
            replace_text(path / "recipe.yaml", dump_recipe(recipe))
            sync(path.parent)
        except OSError as error:
            directory.close()
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), fix="set output_dir") from None
        return directory

    @classmethod
    def reopen(cls, path: Path) -> "RunDirectory":
        """Lock the directory of a run that is to be taken up."""
        return cls(path, Lock(path))

    def close(self) -> None:
        """Let another process have the directory."""
        self._lock.release()

    def check_lock(self) -> None:
        """RunError where another process has the directory after all, its lock having been removed."""
        self._lock.check()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints lie."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """Where the final model and tokenizer lie."""
        return self.path / "model"

    @property
    def reference(self) -> Path:
        """Where the reference model lies, if the policy's weights as RL began are that."""
        return self.path / "reference"

    @property
    def _rollouts(self) -> Path:
        return self.path / "rollouts"

    def append(self, file_name: str, line: Mapping[str, Any]) -> None:
        """Add one JSON line, whole or not at all to a reader; a number that is not finite is written as null."""
        path = self.path / file_name
        with self._writing(path), open(path, "a", encoding="utf-8", opener=for_writing) as file:
            file.write(_json(line))

    def write_rollouts(self, step: int, lines: Iterable[Mapping[str, Any]]) -> Path:
        """The step's file with a line a rollout; where it lies."""
        path = self._rollouts / f"step_{step:06d}.jsonl"
        with self._writing(path):
            path.parent.mkdir(exist_ok=True)
        with self._writing(path), open(path, "w", encoding="utf-8", opener=for_writing) as file:
            file.writelines(_json(line, separators=(",", ":")) for line in lines)
        return path

    def save_model(self, policy: Policy) -> None:
        """Write the final model, under its name only once it is whole."""
        unfinished, replaced = self.path / "unfinished_model", self.path / "replaced_model"
        with self._writing(self.model):
            for rest in (unfinished, replaced):
                clear(rest, ignore_errors=True)
            policy.save(unfinished)
            if os.path.lexists(self.model):  # of a run that has since been given more steps
                self.model.rename(replaced)
            unfinished.rename(self.model)
            clear(replaced, ignore_errors=True)

    def save_reference(self, policy: Policy) -> None:
        """Write the reference model, in place of what a beginning that no checkpoint knows has left."""
        unfinished = self.path / "unfinished_reference"
        with self._writing(self.reference):
            for rest in (unfinished, self.reference):
                clear(rest, ignore_errors=True)
            policy.save(unfinished)
            move_into_place(unfinished, self.reference)

    def rewrite_recipe(self, recipe: Recipe) -> None:
        """Replace recipe.yaml by the recipe that the run goes on with."""
        replace_text(self.path / "recipe.yaml", dump_recipe(recipe))

    def set_aside(self) -> Path | None:
        """Move metrics, cold start and rollouts out of the way of a new beginning; where to, if there were any."""
        found = [path for path in (*(self.path / name for name in LOGS), self._rollouts) if path.exists()]
        if not found:
            return None
        number = next(number for number in itertools.count(1) if not (self.path / f"set_aside_{number}").exists())
        target = self.path / f"set_aside_{number}"
        target.mkdir()
        for path in found:
            path.rename(target / path.name)
        return target

    def cut_back(self, *, steps: int, logs: Path) -> None:
        """Take metrics and cold start back to their copies in `logs`, and remove the rollouts of later steps."""
        for name in LOGS:
            if (logs / name).is_file():
                replace_text(self.path / name, (logs / name).read_text(encoding="utf-8"))
            else:
                (self.path / name).unlink(missing_ok=True)
        for step, path in rollout_files(self.path).items():
            if step > steps:
                path.unlink()

    def log_bytes(self) -> dict[str, int]:
        """How long metrics and cold start are by now."""
        return {name: (self.path / name).stat().st_size for name in LOGS if (self.path / name).exists()}

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, null read as NaN."""
        return [numbers(line) for line in read_json_lines(self.path / "metrics.jsonl")[0]]

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """RunError, naming the file, where it cannot be written or the directory is no longer this run's."""
        self.check_lock()
        try:
            yield
        except (OSError, SafetensorError) as error:
            fix = "make room or the directory writable"
            raise RunError(f"{path} could not be written: {error}\n  fix: {fix}") from error

    def damaged_rollouts(self, files: Mapping[str, Sequence[Any]]) -> list[str]:
        """The names of those rollout files that are missing, or not of the size and SHA-256 they had."""

        def is_whole(name: str, size: int, digest: str) -> bool:
            path = self._rollouts / name
            return path.is_file() and path.stat().st_size == size and sha256(path) == digest

        return [name for name, (size, digest) in files.items() if not is_whole(name, size, digest)]


def is_unused(directory: Path) -> bool:
    """Whether there is no more in it than what a run leaves that was killed as it began."""
    names = (entry.name for entry in directory.iterdir())
    return all(name == "lock" or is_unfinished(name, "recipe.yaml") for name in names)


def check_absent(recipe: Recipe) -> None:
    """UserError where the run's directory exists and is not empty."""
    path = recipe.run_dir
    if path.exists() and not (path.is_dir() and is_unused(path)):
        fix = "give this run another name=… or output_dir=…, or remove the directory"
        if (path / "recipe.yaml").is_file():
            fix = f"to go on with that run: {how_to_resume(recipe)}; else {fix}"
        raise UserError("this output directory exists, and a run never overwrites another", where=str(path), fix=fix)


def how_to_resume(recipe: Recipe) -> str:
    """What goes on with the run of a recipe."""
    if recipe.reward and (recipe.queries.path or recipe.queries.procedural):
        return f"gspo resume {recipe.run_dir}"
    return "gspo.train(recipe, queries=…, reward=…, resume=True)"


def _json(line: Mapping[str, Any], separators: tuple[str, str] | None = None) -> str:
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=separators)
    try:
        text = dump(dict(line))
        text.encode()
    except ValueError:  # a number that is not finite, or text without bytes: too rare to go through every line
        text = dump(writable(dict(line)))
    return text + "\n"
