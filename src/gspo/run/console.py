"""What a person sees of a run while it goes on: lines and, in a terminal, a bar below them.

It loads nothing heavy, so that it can name what a command waits for from the start.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from gspo.errors import printable
from gspo.loop import in_thread

_COLD_LINES = 40  # of a cold start, whose steps are quick
_LINE_SECONDS = 60.0  # where there is no terminal: after these, what is waited for has a line
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
    """The thing that is waited for.

    Example: Activity(name="evaluating", count=(312, 512, "responses"))
    """

    name: str
    count: tuple[int, int, str] = (0, 0, "")  # done, of how many, of what
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = time.monotonic()

    @property
    def text(self) -> str:
        """The name, the seconds so far and the count, where there is one; of what takes long the time that is left."""
        seconds, (done, total, what) = time.monotonic() - self.started, self.count
        count = f", {done:,} of {total:,} {what}" if total else ""
        left = f", about {duration(seconds * (total - done) / done)} left" if 0 < done < total and seconds > 30 else ""
        return f"{self.name}: {seconds:.0f} s so far{count}{left}"


class Display:
    """Shows a run on a rich console: its notes, its phases with their steps, and what is being waited for.

    Each step has a line; of a cold start about every 40th. In a terminal a bar is below the lines.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or _console(quiet)
        self.just_shown: Sequence[str] = ()  # names of diagnoses that have a line since the last step
        self._activity: Activity | None = None
        self._timer: threading.Timer | None = None  # of its next line, where there is no terminal
        self._bar: Progress | None = None
        self._phase, self._total, self._done, self._started = "", 0, 0, 0.0

    def note(self, text: str, style: str = "") -> None:
        """Print a line; it stays."""
        self.console.print(printable(text), style=style, markup=False, soft_wrap=True)

    def alert(self, text: str) -> None:
        """Show a line at once; from a signal handler too, and where nobody reads it."""
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())  # not print: a handler may run in the middle of another one

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, or go on with it after `done` of them."""
        self.stop()
        self._phase, self._total, self._done, self._started = phase, total, done, time.monotonic()
        self._draw()

    def step(self, step: int, text: str) -> None:
        """Show a step."""
        left = (time.monotonic() - self._started) / (step - self._done) * (self._total - step)
        is_cold = self._phase == "cold start"
        every = max(1, self._total // _COLD_LINES) if is_cold else 1
        if step in (self._done + 1, self._total) or step % every == 0:
            name = self._phase if is_cold else "step"
            self.note(f"{name} {step}/{self._total}  {text}  left {duration(left)}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def stop(self) -> None:
        """End the phase; what it showed stays on the screen."""
        self._phase = ""
        self._end_bar()

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Name what a stage of a step is waiting for."""
        return self.waiting(_STAGES[name]) if name in _STAGES else nullcontext()

    @contextmanager
    def waiting(self, name: str) -> Iterator[Callable[[str], None]]:
        """Name what the block waits for; the function names what comes next."""
        outer = self._activity
        self._set(Activity(name=name))
        try:
            yield lambda name: self._set(Activity(name=name))
        finally:
            self._set(outer)

    def progress(self, done: int, total: int, unit: str) -> None:
        """Show how far that has come which is waited for."""
        if self._activity is not None:
            self._activity.count = (done, total, unit)

    @contextmanager
    def output_of_processes(self) -> Iterator[int]:
        """A file descriptor for other processes to print to; in a terminal the lines are shown above the bar."""
        if not self.console.is_interactive or not os.isatty(2):
            yield 2
            return
        end, descriptor = os.pipe()
        relayed = in_thread("output of processes", self._relay, end)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            wait([relayed], timeout=1.0)  # a process that has outlived the run may hold it open

    def _relay(self, end: int) -> None:
        with open(end, errors="replace") as lines:
            for line in lines:
                self.note(line.rstrip("\n"))

    def _set(self, activity: Activity | None) -> None:
        self._activity = activity
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.console.is_interactive:
            if activity is None and not self._phase:
                self._end_bar()
            elif self._bar is None:
                self._draw()
        elif activity is not None and not self.console.quiet:
            self._print_after(activity)

    def _print_after(self, activity: Activity) -> None:
        self._timer = threading.Timer(_LINE_SECONDS, self._print, [activity])
        self._timer.daemon = True
        self._timer.start()

    def _print(self, activity: Activity) -> None:
        if activity is self._activity:
            self.note(activity.text)
            self._print_after(activity)

    def _draw(self) -> None:
        """Show a phase and what is waited for or, where there is no phase, the latter alone until it ends."""
        if not self.console.is_interactive:
            return
        column = Column(ratio=3, no_wrap=True)
        columns: list[Any] = [TextColumn("{task.fields[display].waited_for}", "cyan", table_column=column)]
        if self._phase:
            bar, times = BarColumn(None, table_column=Column(ratio=1)), (TimeElapsedColumn(), TimeRemainingColumn())
            columns = [TextColumn("{task.description}", "bold"), bar, MofNCompleteColumn(), *times, *columns]
        options: dict[str, Any] = {"transient": not self._phase, "expand": True, "speed_estimate_period": math.inf}
        self._bar = Progress(*columns, console=self.console, **options)
        self._bar.add_task(self._phase, total=self._total, completed=self._done, display=self)
        self._bar.start()
        self.console.show_cursor(True)  # a process that is killed could not bring it back

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @property
    def waited_for(self) -> str:
        """Return what a bar says of it."""
        return escape(printable(self._activity.text)) if self._activity is not None else ""


class _Output:
    """Standard output, for as long as somebody reads it: a terminal that is closed must not end a run."""

    def __init__(self) -> None:
        self._stream = sys.stdout
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")  # a terminal of another encoding has no ▁▂▃

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError:
            drop_output()

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            drop_output()


def drop_output() -> None:
    """Discard what standard output still gets; else the interpreter complains at its end that it cannot write it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _console(quiet: bool) -> Console:
    """Standard output. FORCE_COLOR, which many services set, makes no terminal of a file."""
    output = cast(IO[str], _Output())
    is_interactive = None if output.isatty() and not quiet else False
    return Console(file=output, quiet=quiet, highlight=False, force_interactive=is_interactive)


def duration(seconds: float) -> str:
    """Return such as `0:31` or `2:05:09`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
