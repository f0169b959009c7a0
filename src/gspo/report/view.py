"""`gspo view`: the page of runs that go on, served to this machine alone; a sample is read when it is looked at."""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from gspo.errors import UserError
from gspo.report.page.data import run_data
from gspo.report.page.write import distinct, document, script_json
from gspo.report.run_files import Waiting, read_run
from gspo.report.samples import SampleSet, file_state, sample_sets
from gspo.run.lock import is_locked

_ADDRESS = "127.0.0.1"
_HOSTS = (_ADDRESS, "localhost")  # what a browser calls it; a page elsewhere that has its name lead here has another
_GROUP = re.compile(r"samples/(\d{1,6})/(\d{1,15})/(\d{1,9})\.json")
_WATCHED = ("recipe.yaml", "metrics.jsonl", "cold_start.jsonl", "history.jsonl")
_JSON, _HTML, _TEXT = "application/json", "text/html; charset=utf-8", "text/plain; charset=utf-8"


class Viewer:
    """The answers to the page of some runs; UserError where one cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = distinct(paths)
        self._sets: dict[Hashable, SampleSet] = {}  # one that a run is evaluated on later comes after those before
        self._answers: dict[str, tuple[object, str]] = {}  # what was answered last, and in what state of the files
        self.answer("data.json")

    def answer(self, name: str) -> tuple[str, str]:
        """The type and the text of a part of the page; LookupError where there is no such part."""
        if name == "":
            return _HTML, document([read_run(path) for path in self._paths], live=True)
        if name == "data.json":
            files = [path / name for path in self._paths for name in _WATCHED]
            return _JSON, self._kept(name, ([*map(file_state, files)], [*map(is_locked, self._paths)]), self._data)
        sets = [*self._sets.values()]
        if name == "samples.json":
            return _JSON, self._kept(
                name, [own.state for own in sets], lambda: json.dumps([own.index() for own in sets])
            )
        if match := _GROUP.fullmatch(name):
            number, step, place = map(int, match.groups())
            return _JSON, json.dumps(sets[number].group(step, place))
        raise LookupError("there is no such part of the page")

    def _kept(self, name: str, state: object, make: Callable[[], str]) -> str:
        if name not in self._answers or self._answers[name][0] != state:
            self._answers[name] = state, make()
        return self._answers[name][1]

    def _data(self) -> str:
        runs = [read_run(path) for path in self._paths]
        for samples in sample_sets(runs):
            self._sets.setdefault((samples.path, samples.evaluated), samples)
        return script_json(run_data(runs, live=True))


class Server(ThreadingHTTPServer):
    """Answers to whoever has its address, with a token that only who sees the terminal has."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int) -> None:
        self.viewer, self.token = Viewer(paths), secrets.token_urlsafe(16)
        try:
            super().__init__((_ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            fix = "name another, or none: then a free port is taken"
            raise UserError(f"port {port} cannot be used: {error}", where="--port", fix=fix) from None
        self.url = f"http://{_ADDRESS}:{self.server_port}/{self.token}/"


class _Handler(BaseHTTPRequestHandler):
    timeout = 60  # seconds for a question

    def do_GET(self) -> None:
        server = cast(Server, self.server)
        _, token, name = [*self.path.split("?")[0].split("/", 2), "", ""][:3]
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS or not secrets.compare_digest(token.encode(), server.token.encode()):
            return self._send(HTTPStatus.FORBIDDEN, _TEXT, "not allowed: open the address that gspo view printed")
        try:
            kind, text = server.viewer.answer(name)
        except (LookupError, UserError, OSError) as error:  # no such part, or its file has been removed since
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


def view(paths: Sequence[Path], port: int, *, note: Callable[[str], object], waiting: Waiting = nullcontext) -> None:
    """Serve the page until Ctrl-C."""
    with waiting("reading the run"):
        server = Server(paths, port)
    with server:
        note(f"view: {server.url} (for this machine alone; Ctrl-C ends it)")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    note("view: ended")
