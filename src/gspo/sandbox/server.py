"""The server inside a sandbox, seen from outside: it is started, spoken to and ended here. It may be hostile."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from gspo.errors import UserError
from gspo.sandbox import plain
from gspo.sandbox.isolation import LOADER_VARIABLES, find_bubblewraps, isolated_command
from gspo.sandbox.seccomp import compile_filter

START_SECONDS = 120.0
MAX_HEADER_BYTES = 2**17
_FRAME = struct.Struct("<II")
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
    """The server has ended, is late or says what is no message; it has been killed."""

    def __init__(self, *, is_late: bool = False) -> None:
        self.is_late = is_late
        super().__init__("late" if is_late else "dead")


class Server:
    """A bubblewrap with the server of `inside`; UserError where it cannot start."""

    def __init__(self, packages: Sequence[str], warm: Sequence[str], *, compiler: bool = False) -> None:
        *others, last = find_bubblewraps()
        for bubblewrap in others:  # a profile of AppArmor, or the rights of directories, may allow the last alone
            with contextlib.suppress(UserError):
                self._start(bubblewrap, packages, warm, compiler)
                return
        self._start(last, packages, warm, compiler)

    def _start(self, bubblewrap: str, packages: Sequence[str], warm: Sequence[str], compiler: bool) -> None:
        filter_program = compile_filter()
        self._link, theirs = socket.socketpair()
        number = os.memfd_create("filter")
        try:
            os.write(number, filter_program)
            os.lseek(number, 0, os.SEEK_SET)
            command = isolated_command(
                bubblewrap,
                filter_number=number,
                link_number=theirs.fileno(),
                packages=packages,
                warm=warm,
                compiler=compiler,
            )
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # pipes, as those of the programs that are forked from it
                stderr=subprocess.PIPE,
                pass_fds=[number, theirs.fileno()],
                env={name: os.environ[name] for name in LOADER_VARIABLES if name in os.environ} | _VARIABLES,
                cwd="/",
            )
        except OSError as error:
            self._link.close()
            raise UserError(f"code cannot be isolated: {error}", fix=_REFUSED) from None
        finally:
            os.close(number)
            theirs.close()
        try:
            self.receive(time.monotonic() + START_SECONDS, 0)
        except ServerDiedError:
            assert self._process.stderr
            said = self._process.stderr.read(4000).decode(errors="replace").strip()
            self.end()
            what = f"code cannot be isolated: the sandbox does not start: {said or 'it says nothing'}"
            raise UserError(what, fix=_REFUSED) from None

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, body: bytes, deadline: float, **header: Any) -> None:
        """Send a frame; ServerDiedError where it is not taken in time."""
        head = json.dumps(header).encode()
        try:
            self._link.settimeout(max(deadline - time.monotonic(), 0.001))
            self._link.sendall(_FRAME.pack(len(head), len(body)) + head)
            self._link.sendall(body)
        except TimeoutError:
            self._died(is_late=True)
        except OSError:
            pass  # it has ended: `receive` says so, after what it sent before its end

    def receive(self, deadline: float, max_bytes: int) -> tuple[dict[str, Any], bytes]:
        """The next frame, with a body of at most so many bytes; ServerDiedError where there is none in time."""
        try:
            head_size, body_size = _FRAME.unpack(self._read(_FRAME.size, deadline))
            if head_size > MAX_HEADER_BYTES or body_size > max(max_bytes, plain.MAX_BYTES * 2):
                self._died()
            header = json.loads(self._read(head_size, deadline))
            if not isinstance(header, dict):
                self._died()
            return header, self._read(body_size, deadline)
        except (OSError, ValueError, RecursionError) as error:
            self._died(is_late=isinstance(error, TimeoutError))

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._link.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (got := self._link.recv_into(view)):
                raise OSError("the server has ended")
            view = view[got:]
        return bytes(data)

    def _died(self, *, is_late: bool = False) -> NoReturn:
        self._process.kill()
        raise ServerDiedError(is_late=is_late)

    def end(self) -> None:
        """Kill it with all that runs inside, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        for file in (self._link, self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                file.close()  # type: ignore[union-attr]
