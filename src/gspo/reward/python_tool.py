"""The built-in environment `python`: an interpreter in the sandbox, of which each response has its own."""

import json
import os
import secrets
import threading
from queue import Empty, LifoQueue
from typing import Any

from gspo.sandbox.sandbox import Limits, Sandbox

PLACES = os.cpu_count() or 1  # calls at a time: each has a sandbox, which computes
LIMITS = Limits(wall_seconds=20.0)
_places, _free = threading.BoundedSemaphore(PLACES), LifoQueue[Sandbox]()
_PROGRAM = """
import ast, contextlib, io, sys, traceback

def run(code):
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<python>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<python>", "eval"), names)
        if value is not None:
            print(repr(value))

names = {{"__name__": "__main__"}}
*earlier, code = {cells}
if any("numpy" in cell for cell in (*earlier, code)):
    with contextlib.suppress(ImportError):
        import numpy
        numpy.random.seed(0)
for cell in earlier:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(BaseException):
            run(cell)
fault = ""
try:
    run(code)
except SystemExit:
    pass
except BaseException as error:
    fault = traceback.format_exception_only(error)[-1].strip()
sys.stdout.write({end!r} + fault)
"""


class Python:
    """A Python interpreter without network and files of this machine."""

    def reset(self, **row: Any) -> None:
        """Begin without names."""
        self._cells = list[str]()

    def python(self, code: str) -> str:
        """Run Python code and return what it prints. Names keep their values from call to call.

        Args:
            code: The code. The value of an expression on its last line is printed, too.
        """
        # Those before are run again, silently: whatever a call leaves behind, no process has to be kept for a response.
        end = secrets.token_hex(16)  # printed behind all that code prints, unless that has ended the interpreter
        with _places:  # a call that was given up keeps its own until its code has ended
            try:
                sandbox = _free.get_nowait()
            except Empty:
                sandbox = Sandbox()
            try:
                ran = sandbox.run(_PROGRAM.format(cells=repr([*self._cells, code]), end=end), limits=LIMITS)
            finally:
                _free.put(sandbox)
        output, found, fault = ran.output.decode(errors="replace").rpartition(end)
        if not found or ran.ending != "finished":  # it is not run again, either
            reason = "it has ended the interpreter" if ran.ending in ("finished", "failed") else f"limit: {ran.ending}"
            return f"error: the code did not run to its end, {reason}"
        self._cells.append(code)
        if not fault:
            return output.strip()
        return f"error: {fault}" + (f"; printed before: {json.dumps(output, ensure_ascii=False)}" if output else "")
