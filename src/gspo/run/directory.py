"""The run directory: what a run leaves on disk, written as it goes."""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from gspo.errors import RunError, writable, writing
from gspo.metrics.numbers import numbers
from gspo.model.policy import Policy
from gspo.recipe.load import dump_recipe
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.store import CHECKPOINTS, COLD_CHECKPOINTS, COLD_START, RECIPE, move_into_place
from gspo.run.lock import Lock
from gspo.run.place import check_place
from gspo.run.plain_files import FOLDERS, ROLLOUTS, clear, read_json_lines, replace_text, rollout_files, sync
from gspo.run.progress import Best

LOGS = ("metrics.jsonl", "cold_start.jsonl")  # they grow by a line a step; a checkpoint holds what they were


class RunDirectory:
    """A writer of one run's recipe, logs, rollouts and models; locked against any other process until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.cold_checkpoints = path / CHECKPOINTS, path / COLD_CHECKPOINTS
        self.cold_start = path / COLD_START
        self.model = path / "model"  # the final one
        self.best_model = path / "best_model"  # by checkpoint.best
        self.recipe_text = ""
        self._sizes = dict[str, int]()  # of the logs, as they were left
        lock = Lock(path)
        self.close, self.check_lock = lock.release, lock.check

    @classmethod
    def create(cls, recipe: Recipe) -> "RunDirectory":
        """Make the recipe's directory; UserError where it exists."""
        check_place(recipe)
        path = recipe.run_dir
        with writing(path, fix="set output_dir to a directory that can be made and written to"):
            path.mkdir(parents=True, exist_ok=True)
            directory = cls(path)
            directory.write_recipe(recipe)
            sync(path.parent)
        return directory

    def write_recipe(self, recipe: Recipe) -> None:
        """Write recipe.yaml, or replace it by the recipe that the run goes on with."""
        self.recipe_text = dump_recipe(recipe)
        replace_text(self.path / RECIPE, self.recipe_text)

    def append(self, file_name: str, line: Mapping[str, Any]) -> None:
        """Add one JSON line, whole or not at all to a reader; a number that is not finite is written as null.

        What a process that was killed as it wrote has left of a line becomes a line of its own.
        """
        path = self.path / file_name
        self.log_bytes()
        with self._writing(path), path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
            file.write(b"\n" * (file.read(1) not in (b"", b"\n")) + _json(line).encode())
            self._sizes[file_name] = file.tell()

    def write_rollouts(self, step: int, lines: Iterable[Mapping[str, Any]], *, folder: str = ROLLOUTS) -> Path:
        """Write the step's file, a line for each response; return where it lies."""
        path = self.path / folder / f"step_{step:06d}.jsonl"
        with self._writing(path):
            path.parent.mkdir(exist_ok=True)
            with path.open("w", encoding="utf-8") as file:
                file.writelines(_json(line, separators=(",", ":")) for line in lines)
            sync(path)  # before a checkpoint says that there is this step
            sync(path.parent)
        return path

    def save_model(self, policy: Policy, weights: Mapping[str, Tensor] | None) -> None:
        """Write the final model, under its name only once it is whole; without weights, with the policy's own."""
        with self._replacing(self.model) as unfinished:  # there is one if the run has since been given more steps
            policy.save(unfinished, weights)

    def save_best(self, model: Path, best: Best) -> None:
        """Make best_model/ a copy of a checkpoint's model, with best.json in it, unless it is that already."""
        about = self.best_model / "best.json"
        if about.exists() and json.loads(about.read_text(encoding="utf-8")) == vars(best):
            return
        with self._replacing(self.best_model) as unfinished:
            shutil.copytree(model, unfinished)
            (unfinished / "best.json").write_text(json.dumps(vars(best)), encoding="utf-8")
            for path in (*unfinished.rglob("*"), unfinished):
                sync(path)
        sync(self.path)

    @contextmanager
    def _replacing(self, final: Path) -> Iterator[Path]:
        """A directory for the block to write, which takes the place of the final one only once it is whole."""
        unfinished, replaced = final.with_name(f"unfinished_{final.name}"), final.with_name(f"replaced_{final.name}")
        with self._writing(final):
            clear(unfinished)
            yield unfinished
            if final.exists():  # else a kill has left the one before as `replaced`, and it stays until now
                clear(replaced)
                final.rename(replaced)
            unfinished.rename(final)
            clear(replaced)

    def finish_cold_start(self, checkpoint: Path) -> None:
        """Make the last checkpoint of the cold start what that ends with, and remove the others."""
        with self._writing(self.cold_start):
            move_into_place(checkpoint, self.cold_start)
            shutil.rmtree(self.cold_checkpoints)

    def cut_back(self, checkpoint: Path | None) -> Path | None:
        """Take the logs back to their copies in a checkpoint, and samples to its steps; None: back to the start.

        What it has no copy of is set aside, and not lost: where to, if there was anything.
        """
        self._sizes.clear()
        copies = {name: checkpoint / name for name in LOGS if checkpoint is not None and (checkpoint / name).is_file()}
        for name, copy in copies.items():
            replace_text(self.path / name, copy.read_text(encoding="utf-8"))
        later = [self.path / name for name in LOGS if name not in copies]
        if LOGS[0] in copies:
            steps = [line["step"] for line in self.metrics()]
            for step, path in [file for folder in FOLDERS for file in rollout_files(self.path, folder).items()]:
                if step > max(steps, default=0):
                    path.unlink()
        else:
            later += [self.path / folder for folder in FOLDERS]
        if not (later := [path for path in later if path.exists()]):
            return None
        number = next(number for number in itertools.count(1) if not (self.path / f"set_aside_{number}").exists())
        aside = self.path / f"set_aside_{number}"
        aside.mkdir()
        for path in later:
            path.rename(aside / path.name)
        return aside

    def log_bytes(self) -> dict[str, int]:
        """Return how long metrics and cold start are by now; RunError where one is shorter than it was left."""
        sizes = {name: (self.path / name).stat().st_size for name in LOGS if (self.path / name).exists()}
        if lost := [name for name in LOGS if sizes.get(name, 0) < self._sizes.get(name, 0)]:
            self.check_lock()  # with its directory, perhaps
            fix = "gspo resume goes on from the newest checkpoint, and restores it"
            what = "was removed, or has lost lines: nothing more is written"
            raise RunError(f"{self.path / lost[0]} {what}\n  fix: {fix}")
        return sizes

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, null read as NaN."""
        return [numbers(line) for line in read_json_lines(self.path / LOGS[0])[0]]

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        """RunError, naming the file, where it cannot be written or the directory is no longer this run's."""
        self.check_lock()
        try:
            yield
        except (OSError, SafetensorError) as error:
            fix = "make room or the directory writable"
            raise RunError(f"{path} could not be written: {error}\n  fix: {fix}") from error


def _json(line: Mapping[str, Any], separators: tuple[str, str] | None = None) -> str:
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False, separators=separators)
    try:
        (text := dump(dict(line)) + "\n").encode()
    except ValueError:  # a number that is not finite, or text without bytes: too rare to go through every line
        return dump(writable(dict(line))) + "\n"
    return text
