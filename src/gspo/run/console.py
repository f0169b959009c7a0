"""What a person sees of a run while it goes on: a live view in a terminal, plain lines elsewhere.

It loads nothing heavy, so that it can name what a command waits for from the start.
"""

import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.live import Live

from gspo.errors import printable
from gspo.run.live import PATIENCE_SECONDS, Activity, Phase, duration, view

_PLAIN_LINES = 40  # that a phase of quick steps prints where there is no terminal
_LINE_SECONDS = 60.0  # after which any step is printed there
_PLAIN_PATIENCE_SECONDS = 10.0
_NUMBER = re.compile(r"-?\d[\d.,]*")
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

    In a terminal a live view is drawn four times a second. Elsewhere a phase prints its first and its last step, about
    40 steps in between, and a step whenever none has been printed for a minute.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or _console(quiet)
        self._lock = threading.RLock()  # of what the timer changes, too
        self._live: Live | None = None
        self._phase: Phase | None = None
        self._activity: Activity | None = None
        self._timer: threading.Timer | None = None
        self._alert = ""
        self._printed: set[str] = set()  # names of activities that have a line in this phase
        self._recent: deque[str] = deque(maxlen=10)  # lines

    def note(self, text: str, style: str = "") -> None:
        """Print a line; it stays."""
        self._recent.extend(text.splitlines())
        self.console.print(printable(text), style=style, markup=False, soft_wrap=True)

    def alert(self, text: str) -> None:
        """Show a line at once; from a signal handler too, and where nobody reads it."""
        self._alert = text
        if self._live is None:
            with suppress(OSError):
                os.write(2, f"\n{text}\n".encode())  # not print: a handler may run in the middle of another one

    def diagnoses(self, sentences: Mapping[str, str], new: Collection[str]) -> None:
        """Show the diagnoses that hold now; where there is no live view, print those that are new."""
        if self._phase is not None and self._live is not None:
            self._phase.diagnoses = tuple(sentences.values())
            return
        for name in new:
            self.note(f"diagnosis: {sentences[name]}", style="yellow")

    def has_just_shown(self, text: str) -> bool:
        """Whether the text, with these or other numbers, is in one of the last ten lines."""
        words = _NUMBER.sub("", text)
        return any(words in _NUMBER.sub("", line) for line in self._recent)

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, or go on with it after `done` of them."""
        self.stop()
        self._phase = Phase(title=phase, total=total, step=done)
        self._printed, self._printed_at = set(), self._phase.started
        if self.console.is_interactive:
            self._start_live(transient=False)
        elif (every := _every(total)) > 1:
            log = "cold_start.jsonl" if phase == "cold start" else "metrics.jsonl"
            self.note(f"{phase}: a line every {every} steps, and at least once a minute; {log} has every step")

    def cold_step(self, step: int, loss: float) -> None:
        """Show one supervised step."""
        self._step(step, {"loss": loss})

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Show one step of reinforcement learning."""
        self._step(step, {"reward": line["reward/mean"], "response tokens": line["response/mean_tokens"]}, line)

    def _step(self, step: int, numbers: Mapping[str, float], line: Mapping[str, Any] | None = None) -> None:
        """A line is printed where there is no live view and one is due."""
        phase, now = self._phase, time.monotonic()
        assert phase is not None
        phase.add(step, numbers, line)
        is_due = step in (phase.first + 1, phase.total) or step % _every(phase.total) == 0
        if self._live is None and (is_due or now - self._printed_at >= _LINE_SECONDS):
            self._printed_at = now
            title = phase.title if line is None else "step"
            self.note(f"{title} {step}/{phase.total}  {phase.text}  left {duration(phase.seconds_left)}")

    def stop(self) -> None:
        """End the phase; what it showed stays on the screen."""
        with self._lock:
            if self._phase is not None and self._live is not None:
                self._recent.extend(self._phase.diagnoses)
            self._end_live()
            self._phase = None

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
        """A file descriptor for other processes to print to; in a terminal the lines are shown above the live view."""
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
            if activity is None and self._phase is None:
                self._end_live()
            is_shown = self._live is not None or self.console.quiet
            if activity is not None and not is_shown and activity.name not in self._printed:
                patience = PATIENCE_SECONDS if self.console.is_interactive else _PLAIN_PATIENCE_SECONDS
                self._show_after(patience, activity)

    def _show_after(self, seconds: float, activity: Activity) -> None:
        self._timer = threading.Timer(seconds, self._show, [activity])
        self._timer.daemon = True
        self._timer.start()

    def _show(self, activity: Activity) -> None:
        """It takes long: called by the timer."""
        with self._lock:
            if activity is not self._activity or self._live is not None:
                return
            if self.console.is_interactive:
                self._start_live(transient=True)
            else:
                self._printed.add(activity.name)
                self.note(activity.text)
                self._show_after(_LINE_SECONDS, activity)  # how far it is then

    def _start_live(self, *, transient: bool) -> None:
        self._live = Live(console=self.console, get_renderable=self._view, transient=transient, refresh_per_second=4)
        self._live.start(refresh=True)
        self.console.show_cursor(True)  # a process that is killed could not bring it back

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _view(self) -> Any:
        return view(self._phase, self._activity, self._alert, self.console.width)


def _console(quiet: bool) -> Console:
    """Standard output. FORCE_COLOR, which many services set, makes no terminal of a file."""
    output = cast(IO[str], _Output())
    is_interactive = None if output.isatty() and not quiet else False
    return Console(file=output, quiet=quiet, highlight=False, force_interactive=is_interactive)


def _every(total: int) -> int:
    """How many steps there are to a plain line."""
    return max(1, -(-total // _PLAIN_LINES))
