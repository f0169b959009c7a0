"""The faults, each put into a run's own process at an exact place; the process dies, fails or is disturbed for real."""

import ctypes
import hashlib
import itertools
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch

from gspo import cli
from gspo.engine.embedded import decoding
from gspo.engine.server.vllm import VllmApi
from gspo.errors import HAS_LAUNCHER
from gspo.launch import ranks
from gspo.launch.ranks import LocalRank
from gspo.learner import forward_passes, loss, shares
from gspo.learner import ranks as learner_ranks
from gspo.learner import sft as coldstart
from gspo.learner.optimizer import Optimizer
from gspo.run import collect, directory
from gspo.run.checkpoint import checkpointer, store
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.recorder import Recorder

# By name: an object and its attribute, called at that place of a run.
PLACES: dict[str, tuple[Any, str]] = {
    "sampling": (decoding, "sample_tokens"),
    "old likelihoods": (forward_passes, "response_likelihood"),
    "gradient": (loss, "response_likelihood"),
    "cold gradient": (coldstart, "response_likelihood"),
    "optimizer step": (Optimizer, "step"),
    "snapshot": (Checkpointer, "_snapshot"),
    "publish": (checkpointer, "move_into_place"),
    "cold end": (directory, "move_into_place"),
    "best model": (directory.RunDirectory, "save_best"),
    "best model copied": (directory.shutil, "copytree"),
    "cold record": (Recorder, "cold_step"),
    "request": (VllmApi, "sample"),
    "group sampled": (collect, "_score_ahead"),  # beside the training: before it is scored
}


def end_with(main: Callable[[], int]) -> NoReturn:
    """End this process, a copy of another, with the status of this."""
    status = 1
    try:
        status = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def signal_at(place: str, count: int, number: int = signal.SIGKILL, before: bool = True, saved: bool = False) -> None:
    """Send this process a signal at the `count`-th call of a place, just before or just after it.

    With `saved`, once the checkpoint that is being written is on the disk.
    """

    def send() -> None:
        for thread in threading.enumerate():
            if saved and thread.name == "checkpoint writer":
                thread.join()
        os.kill(os.getpid(), number)

    _at(place, count, send, before=before)


def kill_server_at(calls: Sequence[tuple[str, int]]) -> None:
    """Kill the first process of the run's own engine at these calls, (place, count)."""

    def kill() -> None:
        for own in psutil.Process().children():
            if own.status() != psutil.STATUS_ZOMBIE and "gspo_supervise" in " ".join(own.cmdline()):
                own.children()[0].kill()

    for place, count in calls:
        _at(place, count, kill)


def forked_ranks() -> None:
    """The ranks of a launcher are copies of it: programs would each import anew what it has, for seconds of a core."""
    ranks.LocalRank = _ForkedRank  # type: ignore[assignment, misc]


def forked_ranks_on_gpus() -> None:
    """Ranks as under NCCL: a collective with a rank that is not there never ends, and raises nothing."""
    forked_ranks()
    join = learner_ranks._join
    endless = {"_join": lambda size, *_: join(size, 3600.0, "gloo"), "_take_gpu": lambda: None}
    endless["_uses_gpus"] = lambda _: True
    gpu = {"current_device": lambda: 0, "default_stream": lambda _: None, "Event": _Mark}
    for holder, changes in ((learner_ranks, endless), (torch.cuda, gpu)):
        for name, change in changes.items():
            setattr(holder, name, change)


class _Mark:
    """A mark in a GPU's work: it is reached once the main thread is in no collective."""

    def __init__(self, blocking: bool) -> None:
        assert blocking, "else the host would spin"

    def record(self, _: None) -> None:
        """Is put behind all work so far."""

    def synchronize(self) -> None:
        while any("/torch/distributed/" in frame.f_code.co_filename for frame in self._innermost()):
            time.sleep(0.02)

    def _innermost(self) -> list[FrameType]:
        stack = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident or 0])
        return [frame for frame, _ in itertools.islice(stack, 4)]


class _ForkedRank:
    returncode: int | None = None
    how_ended = LocalRank.how_ended

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, Any], **_: Any) -> None:
        sys.stdout.flush()
        self._until_end = os.pipe()  # a rank ends when its input does
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.dup2(self._until_end[0], 0)
            os.environ |= {**{name: str(value) for name, value in environment.items()}, HAS_LAUNCHER: "yes"}
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the launcher collects them
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            end_with(lambda: cli.main(list(arguments)))

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fail_at(place: str, count: int) -> None:
    """Raise an OSError at the `count`-th call of a place."""

    def fail() -> None:
        raise OSError(5, "Input/output error")

    _at(place, count, fail)


