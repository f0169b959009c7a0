"""Taking up a run that has ended before its time: what may be taken up, and putting everything back."""

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
from gspo.recipe.load import dump_recipe
from gspo.recipe.schema import Recipe
from gspo.recipe.yaml_text import read_yaml
from gspo.run.checkpoint.changes import changes
from gspo.run.checkpoint.codec import decode
from gspo.run.checkpoint.files import MANIFEST
from gspo.run.checkpoint.position import Position
from gspo.run.checkpoint.snapshot import RECIPE, STATE, TENSORS, digest_of
from gspo.run.checkpoint.store import Found, Store
from gspo.run.directory import RunDirectory, is_unused
from gspo.run.progress import Progress

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what an object says of itself: another in every process
Note = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint read back, its tensors and records not yet put in place."""

    found: Found
    progress: Any  # as JSON
    tensors: Mapping[str, Tensor]
    inexact: Sequence[str]  # what makes going on from it no exact resume
    otherwise: str  # how another run is begun from its weights

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
    if not path.exists() or (path.is_dir() and is_unused(path)):
        note(f"nothing to resume in {path.absolute()}: from the start")
        return None
    if not (path / RECIPE).is_file():
        raise not_a_run(path)
    directory = RunDirectory.reopen(path)
    try:
        return directory, _newest(recipe, directory, note)
    except BaseException:
        directory.close()
        raise


def not_a_run(path: Path) -> UserError:
    """What is to be said of a directory without a recipe."""
    fix = "name the directory that a run has made, such as runs/arithmetic"
    if any((path / "checkpoints").glob("*/recipe.yaml")):
        fix = "copy it back from the newest of its checkpoints"
    return UserError("this is not a run's directory: it has no recipe.yaml", where=str(path), fix=fix)


def home_of(directory: Path) -> Path | None:
    """Where the run in a directory was begun, which its recipe's relative paths start from; None where nothing says."""
    for position in reversed(Store(directory / "checkpoints").positions()):
        with suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            manifest = json.loads((directory / "checkpoints" / position.name / MANIFEST).read_text(encoding="utf-8"))
            return Path(manifest["content"]["working_directory"])
    return None


def put_back(saved: Saved, recipe: Recipe, policy: Policy, queries: QuerySet) -> Progress:
    """The saved progress; UserError where tokens or weights are not the saved ones, or the recipe has fewer steps."""
    if saved.about["tokens_sha256"] != tokens_digest(queries):
        fix = "restore the tokenizer as it was; " + saved.otherwise
        raise UserError("the tokenizer turns the queries into other tokens than it did", where="queries", fix=fix)
    if saved.about["weights_sha256"] != digest_of(policy.weights()):
        what = "the weights, once loaded, are not bit by bit those that were saved"
        fix = "install the saved versions of the libraries; "
        raise UserError(what, where=str(saved.path), fix=fix + json.dumps(saved.about["environment"]))
    try:
        progress = decode(saved.progress, saved.group("records"), {query.id: query for query in queries.train})
        assert isinstance(progress, Progress)
    except (TypeError, KeyError, AssertionError) as error:
        what = f"it was saved by gspo {saved.about['environment']['gspo']} in another form ({error})"
        raise UserError(what, where=str(saved.path), fix=f"install that version; {saved.otherwise}") from None
    if progress.position > Position(recipe.steps):
        what = f"the run has come to {progress.position}, which is further than steps={recipe.steps}"
        raise UserError(what, where="steps", fix=f"set steps to {progress.steps + 1} or more")
    return progress


def take_over(directory: RunDirectory, recipe: Recipe, saved: Saved | None, note: Note) -> None:
    """Bring the directory back to where the checkpoint has it, all checks being passed; UserError where it cannot be.

    Where there is no checkpoint yet, back to the start.
    """
    try:
        Store(directory.checkpoints).tidy(None if saved is None else saved.found)
        directory.rewrite_recipe(recipe)
        if saved is not None:
            directory.cut_back(steps=saved.progress["steps"], logs=saved.path)
        elif aside := directory.set_aside():
            note(f"what was written before any checkpoint is set aside in {aside}")
    except OSError as error:
        where, fix = str(error.filename or directory.path), "make it writable"
        raise UserError(f"cannot be written: {error.strerror}", where=where, fix=fix) from None
    if saved is None:
        note(f"no checkpoint in {directory.checkpoints} yet: from the start")


def check_rows(saved: Saved, rows: RowSet, pairs: Sequence[tuple[Row, str]]) -> None:
    """UserError where the data is not what the run was trained on so far."""
    if saved.about["rows_sha256"] != rows_digest(rows, pairs):
        fix = "restore the data as it was; " + saved.otherwise
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


def new_run(home: Path, recipe: Recipe) -> str:
    """How another run is begun from the weights in `model` there."""
    keys = f"model.path={home / 'model'} cold_start.steps=0 output_dir=…"
    if recipe.model.architecture is not None:
        keys += " model.architecture=null model.tokenizer=null"
    return f"or begin a new run from these weights: {keys}"


def _newest(recipe: Recipe, directory: RunDirectory, note: Note) -> Saved | None:
    store = Store(directory.checkpoints)
    found = store.newest()
    if found is not None:
        return _read(found, _checked(recipe, found.path / RECIPE, note), recipe, note)
    if directory.model.is_dir() or store.damaged():
        left = ", ".join(path.name for path in store.damaged()) or "none"
        what = f"its checkpoints are gone (set aside as damaged: {left}); it is not begun again over what is left of it"
        fix = "restore one from a copy"
        if directory.model.is_dir():
            fix += "; " + new_run(directory.path, recipe)
        raise UserError(what, where=str(directory.path), fix=fix)
    _checked(recipe, directory.path / RECIPE, note)
    return None


def _checked(recipe: Recipe, saved: Path, note: Note) -> Sequence[str]:
    """The changes of the recipe that cost exactness; UserError for those that may not be made."""
    then = read_yaml(saved.read_text(encoding="utf-8"), where=str(saved))
    changed = changes(then, read_yaml(dump_recipe(recipe), where="recipe"))
    if changed.refused:
        lines = "".join(f"\n    {line}" for line in changed.refused)
        fix = "set these keys back"
        if (saved.parent / "model").is_dir():
            fix += f"; {new_run(saved.parent, recipe)}"
        what = f"it is not the one that the run in {saved.parent} was made with, and would make another run:{lines}"
        raise UserError(what, where="recipe", fix=fix)
    for line in changed.safe:
        if not line.startswith(("output_dir:", "name:")):  # where it lies, as it was just named
            note(f"changed since: {line}")
    schedule = recipe.actor.optimizer.schedule
    if schedule != "constant" and any(line.startswith("steps:") for line in changed.safe):
        note(f"the {schedule} schedule of the learning rate is stretched over the new number of steps")
    return changed.rounding


def _read(found: Found, inexact: Sequence[str], recipe: Recipe, note: Note) -> Saved:
    if (home := found.content["working_directory"]) != str(Path.cwd()):
        note(f"the run was begun in {home}: its recipe's relative paths are now looked up from {Path.cwd()}")
    for path, reason in found.passed_over:
        note(f"passed over {path.name}: {reason}; set aside as damaged_{path.name}")
    return Saved(
        found=found,
        progress=json.loads((found.path / STATE).read_text(encoding="utf-8")),
        tensors=load_file(found.path / TENSORS),
        inexact=inexact,
        otherwise=new_run(found.path, recipe),
    )
