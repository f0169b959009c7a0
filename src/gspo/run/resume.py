"""Resuming a run that has ended before its time: what may be resumed, and putting it back."""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet
from gspo.recipe.load import dump_recipe, read_yaml
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.changes import changes
from gspo.run.checkpoint.checkpointer import digest_of, group
from gspo.run.checkpoint.codec import decode
from gspo.run.checkpoint.files import MANIFEST, DamagedError, verified
from gspo.run.checkpoint.position import CHECKPOINTS, COLD_CHECKPOINTS, COLD_START, Position
from gspo.run.checkpoint.store import RECIPE, STATE, TENSORS, Checkpoint, Store
from gspo.run.directory import RunDirectory, is_unused
from gspo.run.plain_files import clear
from gspo.run.progress import Progress

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what an object says of itself: another in every process
Note = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint read back, its tensors and records not yet put in place."""

    path: Path
    manifest: Mapping[str, Any]
    damaged: Sequence[tuple[Path, str]]  # newer ones, which are not whole
    is_cold_start: bool  # of the cold start: under way, or finished
    progress: Any  # as JSON
    tensors: Mapping[str, Tensor]
    inexact: Sequence[str]  # what makes going on from it no exact resume
    new_run: str  # how another run is begun from its weights


def reopen(recipe: Recipe, note: Note) -> tuple[RunDirectory | None, Saved | None]:
    """Lock the recipe's directory and read its newest whole checkpoint; None for either where there is none.

    Nothing is changed yet. Raises UserError where the directory is no run's, another process has it, no checkpoint is
    whole, or the recipe differs in what may not change.
    """
    path = recipe.run_dir
    if not path.exists() or (path.is_dir() and is_unused(path)):
        note(f"nothing to resume in {path.absolute()}: from the start")
        return None, None
    if not (path / RECIPE).is_file():
        raise not_a_run(path)
    directory = RunDirectory(path)
    try:
        return directory, _read_newest(recipe, directory, note)
    except BaseException:
        directory.close()
        raise


def not_a_run(path: Path) -> UserError:
    """What is to be said of a directory without a recipe."""
    fix = "name the directory that a run has made, such as runs/arithmetic"
    if any((path / "checkpoints").glob("*/recipe.yaml")):
        fix = "copy it back from the newest of its checkpoints"
    return UserError("this is not a run's directory: it has no recipe.yaml", where=str(path), fix=fix)


def working_directory_of(run: Path) -> Path | None:
    """Where a run was begun, which its recipe's relative paths start from; None where nothing says."""
    stores = (Store(run / CHECKPOINTS), Store(run / COLD_CHECKPOINTS))
    checkpoints = [store.path(position) for store in stores for position in reversed(store.positions())]
    for path in (*checkpoints, run / COLD_START):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
            return Path(manifest["content"]["working_directory"])
    return None


def restore_progress(saved: Saved, recipe: Recipe, policy: Policy, queries: QuerySet) -> Progress:
    """The saved progress; UserError where tokens or weights are not the saved ones, or the recipe has fewer steps."""
    environment = saved.manifest["environment"]
    if saved.manifest["tokens_sha256"] != tokens_digest(queries):
        fix = f"restore the tokenizer as it was; {saved.new_run}"
        raise UserError("the tokenizer turns the queries into other tokens than it did", where="queries", fix=fix)
    if saved.manifest["weights_sha256"] != digest_of(policy.weights()):
        what = "the weights, once loaded, are not bit by bit those that were saved"
        fix = f"install the saved versions of the libraries; {json.dumps(environment)}"
        raise UserError(what, where=str(saved.path), fix=fix)
    try:
        queries_by_id = {query.id: query for query in queries.train}
        progress = decode(saved.progress, group(saved.tensors, "records"), queries_by_id)
        assert isinstance(progress, Progress)
    except (TypeError, KeyError, AssertionError):
        what = f"it was saved by an earlier gspo ({environment['gspo']}), in a form that this one does not read"
        raise UserError(what, where=str(saved.path), fix=f"go on with that one; {saved.new_run}") from None
    if not saved.is_cold_start and progress.position > Position(recipe.steps):
        what = f"the run has come to {progress.position}, which is further than steps={recipe.steps}"
        raise UserError(what, where="steps", fix=f"set steps to {progress.steps + 1} or more")
    return progress


