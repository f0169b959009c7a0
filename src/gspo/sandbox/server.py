"""The harness in a sandbox, seen from outside: it is started, spoken to and ended here. It may be hostile."""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from gspo.errors import UserError
from gspo.sandbox.isolation import LOADER_VARIABLES, find_bubblewraps, isolated_command
from gspo.sandbox.seccomp import compile_filter

START_SECONDS = 120.0
MAX_REPLY_BYTES = 2**12
_VARIABLES = {
    "LD_BIND_NOW": "1",  # what is linked at the start need not be linked in each fork
    "PYTHONHASHSEED": "0",  # what an order of hashes decides can be repeated
}
_REFUSED = (
    "bubblewrap needs user namespaces, a mount of /proc and version 0.8 or newer. Ubuntu 24.04: allow bwrap user "
    "namespaces (an AppArmor profile, or sysctl kernel.apparmor_restrict_unprivileged_userns=0). Docker: run with "
    "--security-opt seccomp=unconfined --security-opt systempaths=unconfined. docs/sandbox.md says more"
)


class ServerDiedError(Exception):
    """The server has ended, or says what is no message."""


class Server:
    """A bubblewrap with the harness; UserError where it cannot start."""

    def __init__(self, packages: Sequence[str], warm: Sequence[str], *, compiler: bool = False) -> None:
        *others, last = find_bubblewraps()
        for bubblewrap in others:  # a profile of AppArmor, or the rights of directories, may allow the last alone
            with contextlib.suppress(UserError):
                self._start(bubblewrap, packages, warm, compiler)
                return
        self._start(last, packages, warm, compiler)

    def _start(self, bubblewrap: str, packages: Sequence[str], warm: Sequence[str], compiler: bool) -> None:
        self._link, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("filter"), "r+b") as file:
            file.write(compile_filter())
            file.seek(0)
            try:
                self._process = subprocess.Popen(
                    isolated_command(bubblewrap, file.fileno(), packages, warm, compiler),
                    stdin=theirs.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[file.fileno()],
                    env={name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ} | _VARIABLES,
                    cwd="/",
                )
            except OSError as error:
                self._link.close()
                raise UserError(f"code cannot be isolated: {error}", fix=_REFUSED) from None
        try:
            self.receive(time.monotonic() + START_SECONDS)
        except (ServerDiedError, TimeoutError):
            self._process.kill()
            assert self._process.stdout
            said = self._process.stdout.read(4000).decode(errors="replace").strip()
            self.end()
            what = f"code cannot be isolated: the sandbox does not start: {said or 'it says nothing'}"
            raise UserError(what, fix=_REFUSED) from None

    def send(self, header: dict[str, Any], files: Sequence[int]) -> None:
        """Send a request for a run, with its files."""
        with contextlib.suppress(OSError):  # it has ended: `receive` says so
            socket.send_fds(self._link, [json.dumps(header).encode()], files)

    def receive(self, deadline: float) -> dict[str, Any]:
        """Return the next message; ServerDiedError where there is none, TimeoutError where there is none in time."""
        self._link.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            if isinstance(said := json.loads(self._link.recv(MAX_REPLY_BYTES)), dict):
                return said
        except TimeoutError:
            raise
        except Exception:  # it may say anything
            pass
        raise ServerDiedError

    def end(self) -> None:
        """Kill it with all that runs inside, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._link.close()
        assert self._process.stdout
        self._process.stdout.close()
