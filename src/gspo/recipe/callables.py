"""From a name in a recipe to the function it means: `module:name` or `file.py:name`."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gspo.errors import UserError, did_you_mean, files_beside, listed

_BEHIND_MAIN = "put what runs a program behind: if __name__ == '__main__'"

_importing: list[Path] = []  # files under way: their top-level code runs now


def refuse_import() -> None:
    """Raise UserError where a file that a recipe names is being imported: its own call would begin run within run."""
    if _importing:
        raise UserError("it calls gspo.train", where=str(_importing[-1]), fix=_BEHIND_MAIN)


def load_callable(name: str, *, where: str) -> Callable[..., Any]:
    """The function of `module:name` or `file.py:name`; files and modules are looked up from the working directory.

    Raises UserError, with `where` in it, for a file, module or name that is not there or cannot be imported.
    """
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise UserError(f"{name!r} is neither module:name nor file.py:name", where=where)
    if source.endswith(".py") and not Path(source).is_file():
        raise UserError(f"no such file {source}", where=where, fix=files_beside(Path(source), ".py"))
    path = str(Path(source).resolve())
    try:
        module = _import(source)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: imported code may end the program
        advice = None
        if isinstance(error, SystemExit) or getattr(error, "fix", None) == _BEHIND_MAIN:
            advice = _BEHIND_MAIN
        elif isinstance(error, ModuleNotFoundError) and error.name and f"{source}.".startswith(f"{error.name}."):
            advice = "install it, run from its folder, or name its file: path/file.py:name"
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f", line {lines[-1]}" if lines else ""
        what = f"importing {source}{line} raises {type(error).__name__}: {getattr(error, 'what', error)}"
        raise UserError(what, where=where, fix=advice) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        there = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
        names = [key for key, value in there.items() if f"{value.__module__}.".startswith(f"{module.__name__}.")]
        fix = did_you_mean(attribute, names, f"its functions: {listed(names)}") if names else None
        raise UserError(f"{source} has no function {attribute!r}", where=where, fix=fix)
    return function


def error_line(error: BaseException, function: Callable[..., Any]) -> str:
    """`, at file.py:12`, the innermost line of the function's own file that led to the error, else of any file."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(getattr(function, "__code__", None), "co_filename", None)
    chosen = [frame for frame in frames if frame.filename == own_file] or frames[1:]
    return f", at {chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _import(source: str) -> ModuleType:
    """The module of a name or of a file. Functions of a file share one; a file that was edited is read anew."""
    if not source.endswith(".py"):
        # An installed command does not have the working directory on its path, `python` does.
        if not {"", str(Path.cwd())} & set(sys.path):
            sys.path.append(str(Path.cwd()))
        return importlib.import_module(source)
    path = Path(source).resolve()
    name = f"{path.stem}_{path.stat().st_ino}_{path.stat().st_mtime_ns}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    _importing.append(path)
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _importing.pop()
    return module