def fail_then_signal(place: str, count: int, number: int) -> None:
    """As `fail_at`, with a signal before anybody has heard of it."""

    def fail() -> None:
        os.kill(os.getpid(), number)
        raise OSError(5, "Input/output error")

    _at(place, count, fail)


def deaf_output() -> None:
    """Standard output is a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


def kill_in_save(operation: int, path: str) -> None:
    """Kill this process at one of the operations of its saves: every write (before, half done, after), sync and rename.

    At -1 none of them; then their names, one a line, are written to `path`, and what a process that is killed there
    leaves: the same digest where it is the same files.
    """
    numbers = itertools.count()
    log = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the process

    def point(name: str, half: Callable[[], None] | None = None) -> None:
        number = next(numbers)
        if operation == -1:
            print(f"{name}\t{number if half else _digest(Path('run'), number)}", file=log, flush=True)
        if number == operation:
            if half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def around(holder: Any, name: str, *, target: int | None = None) -> None:
        original = getattr(holder, name)

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            point(f"before {name} {Path(arguments[target or 0]).name}")
            result = original(*arguments, **keywords)
            if target is not None:
                written = Path(arguments[target])
                point(f"half {name} {written.name}", lambda: os.truncate(written, written.stat().st_size // 2))
            point(f"after {name} {Path(arguments[target or 0]).name}")
            return result

        for module in (holder, checkpointer, store, directory):
            if getattr(module, name, None) is original:
                setattr(module, name, wrapped)

    for holder, name, target in ((Path, "write_text", 0), (Path, "write_bytes", 0), (shares, "save_file", 1)):
        around(holder, name, target=target)
    for name in ("sync", "move_into_place", "remove"):
        around(store, name)
    _around_model_files(point)


def _digest(directory: Path, number: int) -> str:
    """Of the names and contents of all files; the number itself where one is moved meanwhile."""
    digest = hashlib.sha256()
    try:
        for path in sorted(directory.rglob("*")):
            digest.update(f"{path}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    except FileNotFoundError:
        return str(number)
    return digest.hexdigest()


def _around_model_files(point: Callable[..., None]) -> None:
    import transformers.modeling_utils as saving

    original = saving.safe_save_file

    def wrapped(tensors: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        point("before model weights")
        original(tensors, path, *arguments, **keywords)
        point("half model weights", lambda: os.truncate(path, Path(path).stat().st_size // 2))
        point("after model weights")

    saving.safe_save_file = wrapped


def no_room(num_bytes: int, count: int) -> None:
    """From the `count`-th optimiser step on no file may grow beyond so many bytes: what a full disk does to a write."""
    _at("optimizer step", count, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes)))


def stuck_save(path: str) -> None:
    """Saves never end; `path` is made once one has begun."""

    def wait() -> None:
        Path(path).touch()
        time.sleep(600)

    _at("publish", None, wait)


def without_privileges() -> None:
    """File modes hold for this process, though it be root's."""
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    assert ctypes.CDLL(None).capset(header, nothing) == 0


def nan_gradients(first: int, last: int) -> None:
    """The gradient is NaN in the optimiser steps from `first` to `last`."""
    original, numbers = Optimizer.step, itertools.count(1)

    def step(self: Optimizer, **keywords: Any) -> Any:
        if first <= next(numbers) <= last:
            for parameter in self._masters.values():
                parameter.grad = torch.full_like(parameter, torch.nan)
        return original(self, **keywords)

    Optimizer.step = step  # type: ignore[method-assign]


def broken_weights(count: int) -> None:
    """The weights are NaN after the `count`-th optimiser step, as after an overflow."""
    original, numbers = Optimizer.step, itertools.count(1)

    def step(self: Optimizer, **keywords: Any) -> Any:
        report = original(self, **keywords)
        if next(numbers) == count:
            with torch.no_grad():
                for parameter in self._masters.values():
                    parameter.fill_(torch.nan)
        return report

    Optimizer.step = step  # type: ignore[method-assign]


def clock_set_back(count: int) -> None:
    """From the `count`-th optimiser step on, the wall clock says 1980."""
    original, numbers = time.time, itertools.count(1)

    def back() -> None:
        if next(numbers) >= count:
            time.time = lambda: original() - 46 * 365 * 86_400
            time.time_ns = lambda: int(time.time() * 1e9)

    _at("optimizer step", None, back)


def slow_steps(seconds: float) -> None:
    """Every optimiser step takes so much longer."""
    _at("optimizer step", None, lambda: time.sleep(seconds))


def _at(place: str, count: int | None, act: Callable[[], None], *, before: bool = True) -> None:
    holder, name = PLACES[place]
    original, numbers = getattr(holder, name), itertools.count(1)

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        due = next(numbers) == count or count is None
        if due and before:
            act()
        result = original(*arguments, **keywords)
        if due and not before:
            act()
        return result

    setattr(holder, name, wrapped)
