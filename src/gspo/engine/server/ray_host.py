"""Hosts of servers that Ray has chosen: on each an actor of Ray's starts a server, and rank 0 asks it to."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.engine.server.process import LOOPBACK, LostHostError, ServerProcess, free_port
from gspo.errors import UserError

HOSTS = "GSPO_ENGINE_HOSTS"  # of the environment of a rank: the cluster's address, and the names of the actors
NAMESPACE = "gspo"  # in which Ray knows them
_SECONDS = 30.0  # for an answer


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
        address = self._answer(actor.address)
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
        try:
            return bool(self._answer(self._actor.ask, "has_ended", seconds))
        except LostHostError:
            return True

    def said(self) -> str:
        """Return what the server has written to its log, or that its node is gone."""
        try:
            return str(self._answer(self._actor.ask, "said"))
        except LostHostError as error:
            return str(error)

    def end(self) -> None:
        """End the server; where its node is gone, it has."""
        try:
            self._answer(self._actor.ask, "end")
        except LostHostError:
            return

    def _answer(self, method: Any, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(method.remote(*arguments), timeout=_SECONDS)
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
