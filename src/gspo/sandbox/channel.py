"""Frames between the client, the server inside a sandbox and the process of a program. Standard library only."""

import json
import socket
import struct
from typing import Any

FRAME = struct.Struct("<II")


class Channel:
    """Frames of a header, as JSON, and bytes, between two that trust each other."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def fileno(self) -> int:
        """The file descriptor, to poll."""
        return self.link.fileno()

    def send(self, body: bytes = b"", **header: Any) -> None:
        """Send a frame."""
        head = json.dumps(header).encode()
        self.link.sendall(FRAME.pack(len(head), len(body)) + head)
        self.link.sendall(body)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame; SystemExit where the other has gone."""
        head_size, body_size = FRAME.unpack(self._read(FRAME.size))
        return json.loads(self._read(head_size)), self._read(body_size)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            if not (got := self.link.recv_into(view)):
                raise SystemExit(0)
            view = view[got:]
        return bytes(data)
