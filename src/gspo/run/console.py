"""What a person sees of a run while it goes on: lines and, in a terminal, a bar below them.

It loads nothing heavy, so that it can name what a command waits for from the start.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from gspo.errors import printable
from gspo.run.step_line import step_line

_LINES = 40  # that a phase of quick steps prints
_LINE_SECONDS = 60.0  # after which any step is printed, and where there is no terminal what is waited for, too
_PATIENCE_SECONDS = 2.0  # what takes less is over before anybody has read a word of it
_PLAIN_PATIENCE_SECONDS = 10.0
_STAGES = {  # of a clock; the others take no time
    "publish": "handing new weights to the engine",
    "rollout": "sampling responses",
    "reward": "waiting for rewards",
    "appraisal": "reading responses with reference and value model",
    "likelihood": "reading responses with the old policy",
    "update": "updating the weights",
    "checkpoint": "saving a checkpoint",
    "evaluation": "evaluating",
    "hooks": "calling hooks",
}


@dataclass(kw_only=True)
class Activity:
    """What is waited for.

    Example: Activity(name="evaluating", count=(312, 512, "responses"))
    """

    name: str
    count: tuple[int, int, str] | None = None  # done, of how many, of what
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    @property
    def text(self) -> str:
        """The name, the seconds so far and the count, where there is one; of what takes long the time that is left."""
        seconds, (done, total, what) = time.monotonic() - self.started, self.count or (0, 0, "")
        count = f", {done:,} of {total:,} {what}" if total else ""
        left = f", about {_duration(seconds * (total - done) / done)} left" if 0 < done < total and seconds > 30 else ""
        return f"{self.name}: {seconds:.0f} s so far{count}{left}"


class _Output:
    """Standard output, for as long as somebody reads it: a terminal that is closed must not end a run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys.stdout, "rich_proxied_file", sys.stdout), name)  # not rich's own, while it is live

    def write(self, text: str) -> None:
        write = self.__getattr__("write")
        try:
            try:
                write(text)
            except UnicodeEncodeError:  # a terminal of another encoding has no ▁▂▃
                encoding = self.__getattr__("encoding")
                write(text.encode(encoding, "replace").decode(encoding))
        except OSError:
            drop_output()

    def flush(self) -> None:
        try:
            self.__getattr__("flush")()
        except OSError:
            drop_output()


