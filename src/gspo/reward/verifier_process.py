"""The side of a verifier that asks: it starts the process, sends answers, checks what comes back, and ends it."""

import contextlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from gspo.reward.verifier import IN_PREPARATION

START_SECONDS = 120.0
WALL_SECONDS = 30.0  # more than an answer's CPU time: for a process that sleeps or is stopped, or a very busy machine

# The path comes as data, for the process is to have no environment.
_START = """
import sys
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
sys.path[:], kind = link.recv()
from gspo.reward.verifier import serve
serve(link, kind)
"""
# Without these the interpreter itself may not start; they are the loader's, and say nothing of the user.
_LOADER_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
_ANSWERS_FAULT = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL, signal.SIGPROF}


class VerifierError(RuntimeError):
    """The verifier has failed through no fault of an answer: the completion is masked, not wrong."""


class Verifier:
    """A verifier of one kind, whose process is started when it is first needed, and again when it was ended."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()  # a function given from Python is called in many threads
        self._link: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready; VerifierError where it cannot start."""
        with self._lock, self._ended_on_error():
            self._running()

    def scores(self, subject: Mapping[str, Any], answers: Sequence[str], *, seconds: float) -> list[float]:
        """The score of each answer to one question; 0.0 where it takes more than the seconds of CPU time.

        Raises VerifierError where the question cannot be judged, or the process ends otherwise.
        """
        with self._lock, self._ended_on_error():
            scores: list[float] = []
            while len(scores) < len(answers):
                scores += self._ask(subject, answers[len(scores) :], seconds)
            return scores

    def end(self) -> None:
        """End the process; a further question starts one."""
        with self._lock:
            self._end()

    def _ask(self, subject: Mapping[str, Any], answers: Sequence[str], seconds: float) -> list[float]:
        """The scores up to the answer with which the process has ended, 0.0 for that one."""
        link, mark = self._running(), secrets.token_hex(8)
        link.send({"mark": mark, "subject": subject, "answers": list(answers), "seconds": seconds})
        scores: list[float] = []
        while len(scores) < len(answers):
            kind, content = self._reply(link, mark, seconds + WALL_SECONDS)
            if kind == "refused":
                raise VerifierError(content)
            if kind == "scores":
                scores += content[: len(answers) - len(scores)]
                continue
            status, place = content
            if place == IN_PREPARATION:
                raise VerifierError(f"reading the right answer ends the verifier's process: exit status {status}")
            if -status not in _ANSWERS_FAULT:
                raise VerifierError(f"the verifier's process has ended: exit status {status}")
            unsent = answers[len(scores) : place]
            return [*scores, *(self._ask(subject, unsent, seconds) if unsent else ()), 0.0]
        return scores

    def _reply(self, link: Connection, mark: str, seconds: float) -> tuple[str, Any]:
        """The next reply, once it is sure that it is one; VerifierError for anything else."""
        if not link.poll(seconds):
            raise VerifierError(f"the verifier has said nothing for {seconds:g} s")
        try:
            said = link.recv_bytes()
            replied, kind, content = json.loads(said)
            if replied == ("" if kind == "ended" else mark) and _FORMS[kind](content):
                return kind, content
        except (EOFError, OSError):
            raise VerifierError("the verifier's process has ended") from None
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            pass
        raise VerifierError(f"the verifier says what is no reply: {said[:80]!r}")

    def _running(self) -> Connection:
        if self._process is not None and self._process.poll() is not None:
            self._end()  # somebody has ended it while nothing was asked
        if self._link is None:
            self._start()
        assert self._link is not None
        return self._link

    def _start(self) -> None:
        self._link, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: os.environ[name] for name in _LOADER_VARIABLES if name in os.environ},
                start_new_session=True,  # Ctrl-C is for the trainer, which still wants its answers
            )
        self._link.send(([os.path.abspath(path) for path in sys.path if path], self._kind))  # noqa: PTH100
        kind, content = self._reply(self._link, "", START_SECONDS)
        if kind != "ready":
            raise VerifierError(f"the verifier of {self._kind} cannot start: {content}")

    @contextlib.contextmanager
    def _ended_on_error(self) -> Any:
        try:
            yield
        except BaseException as error:  # what the process still says would pass for the next question's reply
            self._end()
            if isinstance(error, OSError):
                raise VerifierError(f"the verifier's process has ended: {error}") from None
            raise

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._link = self._process = None


# What the replies of each kind hold.
_FORMS: Mapping[str, Callable[[Any], bool]] = {
    "ready": lambda content: content is None,
    "refused": lambda content: isinstance(content, str),
    "ended": lambda content: [type(number) for number in content] == [int, int],
    "scores": lambda content: isinstance(content, list) and all(_is_score(score) for score in content),
}


def _is_score(content: Any) -> bool:
    return isinstance(content, float | int) and not isinstance(content, bool) and math.isfinite(content)


VERIFIERS: Mapping[str, Verifier] = {kind: Verifier(kind) for kind in ("math", "reasoning_gym")}
