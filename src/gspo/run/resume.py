"""Resuming a run that has ended before its time: what may be resumed, what has changed, and putting it back."""

import inspect
import json
import platform
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gspo.errors import UserError, writing
from gspo.evaluation.compare import differences
from gspo.evaluation.sets import SetRows
from gspo.learner.state import digest_of, tensors_of
from gspo.learner.trainer import Trainer
from gspo.model.load import base_of
from gspo.model.lora import has_adapter
from gspo.queries.demonstrations import Demonstration
from gspo.queries.refresh import from_text
from gspo.queries.row import Row
from gspo.queries.source import QuerySet, RowSet
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.calls import RewardFunction
from gspo.reward.mcp_server import McpServer
from gspo.rollout.tools import Tools
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
from gspo.run.hooks import Hook
from gspo.run.place import is_free
from gspo.run.plain_files import clear
from gspo.run.progress import Progress, decode

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in what an object says of itself: another in every process
Note = Callable[[str], object]
# Of a change. Rounding: no longer bit by bit the run it would have been.
Effect = Literal["none", "rounding", "another run"]

# None of them changes what is learned: how far, how often it is looked at or saved, where it lies, how long is waited.
_SAFE = re.compile(
    r"name|output_dir|steps|checkpoint\..*|early_stop\..*|report\..*|evaluation\.every"
    r"|trainer\.timeout_seconds|cluster\..*|hooks(\..*)?|hook_errors"  # their code is compared in `environment`
    r"|teacher\.(url|key_variable)|reward\.\d+\.(time_limit_seconds|concurrent_calls)"
    r"|rollout\.(embedded|vllm|sglang)\.(python|weights\w*|\w+_seconds|(urls|devices)(\..*)?)"
)
# How the work is cut to fit the memory: equal but for rounding. How far ahead sampling may be, and what becomes of
# earlier turns: another run from here.
_ROUNDING = re.compile(
    r"rollout\.(max_rows|max_staleness|too_old|in_turn|interrupt|old_cache|history|engine|(embedded|vllm|sglang)\..*)"
    r"|trainer\.sharding|actor\.(micro_batch_tokens|gradient_\w+)|model\.attn_implementation"
)

