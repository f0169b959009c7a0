"""Resuming a run that has ended before its time: what may be resumed, and putting it back."""

import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

from torch import Tensor

from gspo.errors import UserError
from gspo.evaluation.sets import SetRows
from gspo.learner.state import digest_of, tensors_of
from gspo.model.load import base_of
from gspo.queries.row import Row
from gspo.queries.source import Demonstration, QuerySet, RowSet
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.run.checkpoint.changes import Change, environment_changes, recipe_changes
from gspo.run.checkpoint.store import (
    CHECKPOINTS,
    RECIPE,
    STATE,
    Checkpoint,
    Position,
    Store,
    digest,
    digest_of_file,
    finished_cold_start,
    position_of,
    set_aside,
)
from gspo.run.directory import RunDirectory
from gspo.run.place import is_free
from gspo.run.plain_files import clear, read_json_lines, rollout_files
from gspo.run.progress import Progress, decode

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what an object says of itself: another in every process
Note = Callable[[str], object]


def reopen(recipe: Recipe, note: Note) -> tuple[RunDirectory | None, Checkpoint | None]:
    """Lock the recipe's directory and find its newest whole checkpoint; None for either where there is none.

    Nothing is changed yet. Raises UserError where the directory is no run's, another process has it, no checkpoint is
    whole, or the recipe differs in what may not change.
    """
    path = recipe.run_dir
    if is_free(path):
        note(f"nothing to resume in {path.absolute()}: from the start")
        return None, None
    if not (path / RECIPE).is_file():
        is_saved = any((path / "checkpoints").glob(f"*/{RECIPE}"))
        fix = "copy it back from the newest of its checkpoints" if is_saved else "name the directory of a run"
        raise UserError(f"this is not a run's directory: it has no {RECIPE}", where=str(path), fix=fix)
    directory = RunDirectory(path)
    try:
        saved = _newest(recipe, directory)
        _check_recipe(recipe, path if saved is None else saved.path, note)
    except BaseException:
        directory.close()
        raise
    if saved is not None:
        if (home := saved.manifest["working_directory"]) != str(Path.cwd()):
            note(f"the run was begun in {home}: its recipe's relative paths are now looked up from {Path.cwd()}")
        for damaged, reason in saved.damaged:
            note(f"passed over {damaged.name}: {reason}; set aside as damaged_{damaged.name}")
    return directory, saved


def restore_progress(saved: Checkpoint, recipe: Recipe, weights: Mapping[str, Tensor], queries: QuerySet) -> Progress:
    """The saved progress; UserError where tokens or weights are not the saved ones, or the recipe has fewer steps."""
    where, environment = str(saved.path), saved.manifest["environment"]
    if saved.manifest["tokens_sha256"] != tokens_digest(queries.of_first(saved.manifest.get("num_streamed", 0))):
        fix = f"restore the tokenizer and its chat template as they were; {_new_run(saved.path, recipe)}"
        what = f"the queries have other tokens than they had: {_changed_prompt(saved.path.parents[1], queries)}"
        raise UserError(what, where="queries", fix=fix)
    if saved.manifest.get("base_sha256") != base_digest(recipe):
        what = "the files of the model beside the adapter, or of the teacher, are not those that the run began with"
        raise UserError(what, where=" or ".join(_beside(recipe)), fix="restore them from a copy")
    if saved.manifest["weights_sha256"] != digest_of(weights):
        what = "the weights, once loaded, are not bit by bit those that were saved"
        fix = f"install the saved versions of the libraries; {json.dumps(environment)}"
        raise UserError(what, where=where, fix=fix)
    try:
        text = (saved.path / STATE).read_text(encoding="utf-8")
        progress = decode(text, tensors_of(saved.path, "records"), {query.id: query for query in queries.train})
        assert isinstance(progress, Progress)
    except (TypeError, ValueError, LookupError, AssertionError):
        what = f"it was saved by an earlier gspo ({environment['gspo']}), in a form that this one does not read"
        raise UserError(what, where=where, fix=f"go on with that one; {_new_run(saved.path, recipe)}") from None
    if not saved.is_cold_start and progress.position > Position(recipe.steps):
        what = f"the run has come to {progress.position}, which is further than steps={recipe.steps}"
        fix = f"set steps to {progress.steps + (progress.batch is not None)} or more"
        raise UserError(what, where="steps", fix=fix)
    return progress


