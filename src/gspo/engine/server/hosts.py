"""The hosts of servers, and a server's process: on this machine, or where an actor of Ray's starts it."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.engine.server.in_server import gspo_supervise
from gspo.errors import RunError, UserError
from gspo.model.linear import LIMITS

_NUM_LINES = 4  # of each kind, in a message
_LINE = 400  # characters
_ERROR = re.compile(r"\b[A-Z]\w*(Error|Exception): ")
LOOPBACK = "127.0.0.1"

HOSTS = "GSPO_ENGINE_HOSTS"  # of the environment of a rank: the cluster's address, and the names of the actors
NAMESPACE = "gspo"  # in which Ray knows them
_ANSWER_SECONDS = 30.0  # of an actor
_START_SECONDS = 300.0  # for the first: its process imports torch, on a node that may have just come


class LostHostError(RunError):
    """The host of a server is gone, and no other can be had while the run goes on."""


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


class HostActor:
    """An actor of Ray's on a node: it starts a server there, which ends with the actor."""

    def address(self) -> str:
        """The address of the node."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def free_port(self, address: str) -> int:
        """A port of the node's address that nothing listens on now."""
        return free_port(address)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start a server, once the one before it has ended."""
        self._process = ServerProcess(command, environment, log)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the server's process says."""
        return getattr(self._process, method)(*arguments)


class RayHost:
    """A node where rank 0 has a server started, and the process of that server."""

    def __init__(self, actor: Any, own_address: str) -> None:
        """`own_address` is that of rank 0's node, where a server is reached without the network."""
        self._actor, self.log, self.address = actor, Path(), ""
        address = self._answer(actor.address, seconds=_START_SECONDS)
        self.address = LOOPBACK if address == own_address else address

    def free_port(self) -> int:
        """A port of the address that nothing listens on now."""
        port: int = self._answer(self._actor.free_port, self.address)
        return port

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "RayHost":
        """Start a server there; LostHostError where the node is gone."""
        self._answer(self._actor.start, command, environment, log)
        self.log = log
        return self

    def has_ended(self, seconds: float = 0.0) -> bool:
        """Tell whether the server has, or its node is gone."""
        return bool(self._of_process("has_ended", seconds))

    def said(self) -> str:
        """Return what the server has written to its log, or that its node is gone."""
        return str(self._of_process("said"))

    def end(self) -> None:
        """End the server; where its node is gone, it has."""
        self._of_process("end")

    def _of_process(self, method: str, *arguments: Any) -> Any:
        """Return what a method of the server's process does, or the error where the node is gone."""
        try:
            return self._answer(self._actor.ask, method, *arguments)
        except LostHostError as error:
            return error

    def _answer(self, method: Any, *arguments: Any, seconds: float = _ANSWER_SECONDS) -> Any:
        import ray

        try:
            return ray.get(method.remote(*arguments), timeout=seconds)
        except ray.exceptions.RayError as error:
            # Of an error that was raised there, the last line says what it is.
            reason = str(error).strip().rpartition("\n")[2] if isinstance(error, ray.exceptions.RayTaskError) else ""
            what = f"a server's host {self.address} is lost, or cannot be used: {reason or type(error).__name__}"
            raise LostHostError(what) from None


def ray_hosts(number: int) -> list[RayHost]:
    """The hosts that Ray has chosen for so many servers."""
    if HOSTS not in os.environ:
        what = f"no Ray has placed {number} servers of the engine"
        fix = "gspo launch ray places them; on one machine set cluster.engines: 0"
        raise UserError(what, where="cluster.engines", fix=fix)
    import ray

    address, *names = os.environ[HOSTS].split()
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level="ERROR", log_to_driver=False)
        actors = [ray.get_actor(name) for name in names]
    except (OSError, ValueError, RuntimeError) as error:
        raise LostHostError(f"Ray does not say where the servers' hosts are: {error}") from None
    return [RayHost(actor, ray.util.get_node_ip_address()) for actor in actors]


Host = ThisHost | RayHost
Process = ServerProcess | RayHost


def free_port(address: str = LOOPBACK) -> int:
    """A port of this machine's address that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port
