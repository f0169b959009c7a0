"""A package `wandb` that keeps what it is sent in a file, and misbehaves on demand."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

_PACKAGE = """
import json, os, sys, time

MISCHIEF = os.environ.get("MISCHIEF")


class Settings:
    def __init__(self, **_):
        pass


class Table:
    def __init__(self, **_):
        pass


class Run:
    offline, resumed = True, False

    def __init__(self, number, file):
        self.id, self._file = number, file

    def log(self, numbers, step, commit):
        if MISCHIEF == "dies" and step == 2:
            os.kill(os.getpid(), 9)
        numbers = {key: value for key, value in numbers.items() if not isinstance(value, Table)}
        with open(self._file, "a") as file:
            file.write(json.dumps([self.id, step, numbers]) + "\\n")

    def finish(self):
        if MISCHIEF == "fails at the end":
            raise TimeoutError("no answer")


def init(*, id, dir, **_):
    file = os.path.join(dir, "fake.jsonl")
    process = {
        "session": os.getsid(0) == os.getpid(),
        "niceness": os.nice(0),
        "files": [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")],
        "input": os.path.realpath("/proc/self/fd/0"),
        "modules": sorted(sys.modules),
    }
    with open(os.path.join(dir, "process.json"), "w") as out:
        json.dump(process, out)
    if MISCHIEF == "raises":
        raise ConnectionError("no such host")
    if MISCHIEF == "hangs":
        time.sleep(600)
    return Run(id or f"number-{os.getpid()}", file)
"""


class FakeWandb:
    """The package, found before the real one by this process and those it starts."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = directory / "wandb"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(_PACKAGE)
        self._patch = monkeypatch
        monkeypatch.syspath_prepend(directory)
        monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)

    def misbehave(self, how: str | None) -> None:
        """From now on: raises, hangs, dies, fails at the end; or no longer."""
        self._patch.setenv("MISCHIEF", how or "")


def sent(run: Path) -> list[Any]:
    """The lines of what it was sent: its number for the run, the step, the numbers."""
    return [json.loads(line) for line in (run / "trackers" / "fake.jsonl").read_text().splitlines()]


def process(run: Path) -> Mapping[str, Any]:
    """What kind of process has sent it."""
    found: Mapping[str, Any] = json.loads((run / "trackers" / "process.json").read_text())
    return found
