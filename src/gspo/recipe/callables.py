"""From a name in a recipe to the function it means: `module:name` or `file.py:name`."""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gspo.errors import UserError


def load_callable(name: str, *, where: str) -> Callable[..., Any]:
    """The function of `module:name` or `file.py:name`; files and modules are looked up from the working directory.

    Raises UserError, with `where` in it, for a file, module or name that is not there or cannot be imported.
    """
    home, separator, attribute = name.rpartition(":")
    if not separator or not home or not attribute:
        raise UserError(f"{name!r} is neither module:name nor file.py:name", where=where)
    module = _load_file(Path(home), where=where) if home.endswith(".py") else _load_module(home, where=where)
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = difflib.get_close_matches(attribute, functions, n=3, cutoff=0.4) or functions[:8]
        fix = f"there are: {', '.join(near)}" if near else None
        raise UserError(f"{home} has no function {attribute!r}", where=where, fix=fix)
    return found


def error_line(error: BaseException, function: Callable[..., Any]) -> str:
    """`, at file.py:12`, the innermost line of the function's own file that led to the error, else of any file."""
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(getattr(function, "__code__", None), "co_filename", None)
    chosen = [frame for frame in frames if frame.filename == own_file] or frames[1:]
    return f", at {chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _load_file(path: Path, *, where: str) -> ModuleType:
    if not path.is_file():
        near = sorted(str(near) for near in path.parent.glob("*.py"))
        fix = f"there are: {', '.join(near[:8])}" if near else "the path is relative to the working directory"
        raise UserError(f"no such file {path}", where=where, fix=fix)
    path = path.resolve()
    # Two functions of one file share one module; an edited file, in a notebook, is read anew.
    key = hashlib.sha256(f"{path} {path.stat().st_mtime_ns}".encode()).hexdigest()[:16]
    name = f"{path.stem}_{key}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        with _surviving():
            specification.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise _import_failure(error, str(path), where=where) from None
    return module


def _load_module(name: str, *, where: str) -> ModuleType:
    # An installed command does not have the working directory on its path, `python` does.
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        with _surviving():
            return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            fix = "install it, run from its folder, or name its file: path/file.py:name"
            raise UserError(f"there is no module {error.name!r}", where=where, fix=fix) from None
        raise _import_failure(error, name, where=where) from None


@contextmanager
def _surviving() -> Iterator[None]:
    """Have code that ends the program with os._exit raise SystemExit, as sys.exit does.

    Else the program would end with the code's own exit status, 0 perhaps, and nothing said.
    """
    process, leave = os.getpid(), os._exit

    def stay(status: int) -> Any:
        if os.getpid() != process:
            leave(status)  # a process that the code has forked
        raise SystemExit(status)

    os._exit = stay
    try:
        yield
    finally:
        os._exit = leave


def _import_failure(error: BaseException, name: str, *, where: str) -> BaseException:
    """What to raise for an error of imported code: a UserError; Ctrl-C stays Ctrl-C."""
    if isinstance(error, KeyboardInterrupt):
        return error
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
    line = f", line {lines[-1]}" if lines else ""
    fix = "put what runs a program behind: if __name__ == '__main__'" if isinstance(error, SystemExit) else None
    return UserError(f"importing {name}{line} raises {type(error).__name__}: {error}", where=where, fix=fix)