def restore_directory(directory: RunDirectory, recipe: Recipe, saved: Saved | None, note: Note) -> None:
    """Bring the directory back to where the checkpoint has it, all checks being passed; UserError where it cannot be.

    Where there is no checkpoint yet, back to the start.
    """
    try:
        for root in (directory.checkpoints, directory.cold_checkpoints):
            Store(root).tidy([entry for entry in saved.damaged if entry[0].parent == root] if saved else ())
        if directory.cold_start.exists():  # killed before these were removed
            clear(directory.cold_checkpoints)
        directory.write_recipe(recipe)
        if aside := directory.cut_back(None if saved is None else saved.path):
            note(f"what was written before any checkpoint is set aside in {aside}")
    except OSError as error:
        where, fix = str(error.filename or directory.path), "make it writable"
        raise UserError(f"cannot be written: {error.strerror}", where=where, fix=fix) from None
    if saved is None:
        note(f"no checkpoint in {directory.checkpoints} yet: from the start")


def finished_cold_start(run: Path) -> Checkpoint | None:
    """What the cold start of a run has ended with; None where it has not, UserError where that is not whole."""
    path = run / COLD_START
    try:
        return Checkpoint(path=path, manifest=verified(path)) if path.exists() else None
    except DamagedError as damage:
        fix = "restore it from a copy: it is the reference model too; to begin afresh, give another output_dir"
        raise UserError(f"what the cold start ended with is not whole: {damage}", where=str(path), fix=fix) from None


def check_rows(saved: Saved, rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> None:
    """UserError where the data is not what the run was trained on so far."""
    if saved.manifest["rows_sha256"] != rows_digest(rows, pairs):
        fix = f"restore the data as it was; {saved.new_run}"
        raise UserError("the queries are not those the run was trained on so far", where="queries", fix=fix)


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


def _read_newest(recipe: Recipe, directory: RunDirectory, note: Note) -> Saved | None:
    """Of reinforcement learning, else what the cold start has ended with, else the newest of that."""
    store, cold_store = Store(directory.checkpoints), Store(directory.cold_checkpoints)
    if checkpoint := store.newest():
        return _read(checkpoint, recipe, note, is_cold_start=False)
    others = store.others()
    if directory.model.is_dir() or others:
        what = f"its checkpoints are gone, or not of this version of gspo (there are: {', '.join(others) or 'none'})"
        fix = "restore one from a copy, or install the version that has saved it"
        if directory.model.is_dir():
            fix += f"; {_new_run(directory.path, recipe)}"
        raise UserError(f"{what}; it is not begun again over what is left of it", where=str(directory.path), fix=fix)
    if checkpoint := finished_cold_start(directory.path) or cold_store.newest():
        return _read(checkpoint, recipe, note, is_cold_start=True)
    _check_recipe(recipe, directory.path, note)
    return None


def _read(checkpoint: Checkpoint, recipe: Recipe, note: Note, *, is_cold_start: bool) -> Saved:
    path = checkpoint.path
    inexact = _check_recipe(recipe, path, note)
    if (home := checkpoint.manifest["working_directory"]) != str(Path.cwd()):
        note(f"the run was begun in {home}: its recipe's relative paths are now looked up from {Path.cwd()}")
    for damaged, reason in checkpoint.damaged:
        note(f"passed over {damaged.name}: {reason}; set aside as damaged_{damaged.name}")
    return Saved(
        path=path,
        manifest=checkpoint.manifest,
        damaged=checkpoint.damaged,
        is_cold_start=is_cold_start,
        progress=json.loads((path / STATE).read_text(encoding="utf-8")),
        tensors=load_file(path / TENSORS),
        inexact=inexact,
        new_run=_new_run(path, recipe),
    )


def _check_recipe(recipe: Recipe, saved: Path, note: Note) -> Sequence[str]:
    """The changes since the recipe saved there that cost exactness; UserError for those that may not be made."""
    file = saved / RECIPE
    then = read_yaml(file.read_text(encoding="utf-8"), where=str(file))
    changed = changes(then, read_yaml(dump_recipe(recipe), where="recipe"))
    if changed.refused:
        lines = "".join(f"\n    {line}" for line in changed.refused)
        fix = "set these keys back"
        if (saved / "model").is_dir():
            fix += f"; {_new_run(saved, recipe)}"
        what = f"it is not the one that the run in {saved} was made with, and would make another run:{lines}"
        raise UserError(what, where="recipe", fix=fix)
    for line in changed.safe:
        if not line.startswith(("output_dir:", "name:")):  # where it lies, as it was just named
            note(f"changed since: {line}")
    schedule = recipe.actor.optimizer.schedule
    if schedule != "constant" and any(line.startswith("steps:") for line in changed.safe):
        note(f"the {schedule} schedule of the learning rate is stretched over the new number of steps")
    return changed.rounding


def _new_run(home: Path, recipe: Recipe) -> str:
    """How another run is begun from the weights in `model` there."""
    keys = f"model.path={home / 'model'} cold_start.steps=0 output_dir=…"
    if recipe.model.architecture is not None:
        keys += " model.architecture=null model.tokenizer=null"
    return f"or begin a new run from these weights: {keys}"
