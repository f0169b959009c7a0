"""A laboratory: a directory with data, reward and recipe, in which runs are begun, broken and resumed."""

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 60  # after which a test gives up; none takes nearly as long
ENGINE_SECONDS = 300  # for runs that start servers of their own
START_SECONDS = 600  # for the server's imports, which take long on a machine of many other jobs
VARIES = ("time/", "throughput/", "memory/", "seconds", "idle_fraction")  # between two runs of one recipe
REWARD = """
def score(completions, trainer_state, log_metric, log_extra, **columns):
    log_metric("length", sum(map(len, completions)) / len(completions))
    log_extra("epoch", [trainer_state.epoch] * len(completions))
    return [text.count("a") - 0.1 * len(text) - trainer_state.global_step for text in completions]
"""
AS_EVER = REWARD.replace("def score", "def as_ever")  # for a reward that goes wrong at times
WORDS = ("a", "cat", "sat", "on", "the", "mat", "and", "a", "dog", "ate", "it", "all")
ROWS = [
    {"prompt": f"{word} {word} is", "completion": f"{letter} {word} a a"}
    for word, letter in zip(WORDS, "xabacadaeafa", strict=True)
]
Fault = tuple[str, dict[str, Any]]


class Process:
    """A run under way."""

    def __init__(self, pid: int, status: "queue.Queue[int]") -> None:
        self.pid = pid
        self._status = status

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """Its exit status, negative where a signal has ended it."""
        return self._status.get(timeout=seconds)

    def is_running(self) -> bool:
        return self._status.empty()


class Server:
    """Starts runs (server.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._started: queue.Queue[int] = queue.Queue()
        self._statuses: dict[int, queue.Queue[int]] = {}
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(START_SECONDS)

    def start(self, arguments: list[str], directory: Path, fault: Fault | None) -> Process:
        request = {"arguments": arguments, "directory": str(directory), "fault": fault}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = self._started.get(timeout=SECONDS)
        return Process(pid, self._statuses[pid])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.startswith("{"):
                continue
            answer = json.loads(line)
            if "ready" in answer:
                self._ready.set()
            elif "status" in answer:
                self._statuses[answer["pid"]].put(answer["status"])
            elif "pid" in answer:
                self._statuses[answer["pid"]] = queue.Queue()
                self._started.put(answer["pid"])


class Laboratory:
    """One directory, one run in it, however often it is begun."""

    def __init__(self, server: Server, home: Path) -> None:
        self._server = server
        self.home = home
        home.mkdir(exist_ok=True)
        shutil.copy(HERE / "run.yaml", home)
        (home / "reward.py").write_text(REWARD)
        (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def beside(self, name: str) -> "Laboratory":
        """Another one, near this one."""
        return Laboratory(self._server, self.home.with_name(name))

    @property
    def run(self) -> Path:
        return self.home / "run"

    def start(self, *arguments: str, fault: Fault | None = None) -> Process:
        """Begin `gspo` with these arguments."""
        for name in ("out", "err"):
            (self.home / name).unlink(missing_ok=True)
        return self._server.start(list(arguments), self.home, fault)

    def train(self, *overrides: str, fault: Fault | None = None) -> int:
        """`gspo train` from the start; its exit status."""
        return self.start("train", "run.yaml", *overrides, fault=fault).wait()

    def resume(self, *overrides: str, fault: Fault | None = None) -> int:
        """`gspo resume`; its exit status."""
        return self.start("resume", "run", *overrides, fault=fault).wait()

    @property
    def said(self) -> str:
        """What the last run printed."""
        return "".join((self.home / name).read_text() for name in ("out", "err") if (self.home / name).exists())

    def lines(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """The whole lines of a log, without what differs between equal runs; the run may be writing another."""
        *whole, _ = (self.run / name).read_text().split("\n")
        lines = [json.loads(line) for line in whole]
        return [{key: value for key, value in line.items() if not any(s in key for s in VARIES)} for line in lines]

    def checkpoints(self, *, unfinished: bool = False, folder: str = "checkpoints") -> list[str]:
        """The names of checkpoints, those set aside as damaged too."""
        root = self.run / folder
        names = sorted(entry.name for entry in root.iterdir()) if root.exists() else []
        return names if unfinished else [name for name in names if not name.startswith("unfinished")]

    def wait_for(self, path: str, process: Process) -> None:
        """Until a file is there."""
        give_up = time.monotonic() + SECONDS
        while not (self.home / path).exists():
            assert process.is_running() and time.monotonic() < give_up, self.said
            time.sleep(0.005)

    def reward(self, text: str) -> None:
        """Another reward function."""
        (self.home / "reward.py").write_text(text)

    def flip(self, path: str, position: float = 0.5) -> None:
        """Flip one bit of a file of the run."""
        content = bytearray((self.run / path).read_bytes())
        content[int(position * (len(content) - 1))] ^= 4
        (self.run / path).write_bytes(content)

    def result(self) -> dict[str, Any]:
        """All that an unbroken run and a resumed one must have in common, bit by bit."""
        last = self.run / "checkpoints" / self.checkpoints()[-1]
        files = [*(self.run / "model").iterdir(), *(self.run / "rollouts").iterdir(), last / "state.safetensors"]
        contents = {path.relative_to(self.run).as_posix(): path.read_bytes() for path in files}
        return contents | {name: self.lines(name) for name in ("metrics.jsonl", "cold_start.jsonl")}


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names under which two results differ."""
    return [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
