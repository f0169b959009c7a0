"""`gspo view`: the page of runs that go on, served to this machine alone; a sample is read when it is looked at."""

import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from gspo.errors import UserError
from gspo.report.page.write import distinct, document, page_json
from gspo.report.run_files import Waiting, read_run
from gspo.report.sample_index import file_state, sample_sets
from gspo.run.lock import is_locked

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")  # what a browser calls it; a page elsewhere that has its name lead here has another
_GROUP = re.compile(r"samples/(\d{1,6})/(\d{1,15})/(\d{1,9})\.json")
_READING_SECONDS = 1.0  # of an answer: a long run's files are read in several
_WATCHED = ("recipe.yaml", "metrics.jsonl", "cold_start.jsonl", "history.jsonl")
_JSON, _HTML, _TEXT = "application/json", "text/html; charset=utf-8", "text/plain; charset=utf-8"


class Viewer:
    """What is answered to the page of some runs; UserError where that cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._lock = distinct(paths), threading.Lock()
        self._runs = [read_run(path) for path in self._paths]
        self._sets = sample_sets(self._runs)
        self._answers: dict[str, tuple[Hashable, str]] = {}  # what was answered last, and in what state of the files

    def answer(self, name: str) -> tuple[str, str]:
        """The type and the text of a part of the page; LookupError where there is no such part."""
        with self._lock:
            if name == "":
                return _HTML, document([read_run(path) for path in self._paths], live=True)
            if name == "data.json":
                return _JSON, self._kept(name, self._state(), self._data)
            if name == "samples.json":
                keys = {samples.key for samples in self._sets}  # of the sets that have a number in the page
                self._sets += [samples for samples in sample_sets(self._runs) if samples.key not in keys]
                left = [samples.look(_READING_SECONDS) for samples in self._sets]
                num_read = sum(len(samples.steps) for samples in self._sets)
                # While a long run is read its index is sent when it has doubled: all of it is a few times its size.
                state = num_read.bit_length() if any(left) else tuple(samples.state for samples in self._sets)
                return _JSON, self._kept(name, state, lambda: self._indices(left))
            if match := _GROUP.fullmatch(name):
                number, step, place = map(int, match.groups())
                return _JSON, json.dumps(self._sets[number].group(step, place))
        raise LookupError(name)

    def _kept(self, name: str, state: Hashable, make: Callable[[], str]) -> str:
        if name not in self._answers or self._answers[name][0] != state:
            self._answers[name] = state, make()
        return self._answers[name][1]

    def _data(self) -> str:
        return page_json([read_run(path) for path in self._paths], live=True)

    def _indices(self, left: Sequence[int]) -> str:
        return json.dumps([samples.index(left=num_left) for samples, num_left in zip(self._sets, left, strict=True)])

    def _state(self) -> Hashable:
        """What changes when a run does."""
        files = [path / name for path in self._paths for name in _WATCHED]
        return tuple(map(file_state, files)), tuple(map(is_locked, self._paths))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, viewer: Viewer) -> None:
        super().__init__((_ADDRESS, port), _Handler)
        self.viewer, self.token = viewer, secrets.token_urlsafe(16)  # nobody who does not see the terminal has it

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{_ADDRESS}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds for a question

    def do_GET(self) -> None:
        server = cast(_Server, self.server)
        _, token, name = [*self.path.split("?")[0].split("/", 2), "", ""][:3]
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS or not secrets.compare_digest(token.encode(), server.token.encode()):
            return self._send(HTTPStatus.FORBIDDEN, _TEXT, "not allowed: open the address that gspo view printed")
        try:
            kind, text = server.viewer.answer(name)
        except LookupError:
            return self._send(HTTPStatus.NOT_FOUND, _TEXT, "there is no such part of the page")
        except (UserError, OSError) as error:  # a file that has been removed since, say
            return self._send(HTTPStatus.NOT_FOUND, _TEXT, str(error))
        return self._send(HTTPStatus.OK, kind, text)

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            status, content = HTTPStatus.NOT_MODIFIED, b""
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "ETag": tag, "Cache-Control": "no-cache"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        with suppress(ConnectionError):  # the browser has gone on
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is for what matters."""


def server_of(paths: Sequence[Path], port: int) -> _Server:
    """Listen for the page's browser; UserError where a directory is no run, or the port cannot be had."""
    viewer = Viewer(paths)
    try:
        return _Server(port, viewer)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "there is no such port"
        fix = "name another, or none: then a free port is taken"
        raise UserError(f"port {port} cannot be used: {why}", where="--port", fix=fix) from None


def view(paths: Sequence[Path], port: int, *, note: Callable[[str], object], waiting: Waiting = nullcontext) -> None:
    """Serve the page until Ctrl-C."""
    with waiting("reading the run"):
        server = server_of(paths, port)
    with server:
        note(f"view: {server.url} (for this machine alone; Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    note("view: ended")
