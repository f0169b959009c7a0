"""A server that this run has started: its host and port, its log, and its end."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from gspo.engine.server.in_server import gspo_supervise
from gspo.errors import RunError
from gspo.model.linear import LIMITS

_NUM_LINES = 4  # of each kind, in a message
_LINE = 400  # characters
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
LOOPBACK = "127.0.0.1"


class LostHostError(RunError):
    """The host of a server is gone, and no other can be had while the run goes on."""


@runtime_checkable
class Process(Protocol):
    """A server's process, on any host."""

    log: Path

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Tell whether it has, or does within the seconds."""
        ...

    def said(self) -> str:
        """Return what it has written to its log: the lines that name an error, and the last ones."""
        ...

    def end(self) -> None:
        """End it, with all it has started; a second call does nothing."""
        ...


@runtime_checkable
class Host(Protocol):
    """The place where a server is started: this machine, or another of a cluster."""

    @property
    def address(self) -> str:
        """The address by which the trainer reaches the server."""
        ...

    def free_port(self) -> int:
        """A port of that address that nothing listens on now."""
        ...

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start a command that ends with this run."""
        ...


class ServerProcess:
    """A command under a supervisor, in a process group of its own that ends with this process, however that ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self._start = file.tell()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", gspo_supervise.__file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**dict(os.environ.items() - LIMITS.items()), **environment},  # which are ours
                start_new_session=True,
            )

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Tell whether it has, or does within the seconds: its supervisor ends with it, but a little later."""
        try:
            self._supervisor.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False

    def said(self) -> str:
        """Return what this server has written to its log: the first lines that name an error, and the last ones."""
        with self.log.open("rb") as file:
            file.seek(self._start)
            lines = [line[:_LINE] for line in file.read().decode(errors="replace").splitlines()]
        errors = [line for line in lines[:-_NUM_LINES] if _ERROR.search(line)]
        return "\n    ".join([*errors[:_NUM_LINES], *lines[-_NUM_LINES:]])

    def end(self) -> None:
        """End it, with all it has started; a second call does nothing."""
        self._supervisor.kill()  # so that it starts nothing more
        mark, seconds = str(self._supervisor.pid), gspo_supervise.END_SECONDS
        gspo_supervise.end_marked(gspo_supervise.SUPERVISOR, mark, seconds=seconds)
        self._supervisor.wait()


@dataclass(frozen=True, kw_only=True)
class ThisHost:
    """This machine, and the GPUs of it that a server gets.

    Example: ThisHost(devices="0,1")
    """

    devices: str | None = None  # all
    threads: int | None = None  # of torch; None: as the environment has it
    address: str = LOOPBACK

    def free_port(self) -> int:
        """A port of the loopback interface that nothing listens on now."""
        return free_port(self.address)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
        """Start a command that ends with this process."""
        shown = {} if self.devices is None else {"CUDA_VISIBLE_DEVICES": self.devices}
        threads = {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}
        return ServerProcess(command, {**environment, **shown, **threads}, log)


def free_port(address: str = LOOPBACK) -> int:
    """A port of this machine's address that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
