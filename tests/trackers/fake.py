"""A tracker that keeps what it gets, and fails or hangs where it is told to."""

import threading
from typing import Any

from gspo.report.run_files import RunFiles, Table
from gspo.trackers.tracker import Tracker

PATIENCE = 60.0  # seconds after which a test gives up


class FakeTracker:
    """`fails` maps a verb to what it raises; in the verb `hangs` names it waits until `let_go`."""

    def __init__(self) -> None:
        self.opened: list[str | None] = []  # the ids of the run that it was given
        self.steps: list[int] = []
        self.logged: list[tuple[dict[str, float], Table]] = []
        self.num_finished = 0
        self.last_step: int | None = None  # that it says it has
        self.fails: dict[str, BaseException] = {}
        self.hangs = ""
        self.is_hanging, self.let_go = threading.Event(), threading.Event()

    def open(self, run: RunFiles, run_id: str | None, seconds: float) -> Tracker:
        self.opened.append(run_id)
        self._misbehave("open")
        return Tracker(run_id="number 1", last_step=self.last_step, log=self._log, finish=self._finish)

    def _log(self, step: int, metrics: Any, samples: Table) -> None:
        self._misbehave("log")
        self.steps.append(step)
        self.logged.append((dict(metrics), samples))

    def _finish(self) -> None:
        self._misbehave("finish")
        self.num_finished += 1

    def _misbehave(self, verb: str) -> None:
        if verb in self.fails:
            raise self.fails[verb]
        if verb == self.hangs:
            self.is_hanging.set()
            assert self.let_go.wait(PATIENCE)