def restore_directory(directory: RunDirectory, recipe: Recipe, saved: Checkpoint | None, note: Note) -> None:
    """Bring the directory back to where the checkpoint has it, all checks being passed; UserError where it cannot be.

    Where there is no checkpoint yet, back to the start.
    """
    try:
        for path, _ in () if saved is None else saved.damaged:
            set_aside(path)
        for root in (directory.checkpoints, directory.cold_checkpoints):
            Store(root).tidy()
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


def rounding_changes(saved: Checkpoint, recipe: Recipe, environment: Mapping[str, str]) -> list[Change]:
    """The changes since then for which the run may not be bit by bit the one it would have been."""
    of_recipe = [change for change in _changes_since(saved.path, recipe) if change.effect == "rounding"]
    return [*of_recipe, *environment_changes(saved.manifest["environment"], environment)]


def check_rows(
    saved: Checkpoint,
    recipe: Recipe,
    rows: RowSet,
    pairs: Sequence[tuple[Row, Demonstration]],
    sets: Sequence[SetRows] = (),
) -> None:
    """Raise UserError where the data is not what the run was trained on so far."""
    rows = rows.of_first(saved.manifest.get("num_streamed", 0))
    if saved.manifest["rows_sha256"] != rows_digest(rows, pairs, sets):
        fix = f"restore the data as it was, a stream from its first row on; {_new_run(saved.path, recipe)}"
        raise UserError("the queries are not those the run was trained on so far", where="queries", fix=fix)


def rows_digest(rows: RowSet, pairs: Sequence[tuple[Row, Demonstration]], sets: Sequence[SetRows] = ()) -> str:
    """SHA-256 over ids, prompts and columns of all rows, trained or evaluated on, and over the cold start's pairs."""
    evaluated = [row for set_rows in sets for row in set_rows.rows]
    contents: list[Any] = [[row.id, row.prompt, row.columns] for row in (*rows.train, *rows.held_out, *evaluated)]
    contents += [len(rows.train), *([row.prompt, completion] for row, completion in pairs)]
    return contents_digest(contents)


def contents_digest(contents: Sequence[Any]) -> str:
    """SHA-256 over values as JSON has them; of what it does not have, over the text without an address in it."""
    texts = (json.dumps(content, default=lambda value: _ADDRESS.sub("", str(value))) for content in contents)
    return digest(f"{text}\n".encode() for text in texts)


def tokens_digest(queries: QuerySet) -> str:
    """SHA-256 over the tokens of all queries, trained on and held out."""
    prompts = (query.prompt_ids for query in (*queries.train, *queries.held_out))
    return digest(array("q", [len(ids), *ids]).tobytes() for ids in prompts)


def base_digest(recipe: Recipe) -> str | None:
    """SHA-256 over the files of the model that an adapter is trained beside, and of a teacher; None without either.

    Those of a hub are not among them.
    """
    paths = [path for path in _beside(recipe) if Path(path).is_dir()]
    if not paths:
        return None
    places = {place for path in paths for place in (path, str(base_of(path)))}  # it may be an adapter, too
    kinds = ("config.json", "*.safetensors", "*.bin")
    files = [path for place in sorted(places) for kind in kinds for path in sorted(Path(place).glob(kind))]
    return digest(digest_of_file(path).encode() for path in files)


def _beside(recipe: Recipe) -> list[str]:
    paths = (None if recipe.model.lora is None else recipe.model.path, recipe.teacher.path)
    return [path for path in paths if path is not None]