def drop_output() -> None:
    """Discard what standard output still gets; else the interpreter complains at its end that it cannot write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Display:
    """Shows a run on a rich console: its notes, its phases with their steps, and what is being waited for.

    A phase prints its first and its last step, about 40 steps in between, and a step whenever none has been printed for
    a minute. In a terminal it prints every step of reinforcement learning, and a bar is drawn four times a second.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or _console(quiet)
        self._lock = threading.RLock()  # of what the timer changes, too
        self._bar: Progress | None = None
        self._has_phase = False
        self._every, self._printed_at = 1, 0.0  # steps to a line, and when the last one was printed
        self._activity: Activity | None = None
        self._timer: threading.Timer | None = None
        self.just_shown: frozenset[str] = frozenset()  # names of diagnoses that have a line since the last step
        self._printed: set[str] = set()  # names of activities that have a line in this phase

    def note(self, text: str, style: str = "") -> None:
        """Print a line; it stays."""
        self.console.print(printable(text), style=style, markup=False, soft_wrap=True)

    def alert(self, text: str) -> None:
        """Show a line at once; from a signal handler too, and where nobody reads it."""
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())  # not print: a handler may run in the middle of another one

    def diagnoses(self, sentences: Mapping[str, str], new: Collection[str]) -> None:
        """Print those of the diagnoses that are new."""
        self.just_shown |= frozenset(new)
        for name in new:
            self.note(f"diagnosis: {sentences[name]}", style="yellow")

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, or go on with it after `done` of them."""
        self.stop()
        is_cold = phase == "cold start"  # its steps are quick
        self._every = 1 if self.console.is_interactive and not is_cold else max(1, -(-total // _LINES))
        self._has_phase, self._printed, self._printed_at = True, set(), time.monotonic()
        if self._every > 1:
            log = "cold_start.jsonl" if is_cold else "metrics.jsonl"
            self.note(f"{phase}: a line every {self._every} steps, and at least once a minute; {log} has every step")
        self._start_bar(phase, total, done)

    def cold_step(self, step: int, loss: float) -> None:
        """Show one supervised step."""
        self._step(step, "cold start", f"loss {loss:.3f}")

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Show one step of reinforcement learning."""
        self._step(step, "step", step_line(line))

    def _step(self, step: int, name: str, text: str) -> None:
        assert self._bar is not None
        self.just_shown = frozenset()
        (task,), now = self._bar.tasks, time.monotonic()
        self._bar.update(task.id, completed=step)
        is_due = step in (task.fields["first"], task.total) or step % self._every == 0
        if is_due or now - self._printed_at >= _LINE_SECONDS:
            self._printed_at = now
            self.note(f"{name} {step}/{task.total}  {text}  left {_duration(task.time_remaining or 0.0)}")

    def stop(self) -> None:
        """End the phase; what it showed stays on the screen."""
        with self._lock:
            self._end_bar()
            self._has_phase = False

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Name what a stage of a step is waiting for."""
        return self.waiting(_STAGES[name]) if name in _STAGES else nullcontext()

    @contextmanager
    def waiting(self, name: str) -> Iterator[Callable[[str], None]]:
        """Name what the block waits for, which is shown once it takes seconds; the function names what comes next."""
        outer = self._activity
        self._set(Activity(name=name))
        try:
            yield lambda name: self._set(Activity(name=name))
        finally:
            self._set(outer)

    def progress(self, done: int, total: int, unit: str) -> None:
        """How far that has come which is waited for."""
        if self._activity is not None:
            self._activity.count = (done, total, unit)

    @contextmanager
    def output_of_processes(self) -> Iterator[int]:
        """A file descriptor for other processes to print to; in a terminal the lines are shown above the bar."""
        if not self.console.is_interactive or not os.isatty(2):
            yield 2
            return
        end, descriptor = os.pipe()
        relay = threading.Thread(target=self._relay, args=[end], daemon=True)
        relay.start()
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            relay.join(timeout=1.0)  # a process that has outlived the run may hold it open

    def _relay(self, end: int) -> None:
        with open(end, errors="replace") as lines:
            for line in lines:
                self.note(line.rstrip("\n"))

    def _set(self, activity: Activity | None) -> None:
        with self._lock:
            self._activity = activity
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if activity is None and not self._has_phase:
                self._end_bar()
            is_shown = self._is_drawn or self.console.quiet
            if activity is not None and not is_shown and activity.name not in self._printed:
                patience = _PATIENCE_SECONDS if self.console.is_interactive else _PLAIN_PATIENCE_SECONDS
                self._show_after(patience, activity)

    def _show_after(self, seconds: float, activity: Activity) -> None:
        self._timer = threading.Timer(seconds, self._show, [activity])
        self._timer.daemon = True
        self._timer.start()

    def _show(self, activity: Activity) -> None:
        """It takes long: called by the timer."""
        with self._lock:
            if activity is not self._activity or self._is_drawn:
                return
            if self.console.is_interactive:
                self._start_bar()
            else:
                self._printed.add(activity.name)
                self.note(activity.text)
                self._show_after(_LINE_SECONDS, activity)  # how far it is then

    def _start_bar(self, phase: str = "", total: int | None = None, done: int = 0) -> None:
        """Show a phase and what is waited for or, where there is no phase, the latter alone until it ends."""
        column = Column(ratio=3, no_wrap=True)
        columns: list[ProgressColumn] = [TextColumn("{task.fields[display].waited_for}", "cyan", table_column=column)]
        if phase:
            bar, times = BarColumn(None, table_column=Column(ratio=1)), (TimeElapsedColumn(), TimeRemainingColumn())
            columns = [TextColumn("{task.description}", "bold"), bar, MofNCompleteColumn(), *times, *columns]
        self._bar = Progress(
            *columns, console=self.console, transient=not phase, expand=True, speed_estimate_period=math.inf
        )
        task = self._bar.add_task(phase, total=total, completed=done, display=self, first=done + 1)
        self._bar.advance(task, 0)  # the time from which the first step is reckoned
        if self._is_drawn:
            self._bar.start()
            self.console.show_cursor(True)  # a process that is killed could not bring it back

    def _end_bar(self) -> None:
        if self._bar is not None and self._is_drawn:
            self._bar.stop()
        self._bar = None

    @property
    def _is_drawn(self) -> bool:
        return self._bar is not None and self.console.is_interactive

    @property
    def waited_for(self) -> str:
        """What a bar says of it: in a phase nothing before it has taken seconds."""
        activity = self._activity
        if activity is None or (self._has_phase and time.monotonic() - activity.started < _PATIENCE_SECONDS):
            return ""
        return escape(printable(activity.text))


def _console(quiet: bool) -> Console:
    """Standard output. FORCE_COLOR, which many services set, makes no terminal of a file."""
    output = cast(IO[str], _Output())
    is_interactive = None if output.isatty() and not quiet else False
    return Console(file=output, quiet=quiet, highlight=False, force_interactive=is_interactive)


def _duration(seconds: float) -> str:
    """Such as `0:31` or `2:05:09`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