_LIBRARIES = (
    *("gspo", "torch", "transformers", "tokenizers", "safetensors", "numpy"),
    *("reasoning-gym", "math-verify", "sympy"),  # of queries and rewards
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key of the recipe, or an entry of the environment, that is not what it was, and what that does to a run.

    Example: str(Change(key="steps", was=100, now=200, effect="none")) == "steps was 100, is 200"
    """

    key: str
    was: Any  # None: it was not there
    now: Any
    effect: Effect

    def __str__(self) -> str:
        return f"{self.key} was {self.was}, is {self.now}"


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
        fix = "restore tokenizer, chat template and longest response as they were"
        fix += f"; {_new_run(saved.path, recipe)}"
        raise UserError("the queries have other tokens than they had", where="queries", fix=fix)
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
    with writing(directory.path, fix="make it writable"):
        for path, _ in () if saved is None else saved.damaged:
            set_aside(path)
        for root in (directory.checkpoints, directory.cold_checkpoints):
            Store(root).tidy()
        if directory.cold_start.exists():  # killed before these were removed
            clear(directory.cold_checkpoints)
        directory.write_recipe(recipe)
        if aside := directory.cut_back(None if saved is None else saved.path):
            note(f"what was written before any checkpoint is set aside in {aside}")
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


def kept_rows(saved: Checkpoint) -> RowSet | None:
    """The rows that it was trained on last, where queries.refresh has given others; None: those it began with."""
    text = json.loads((saved.path / STATE).read_text(encoding="utf-8")).get("rows")
    return from_text(text) if text else None


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
    then = load_recipe(saved / RECIPE, of_run=True)
    before, longest = (each.at_longest.rollout.max_new_tokens for each in (then, recipe))
    if longest != before:  # by phases that have not begun
        note(f"NOT comparable: evaluations are of responses of up to {longest} tokens, and it was up to {before}")
    schedule = recipe.actor.optimizer.schedule
    if schedule != "constant" and any(change.key == "steps" for change in changed):
        note(f"the {schedule} schedule of the learning rate is stretched over the new number of steps")


def _changes_since(saved: Path, recipe: Recipe) -> list[Change]:
    then = load_recipe(saved / RECIPE, of_run=True)  # a key that it does not have yet is as it is by default
    changes = recipe_changes(then.model_dump(mode="json"), recipe.model_dump(mode="json"))
    # A step under way has begun, too; the phases after it may still be others.
    position = position_of(saved.name) if saved.parent.name == CHECKPOINTS else None
    step = position.steps + bool(position.stage) if position else 0
    by_condition = 0
    with suppress(OSError, ValueError):  # of a file that cannot be read more is said later
        by_condition = json.loads((saved / STATE).read_text(encoding="utf-8")).get("phases_begun", 0)
    num_begun = max(each.num_begun(step, by_condition) for each in (then, recipe))
    if any(own.key == "rollout.max_staleness" and own.was == 0 for own in changes):  # what is stale counts from now on
        how = re.compile(r"actor\.(old_logprobs|correction\w*)")
        changes = [replace(own, effect="rounding") if how.fullmatch(own.key) else own for own in changes]
    to_come = re.compile(r"phases(\.(\d+)\..*)?")
    conditions = [phase.when.metric for phase in then.phases[num_begun:] if phase.when]
    if any(metric.startswith("evaluation/") for metric in conditions):  # which then come at other steps
        changes = [replace(own, effect="another run") if own.key == "evaluation.every" else own for own in changes]
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


def recipe_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two recipes given as nested mappings."""
    return [
        Change(key=key, was=json.loads(was), now=json.loads(value), effect=_effect(key))
        for key, (was, value) in differences(then, now).items()
    ]


def environment_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return what differs between two environments, by name."""
    changes = sorted(recipe_changes(then, now), key=attrgetter("key"))
    return [replace(change, effect="rounding") for change in changes]


def _effect(key: str) -> Effect:
    if _SAFE.fullmatch(key):
        return "none"
    return "rounding" if _ROUNDING.fullmatch(key) else "another run"


def environment(
    trainer: Trainer,
    functions: Sequence[RewardFunction],
    engine: Mapping[str, str],
    hooks: Mapping[str, Hook],
    tools: Tools | None = None,
) -> dict[str, str]:
    """Libraries, processor, threads, what was proven of the model at load, the engine, code of rewards and hooks."""
    policy, device = trainer.policy, trainer.policy.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in (*_LIBRARIES, *(["peft"] if has_adapter(policy.model) else []))},
        "device": f"{device.type}: {processor}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(trainer.num_ranks),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix products": torch.get_float32_matmul_precision(),
        "packed attention": str(policy.supports_packing),
        **engine,
        **{f"code of reward {function.name}": f"{code_of(function.call)}{function.settings}" for function in functions},
        **{f"code of hook {name}": code_of(hook) for name, hook in hooks.items()},
        **{f"code of tool {each.__name__}": code_of(each) for each in (tools.functions if tools else ())},
    }


def code_of(call: Any) -> str:
    """A digest of the file that a function is in; of its own lines, for one from a script or a notebook."""
    try:
        if isinstance(call, McpServer):
            return digest([path.read_bytes() for path in call.files])[:16]
        if getattr(call, "__module__", "__main__") == "__main__":
            text = inspect.getsource(call)
        else:
            text = Path(inspect.getsourcefile(call) or "").read_text(encoding="utf-8")
        return digest([text.encode()])[:16]
    except (OSError, TypeError, UnicodeDecodeError):  # an object that is called, or made on the fly
        return "unknown"


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
