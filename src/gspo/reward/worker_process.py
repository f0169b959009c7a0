"""The trainer's side of one worker process: it is started, spoken to, listened to and ended here."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil

from gspo.errors import UserError
from gspo.reward.calls import Call
from gspo.reward.process_tree import MARK, end_tree

START_SECONDS = 120.0

Listener = Callable[["WorkerProcess", Any], None]


class WorkerProcess:
    """A process that makes calls of one function; two threads of the trainer talk to it and wait for it.

    Only the listening thread writes `ready`, `refusal`, `blocked_by` and `ended`; `running` and `cancelled` are kept by
    whoever uses the process.
    """

    def __init__(self, setup: Mapping[str, Any], directory: Path, listener: Listener) -> None:
        self.ready = False
        self.ended = False  # its end of the connection is closed
        self.garbled = ""  # what it said last, where that is no message
        self.refusal: UserError | None = None  # why it cannot start
        self.blocked_by: int | None = None  # the call that holds up its event loop
        self.running: dict[int, Call] = {}
        self.cancelled: set[int] = set()
        self._listener = listener
        self._mark = uuid.uuid4().hex
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._outgoing.put(setup)
        self._link, theirs = Pipe()
        # -P: a file in the working directory that bears a standard module's name must not stand in for it.
        command = [sys.executable, "-P", "-m", "gspo.reward.worker", str(theirs.fileno()), self._mark]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is seen, and passes for nothing else
                cwd=directory,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(setup["path"]), MARK: self._mark},
                start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
            )
        except OSError as error:
            raise UserError(f"its process cannot be started: {error}", where=f"reward {setup['name']}") from None
        finally:
            theirs.close()
        self._seen = psutil.Process(self._process.pid)

    def listen(self) -> None:
        """Start the two threads."""
        sender = threading.Thread(target=_send, args=(self._link, self._outgoing), name="reward sender", daemon=True)
        sender.start()
        threading.Thread(target=self._listen, args=(sender,), name="reward listener", daemon=True).start()

    def is_alive(self) -> bool:
        """Whether the process has not ended, though the listener may not know of it yet."""
        try:
            return not self.ended and self._seen.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def ask(self, *request: Any) -> None:
        """Send a request, without waiting for the process to take it."""
        self._outgoing.put(request)

    def end(self) -> int:
        """Kill the process with all that it has started; its exit status, as subprocess has it."""
        if self._process.returncode is None:
            end_tree(self._process.pid, self._mark)
        return self._process.wait()

    def _listen(self, sender: threading.Thread) -> None:
        try:
            if not self._link.poll(START_SECONDS):
                self.refusal = UserError(f"its process is not ready after {START_SECONDS:g} s")
                self._listener(self, None)
            while True:
                kind, content = self._message()
                if kind == "refused":
                    self.refusal = UserError(content[0], fix=content[1])
                elif kind == "blocked":
                    self.blocked_by = content
                self.ready = self.ready or kind == "ready"
                self._listener(self, content if kind == "done" else None)
        except (EOFError, OSError, ValueError):
            self.ended = True
            self._listener(self, None)
        self._outgoing.put(None)
        sender.join()  # closed before, the connection's number could be another's while it is written to
        self._link.close()

    def _message(self) -> tuple[str, Any]:
        """The next message; ValueError, and the text of it noted, where it is none."""
        said = self._link.recv_bytes()
        try:
            kind, content = json.loads(said)
            if _FORMS[kind](content):
                return kind, content
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        self.garbled = f"its process says what is no message: {said[:80]!r}"
        raise ValueError(self.garbled)


# What the messages of each kind hold: the function may have written into the connection.
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "ready": lambda content: content is None,
    "blocked": lambda content: isinstance(content, int),
    "refused": lambda content: [type(text) for text in content] in ([str, str], [str, type(None)]),
    "done": lambda content: isinstance(content[0], int) and isinstance(content[1], dict) and len(content) == 2,
}


def _send(link: Connection, outgoing: "SimpleQueue[Any]") -> None:
    try:
        while (message := outgoing.get()) is not None:
            link.send(message)
    except OSError:
        return  # the listener hears of it too


def how_it_ended(status: int) -> str:
    """A process's end in words, from its exit status."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    try:
        return f"its process was ended by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"its process was ended by signal {-status}"
