"""Taking up a run that has ended before its time: what may be taken up, and putting everything back."""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

from gspo.checkpoint.changes import changes
from gspo.checkpoint.codec import decode
from gspo.checkpoint.environment import differences, environment
from gspo.checkpoint.snapshot import RECIPE, STATE, TENSORS, digest_of
from gspo.checkpoint.store import Found, Store
from gspo.config import Recipe
from gspo.config_file import dump_recipe
from gspo.errors import UserError
from gspo.policy.model import Policy
from gspo.progress import Progress
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet
from gspo.records import Query
from gspo.report.run_directory import RunDirectory

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what an object says of itself: another in every process
Note = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint read back, its tensors and records not yet put in place."""

    found: Found
    progress: Any  # as JSON
    tensors: Mapping[str, Tensor]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.found.path

    @property
    def about(self) -> Mapping[str, Any]:
        """What its manifest says."""
        return self.found.content

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors under `name/`."""
        return {key.partition("/")[2]: t for key, t in self.tensors.items() if key.startswith(f"{name}/")}


def reopen(recipe: Recipe, note: Note) -> tuple[RunDirectory, Saved | None] | None:
    """Lock the recipe's directory and read its newest whole checkpoint; None where there is nothing to take up.

    Nothing is changed yet. Raises UserError where the directory is no run's, another process has it, no checkpoint is
    whole, or the recipe differs in what may not change.
    """
    path = recipe.run_dir
    if not path.is_dir() or not any(path.iterdir()):
        note(f"nothing to resume in {path}: from the start")
        return None
    if not (path / RECIPE).is_file():
        mend = "name the directory that a run has made, the one with recipe.yaml in it"
        raise UserError("this is not a run's directory: it has no recipe.yaml", where=str(path), mend=mend)
    directory = RunDirectory.reopen(path)
    try:
        return directory, _newest(recipe, directory, note)
    except BaseException:
        directory.close()
        raise


def put_back(saved: Saved, policy: Policy, queries: QuerySet, note: Note) -> Progress:
    """The saved progress; UserError where data or weights are not the ones it was saved with."""
    if saved.about["tokens_sha256"] != tokens_digest(queries):
        mend = "restore the tokenizer as it was; " + new_run(saved.path)
        raise UserError("the tokenizer turns the queries into other tokens than it did", where="queries", mend=mend)
    if saved.about["weights_sha256"] != digest_of(policy.weights()):
        what = "the weights, once loaded, are not bit by bit those that were saved"
        mend = "install the saved versions of the libraries; "
        raise UserError(what, where=str(saved.path), mend=mend + json.dumps(saved.about["environment"]))
    for line in differences(saved.about["environment"], environment(policy)):
        note(f"NOT an exact resume: {line}. The run goes on, its numbers may differ in their last bits")
    progress = decode(saved.progress, saved.group("records"), _queries_by_id(queries))
    assert isinstance(progress, Progress)
    return progress


def take_over(directory: RunDirectory, recipe: Recipe, saved: Saved | None, note: Note) -> None:
    """Bring the directory back to where the checkpoint has it, all checks being passed; UserError where it cannot be.

    Where there is no checkpoint yet, back to the start.
    """
    try:
        Store(directory.checkpoints).tidy(None if saved is None else saved.found)
        directory.rewrite_recipe(recipe)
        steps = 0 if saved is None else saved.progress["steps"]
        directory.cut_back(steps=steps, logs=None if saved is None else saved.path)
    except OSError as error:
        where, mend = str(error.filename or directory.path), "make it writable"
        raise UserError(f"cannot be written: {error.strerror}", where=where, mend=mend) from None
    if saved is None:
        note(f"no checkpoint in {directory.checkpoints} yet: from the start")


def check_rows(saved: Saved, rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> None:
    """UserError where the data is not what the run was trained on so far."""
    if saved.about["rows_sha256"] != rows_digest(rows, pairs):
        mend = "restore the data as it was; " + new_run(saved.path)
        raise UserError("the queries are not those the run was trained on so far", where="queries", mend=mend)


def rows_digest(rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> str:
    """SHA-256 over ids, prompts and columns of all rows, trained on and held out, and over the cold start's pairs."""
    digest = hashlib.sha256()
    contents: list[Any] = [[row.id, row.prompt, row.columns] for row in (*rows.train, *rows.held_out)]
    contents += [len(rows.train), *([row.prompt, completion] for row, completion in pairs)]
    for content in contents:
        text = json.dumps(content, default=lambda value: _ADDRESS.sub("", str(value)))
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def tokens_digest(queries: QuerySet) -> str:
    """SHA-256 over the tokens of all queries, trained on and held out."""
    digest = hashlib.sha256()
    for query in (*queries.train, *queries.held_out):
        digest.update(array("q", [len(query.prompt_ids), *query.prompt_ids]).tobytes())
    return digest.hexdigest()


def new_run(checkpoint: Path) -> str:
    """How another run is begun from a checkpoint's weights."""
    return f"or begin a new run from these weights: model.path={checkpoint / 'model'} cold_start.steps=0 output_dir=…"


def _newest(recipe: Recipe, directory: RunDirectory, note: Note) -> Saved | None:
    found = Store(directory.checkpoints).newest()
    if found is None and directory.model.is_dir():
        what = "the run is finished and its checkpoints are gone: there is nothing to go on from"
        raise UserError(what, where=str(directory.path), mend=new_run(directory.path).removeprefix("or "))
    _check_recipe(recipe, directory.path / RECIPE if found is None else found.path / RECIPE, note)
    return None if found is None else _read(found, note)


def _check_recipe(recipe: Recipe, saved: Path, note: Note) -> None:
    then = yaml.safe_load(saved.read_text(encoding="utf-8"))
    safe, unsafe = changes(then, yaml.safe_load(dump_recipe(recipe)))
    if unsafe:
        what = "the recipe has changed in what a run is, and this would be another run:\n    " + "\n    ".join(unsafe)
        mend = "set these keys back"
        if (saved.parent / "model").is_dir():
            mend += f"; {new_run(saved.parent)}"
        raise UserError(what, where=str(saved), mend=mend)
    for line in safe:
        if not line.startswith(("output_dir:", "name:")):  # where it lies, as it was just named
            note(f"changed since: {line}")
    schedules = {recipe.actor.optimizer.schedule} - {"constant"}
    if schedules and any(line.startswith("steps:") for line in safe):
        note(f"the {schedules.pop()} schedule of the learning rate is stretched over the new number of steps")


def _read(found: Found, note: Note) -> Saved:
    if (home := found.content["working_directory"]) != str(Path.cwd()):
        note(f"the run was begun in {home}: its recipe's relative paths are now looked up from {Path.cwd()}")
    for path, reason in found.passed_over:
        note(f"passed over {path.name}: {reason}; set aside as damaged_{path.name}")
    return Saved(
        found=found,
        progress=json.loads((found.path / STATE).read_text(encoding="utf-8")),
        tensors=load_file(found.path / TENSORS),
    )


def _queries_by_id(queries: QuerySet) -> dict[str, Query]:
    return {query.id: query for query in queries.train}
