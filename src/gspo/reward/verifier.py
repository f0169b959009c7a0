"""The process in which answers are verified, which has no environment, and limits; `verifier_process` starts it.

Questions come pickled from the process that asks; replies go as JSON, each with the mark of its question. A completion
such as 9^{9^{9^9}} keeps sympy busy for hours inside one C call, which no exception can end. A process can be ended: it
ends itself, out of CPU time, and its parent, which has all imports done, forks the next.
"""

import contextlib
import json
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

Judge = Callable[[str], float]  # of one answer

MAX_MEMORY_BYTES = 4 * 2**30
PREPARATION_SECONDS = 15.0  # of CPU time, to read a question before its first answer
SILENT_SECONDS = 1.0  # scores are kept no longer, so that whoever asks knows that it goes on
IN_PREPARATION = -1
_PLACE = struct.Struct("i")  # of the answer under way among the question's


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
    progress = mmap.mmap(-1, _PLACE.size)  # shared with the processes that it forks
    while True:
        process = os.fork()
        if process == 0:
            with contextlib.suppress(EOFError, OSError):  # whoever asks is gone
                while True:
                    _answer(link, judge_of, link.recv(), progress)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status == 0:
            return
        _send(link, "ended", [status, *_PLACE.unpack_from(progress)])


def _load(kind: str) -> Callable[..., Judge]:
    """What makes a question's judge, with everything imported that it needs."""
    if kind == "math":
        from gspo.reward.mathematics import verdict as judges
    else:
        from gspo.reward import gym as judges  # type: ignore[no-redef]
    judges.warm_up()
    return judges.judge


def _answer(link: Connection, judge_of: Callable[..., Judge], question: Mapping[str, Any], progress: mmap.mmap) -> None:
    """Judge a question's answers one by one, each within its CPU time, and send the scores, together where they can."""
    scores, sent, judge = list[float](), time.monotonic(), None
    try:
        _PLACE.pack_into(progress, 0, IN_PREPARATION)
        _limit_cpu(PREPARATION_SECONDS)
        judge = judge_of(**question["subject"])
        for place, answer in enumerate(question["answers"]):
            _PLACE.pack_into(progress, 0, place)
            _limit_cpu(question["seconds"])
            scores.append(_score(judge, answer))
            if time.monotonic() - sent > SILENT_SECONDS:
                _send(link, "scores", scores, question["mark"])
                scores, sent = [], time.monotonic()
    except Exception as error:
        what = "the right answer cannot be used" if judge is None else "the verifier fails on an answer"
        _send(link, "refused", f"{what}: {type(error).__name__}: {error}", question["mark"])
    else:
        _send(link, "scores", scores, question["mark"])
    finally:
        _limit_cpu(0)


def _score(judge: Judge, answer: str) -> float:
    try:
        return judge(answer)
    except (MemoryError, RecursionError):
        return 0.0


def _limit_cpu(seconds: float) -> None:
    # The signal's default action ends the process from outside Python: a C call that never returns cannot stop it.
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _send(link: Connection, kind: str, content: Any = None, mark: str = "") -> None:
    link.send_bytes(json.dumps([mark, kind, content]).encode())
