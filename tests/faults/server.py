"""Runs of gspo as processes of their own, without its imports anew for each: a server that forks a run a request.

Reads one JSON request a line, {"arguments", "directory", "fault"}, and answers {"pid"} as soon as the run has begun and
{"pid", "status"} once it has ended. The fault, [name, keyword arguments], is a function of injections.py, called in the
new process before anything else.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import datasets  # noqa: F401 - everything a run imports
import reasoning_gym  # noqa: F401
import torch
import transformers
from tests.faults import injections
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: F401

import gspo.train  # noqa: F401
from gspo import cli
from gspo.metrics.definitions import families

_answering = threading.Lock()


def serve() -> int:
    """Answer requests until standard input ends; an exit status."""
    torch.set_num_threads(1)  # other threads would not survive the fork
    transformers.utils.logging.disable_progress_bar()
    families(), get_checkpoint_conversion_mapping("qwen3_moe")  # tables that each run would make, and of no run's own
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        with _answering:  # no thread may hold the lock of standard output when the process is copied
            pid = os.fork()
        if pid == 0:
            injections.end_with(lambda: _run(request))  # noqa: B023 - this process has one request
        _answer({"pid": pid})
        threading.Thread(target=_wait, args=(pid,), daemon=True).start()
    return 0


def _wait(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    _answer({"pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _answer(answer: dict[str, Any]) -> None:
    with _answering:
        os.write(1, f"{json.dumps(answer)}\n".encode())


def _run(request: dict[str, Any]) -> int:
    """In the new process: what `gspo` does with its arguments."""
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)  # a shell's background job inherits them ignored
    os.chdir(request["directory"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(os.open("out", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(os.open("err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if request["fault"]:
        name, keywords = request["fault"]
        getattr(injections, name)(**keywords)
    return cli.main(request["arguments"])


if __name__ == "__main__":
    injections.end_with(serve)  # without the seconds in which Python lets go of all it has imported