def _changed_prompt(run: Path, queries: QuerySet) -> str:
    """A prompt of the run's responses that is another text now, with both from shortly before they differ."""
    now = {query.id: query.text for query in (*queries.train, *queries.held_out)}
    for line in (line for path in rollout_files(run).values() for line in read_json_lines(path)[0]):
        both = line["prompt"], now.get(line["query"], line["prompt"])
        if both[0] != both[1]:
            start = max(0, len(commonprefix(both)) - 40)  # noqa: RUF071 - characters are meant
            was, now_is = (json.dumps(text[start : start + 120], ensure_ascii=False) for text in both)
            return f"the prompt of {line['query']} was {was}, and is {now_is}"
    return "their texts are, as far as responses show, the same"


def _newest(recipe: Recipe, directory: RunDirectory) -> Checkpoint | None:
    """Find the newest checkpoint: of training, else what the cold start has ended with, else the newest of that."""
    store = Store(directory.checkpoints)
    if checkpoint := store.newest():
        return checkpoint
    others = store.others()
    if directory.model.is_dir() or others:
        what = f"its checkpoints are gone, or not of this version of gspo (there are: {', '.join(others) or 'none'})"
        fix = "restore one from a copy, or install the version that has saved it"
        if directory.model.is_dir():
            fix += f"; {_new_run(directory.path, recipe)}"
        raise UserError(f"{what}; it is not begun again over what is left of it", where=str(directory.path), fix=fix)
    return finished_cold_start(directory.path) or Store(directory.cold_checkpoints).newest()


def _check_recipe(recipe: Recipe, saved: Path, note: Note) -> None:
    """Note what has changed since the recipe saved there; UserError for what may not."""
    changed = _changes_since(saved, recipe)
    if refused := [change for change in changed if change.effect == "another run"]:
        lines = "".join(f"\n    {change}" for change in refused)
        fix = "set these keys back" + (f"; {_new_run(saved, recipe)}" if (saved / "model").is_dir() else "")
        what = f"it is not the one that the run in {saved} was made with, and would make another run:{lines}"
        raise UserError(what, where="recipe", fix=fix)
    for change in changed:
        # Where it lies was just named, and of an empty list there is nothing to be said.
        if change.effect == "none" and change.key not in ("output_dir", "name", "phases"):
            note(f"changed since: {change}")
    before, longest = (each.at_longest.rollout.max_new_tokens for each in (load_recipe(saved / RECIPE), recipe))
    if longest != before:  # by phases that have not begun
        lengths = f"up to {longest} tokens, and it was up to {before}"
        if recipe.queries.overlong == "filter":
            fix = "give the phases the length that the longest of them had, or begin a new run"
            raise UserError(f"{lengths}: queries.overlong: filter would leave out others", where="phases", fix=fix)
        note(f"NOT comparable: evaluations are of responses of {lengths}")
    schedule = recipe.actor.optimizer.schedule
    if schedule != "constant" and any(change.key == "steps" for change in changed):
        note(f"the {schedule} schedule of the learning rate is stretched over the new number of steps")


def _changes_since(saved: Path, recipe: Recipe) -> list[Change]:
    then = load_recipe(saved / RECIPE)  # a key that it does not have yet is as it is by default
    changes = recipe_changes(then.model_dump(mode="json"), recipe.model_dump(mode="json"))
    # A step under way has begun, too; the phases after it may still be others.
    position = position_of(saved.name) if saved.parent.name == CHECKPOINTS else None
    step = position.steps + bool(position.stage) if position else 0
    num_begun = max(sum(phase.from_step <= step for phase in each.phases) for each in (then, recipe))
    to_come = re.compile(r"phases(\.(\d+)\..*)?")
    return [
        replace(change, effect="none")
        if (found := to_come.fullmatch(change.key)) and int(found[2] or num_begun) >= num_begun
        else change
        for change in changes
    ]


def _new_run(home: Path, recipe: Recipe) -> str:
    """Return how another run is begun from the weights in `model` there."""
    keys = f"model.path={home / 'model'} cold_start.steps=0 output_dir=…"
    if recipe.model.architecture is not None:
        keys += " model.architecture=null model.tokenizer=null"
    return f"or begin a new run from these weights: {keys}"
