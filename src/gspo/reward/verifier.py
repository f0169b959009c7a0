"""The process in which answers are verified, which has no environment, and limits; `verifier_process` starts it.

Questions come pickled from the process that asks; replies go as JSON, each with the mark of its question. A completion
such as 9^{9^{9^9}} keeps sympy busy for hours inside one C call, which no exception can end. A process can be ended: it
ends itself, out of CPU time, and its parent, which has all imports done, forks the next.
"""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Judge = Callable[[str], float]  # of one answer

MAX_MEMORY_BYTES = 4 * 2**30
PREPARATION_SECONDS = 30.0  # of CPU time, to read a question before its first answer


def serve(link: Connection, kind: str) -> None:
    """Say that it is ready, then answer questions of a kind, one process after another, until the link is closed."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    for limit, value in ((resource.RLIMIT_AS, MAX_MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS refuses the first
            resource.setrlimit(limit, (value, value))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        judge_of = _load(kind)
    except BaseException as error:
        _send(link, "refused", f"{type(error).__name__}: {error}")
        return
    _send(link, "ready")
    while True:
        process = os.fork()
        if process == 0:
            with contextlib.suppress(EOFError, OSError):  # whoever asks is gone
                while True:
                    _answer(link, judge_of, link.recv())
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status == 0:
            return
        _send(link, "ended", status)


def _load(kind: str) -> Callable[..., Judge]:
    """What makes a question's judge, with everything imported that it needs."""
    if kind == "math":
        from gspo.reward.mathematics import verdict as judges
    else:
        from gspo.reward import gym as judges  # type: ignore[no-redef]
    judges.warm_up()
    return judges.judge


def _answer(link: Connection, judge_of: Callable[..., Judge], question: Mapping[str, Any]) -> None:
    """Judge a question's answers one by one, each within its CPU time."""
    mark = question["mark"]
    try:
        _limit_cpu(PREPARATION_SECONDS)
        judge = judge_of(**question["subject"])
    except Exception as error:
        _send(link, "refused", f"{type(error).__name__}: {error}", mark)
        return
    _send(link, "prepared", None, mark)
    for answer in question["answers"]:
        _limit_cpu(question["seconds"])
        try:
            score = judge(answer)
        except (MemoryError, RecursionError):
            score = 0.0
        except Exception as error:
            _send(link, "refused", f"{type(error).__name__}: {error}", mark)
            return
        finally:
            _limit_cpu(0)
        _send(link, "score", score, mark)


def _limit_cpu(seconds: float) -> None:
    # The signal's default action ends the process from outside Python: a C call that never returns cannot stop it.
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(link: Connection, kind: str, content: Any = None, mark: str = "") -> None:
    link.send_bytes(json.dumps([mark, kind, content]).encode())
