"""Where a new run may go: a directory that is free, the next numbered name, or the place of a run that it replaces."""

import itertools
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from gspo.errors import UserError, listed
from gspo.rank_environment import world_size
from gspo.recipe.files import files_of
from gspo.recipe.schema import Recipe
from gspo.run.lock import Lock

_BEGINNINGS = re.compile(
    r"lock|unfinished_(\w+_)?recipe\.yaml|(embedded|vllm|sglang)_(\d+\.log|model)"
)  # an engine's, too


def check_place(recipe: Recipe, *, overwrite: bool = False) -> None:
    """Raise UserError where the run's directory is taken; with `overwrite`, where what is there is not an ended run."""
    path = recipe.run_dir
    if is_free(path):
        return None
    if overwrite:
        return _check_replaceable(recipe)
    fix = "give this run another name=… or output_dir=…, or remove what is there"
    if (path / "recipe.yaml").is_file():
        fix = f"to go on with that run: {how_to_resume(recipe)}; for a run beside it: --new, name=… or output_dir=…; "
        fix += "to replace it: --overwrite (in Python: new=True, overwrite=True)"
    what = "this output directory exists, and a run never overwrites another"
    raise UserError(what if path.is_dir() else "a file is here, and no directory", where=str(path), fix=fix)


def renamed(recipe: Recipe, note: Callable[[str], object]) -> Recipe:
    """The recipe itself where its directory is free, else with the next number in its name and its directory."""
    if is_free(recipe.run_dir):
        return recipe
    path = next(filter(is_free, (Path(f"{recipe.run_dir}-{number}") for number in itertools.count(2))))
    name = f"{recipe.name}-{path.name.rpartition('-')[2]}"
    note(f"new: this run is {name}, in {path}")
    return recipe.model_copy(update={"name": name, "output_dir": recipe.output_dir and str(path)})


def move_old_run(recipe: Recipe, note: Callable[[str], object]) -> None:
    """Rename a run that has ended and takes the directory to `NAME.old-1`, or the next number."""
    if is_free(recipe.run_dir):
        return
    _check_replaceable(recipe)
    home = recipe.run_dir.resolve()  # a directory that is a link stays one
    numbered = (home.with_name(f"{home.name}.old-{number}") for number in itertools.count(1))
    old = next(path for path in numbered if not os.path.lexists(path))
    lock = Lock(home)
    try:
        home.rename(old)
        home.mkdir()
    except OSError as error:
        fix = "give this run another name=… or output_dir=…"
        raise UserError(f"the old run cannot be renamed: {error.strerror}", where=str(home), fix=fix) from None
    finally:
        lock.release()
    note(f"overwrite: the run that was there is now in {old}")


def is_free(path: Path) -> bool:
    """Tell whether nothing is there, or no more than what a run leaves that was killed as it began."""
    if not path.is_dir():
        return not path.exists()
    return all(_BEGINNINGS.fullmatch(entry.name) for entry in path.iterdir())


def how_to_resume(recipe: Recipe, *, has_on_step: bool = False) -> str:
    """Return what goes on with the run of a recipe."""
    on_step = "on_step=…, " if has_on_step else ""
    if not recipe.reward or not recipe.queries.has_data:
        return f"gspo.train(recipe, queries=…, reward=…, {on_step}resume=True)"
    if on_step:
        return f"gspo.train(recipe, {on_step}resume=True)"
    ranks = f" --processes {world_size()}" if world_size() > 1 else ""
    return f"gspo resume {shlex.quote(str(recipe.run_dir))}{ranks}"


def _check_replaceable(recipe: Recipe) -> None:
    path = recipe.run_dir
    where, fix = str(path), "give this run another name=… or output_dir=…"
    if not (path.is_dir() and all((path / name).is_file() for name in ("recipe.yaml", "lock"))):
        raise UserError("this is not a run's directory, so it is not overwritten", where=where, fix=fix)
    Lock(path).release()  # UserError where a process is writing to it
    home, given = path.resolve(), [("the working directory", str(Path.cwd())), *files_of(recipe)]
    if inside := [key for key, file in given if home in ((found := Path(file).resolve()), *found.parents)]:
        what = f"{listed(inside)} is in the run that is to be overwritten"
        raise UserError(what, where=where, fix="copy it elsewhere, or give this run another name: --new")
