"""One run, one tracker: sends what has not been sent, and notes how far it has come."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gspo.errors import UserError
from gspo.report.run_files import RunFiles
from gspo.report.shapes import section
from gspo.run.plain_files import for_writing
from gspo.trackers.sent import Sent, read_sent, write_sent
from gspo.trackers.steps import Steps
from gspo.trackers.tracker import Opening, Tracker, open_tracker


class Sender:
    """Opens its tracker once there is something to send; `sending` makes one."""

    def __init__(self, run: RunFiles, name: str) -> None:
        self.name = name
        self.num_sent = 0
        self._run = run
        self._home = home_of_trackers(run.path)
        self._sent = read_sent(self._file)
        self._tracker: Tracker | None = None
        self._steps: Steps | None = None

    def send(self, *, is_over: bool) -> None:
        """Send what is new; whatever the tracker raises comes through."""
        if self._steps is None:
            if not self._sent.closed:
                self._open()  # it may know what has arrived of what it was given
            self._steps = Steps(self._run.path, self._run.recipe, after=self._sent.step)
        for step in self._steps.new(is_over=is_over):
            tracker = self._tracker or self._open()
            tracker.log(step.number, step.metrics, step.samples)
            self.num_sent += 1
            self._note(Sent(run=tracker.run, step=step.number, closed=False))

    def close(self) -> None:
        """Have everything arrive."""
        if self._tracker is not None:
            self._tracker.close()
            self._note(Sent(run=self._tracker.run, step=self._sent.step, closed=True))

    def _open(self) -> Tracker:
        opening = Opening(
            run=self._sent.run,
            name=self._run.name,
            project=str(section(self._run.recipe, "report").get("project", "gspo")),
            config=self._run.recipe,
            directory=self._home / self.name,
        )
        self._tracker = tracker = open_tracker(self.name, opening)
        step = self._sent.step
        if not self._sent.closed and tracker.last_step is not None:
            step = tracker.last_step
        self._note(Sent(run=tracker.run, step=step, closed=False))
        return tracker

    def _note(self, sent: Sent) -> None:
        self._sent = sent
        write_sent(self._file, sent)

    @property
    def step(self) -> int:
        """The last one sent; -1: none."""
        return self._sent.step

    @property
    def _file(self) -> Path:
        return self._home / f"{self.name}.json"


def home_of_trackers(run: Path) -> Path:
    """The directory of a run in which its trackers' states, logs and files lie."""
    return run / "trackers"


@contextmanager
def sending(run: RunFiles, name: str, *, wait: bool) -> Iterator[Sender]:
    """A sender that is the only one of its run and tracker; UserError where another process has it, without `wait`."""
    home = home_of_trackers(run.path)
    try:
        home.mkdir(exist_ok=True)
        file = open(home / f"{name}.lock", "w", opener=for_writing)  # noqa: SIM115 - closed below
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise UserError(what, where=str(home), fix="make the directory writable") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            fix = f"wait until it has ended ({home / name}.log has what it says)"
            raise UserError(f"another process is sending this run to {name}", where=str(run.path), fix=fix) from None
        yield Sender(run, name)
