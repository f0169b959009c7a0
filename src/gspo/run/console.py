"""What the person sees: a live display in a terminal, plain lines elsewhere, nothing when asked for quiet."""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gspo.errors import printable

_PLAIN_LINES = 40  # lines a phase prints at most where there is no terminal
_ROWS = 12  # last steps shown live


class _Output:
    """Standard output, for as long as somebody reads it: a terminal that is closed must not end a run."""

    def write(self, text: str) -> int:
        self._call("write", text)
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def _call(self, method: str, *arguments: str) -> None:
        try:
            getattr(self._stream(), method)(*arguments)
        except OSError:
            sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for the rest of the program

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream(), name)

    def _stream(self) -> Any:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # not what rich puts there during a live display


class Display:
    """Shows phases of a run and its steps on a rich console."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False) -> None:
        self.console = console or Console(file=cast(IO[str], _Output()), quiet=quiet, highlight=False)
        self._live: Live | None = None
        self._rows: list[Mapping[str, str]] = []
        self._progress = _bar()
        self._task: Any = None
        self._phase = ""
        self._total, self._done = 0, 0
        self._started = time.monotonic()

    def note(self, text: str, style: str = "") -> None:
        """Print a line; it stays."""
        self.console.print(printable(text), style=style, markup=False, soft_wrap=True)

    def alert(self, text: str) -> None:
        """Say something at once, on standard error; from a signal handler too, and where nobody can hear it."""
        with suppress(OSError):
            os.write(2, f"\n{text}\n".encode())  # not print: a handler may run in the middle of another one

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """Begin a phase of `total` steps, or take it up after `done` of them."""
        self.stop()
        self._phase = phase
        self._total, self._done, self._started = total, done, time.monotonic()
        if self.console.is_terminal:
            self._progress, self._rows = _bar(), []
            self._task = self._progress.add_task(phase, total=total, completed=done)
            self._live = Live(self._progress, console=self.console, refresh_per_second=4, transient=False)
            self._live.start()

    def cold_step(self, step: int, loss: float) -> None:
        """Show one supervised step."""
        if self._live is not None:
            self._progress.update(self._task, completed=step, description=f"cold start, loss {loss:.3f}")
        elif self._is_due(step):
            self.note(f"cold start {step}/{self._total}  loss {loss:.3f}  {self._time_left(step)}")

    def step(self, step: int, line: Mapping[str, Any]) -> None:
        """Show one step of reinforcement learning."""
        row = _cells(step, line)
        if self._live is not None:
            self._rows = [*self._rows, row][-_ROWS:]
            self._progress.update(self._task, completed=step, description=self._phase)
            self._live.update(Group(_table(self._rows, self.console.width), self._progress))
        elif self._is_due(step):
            cells = "  ".join(f"{name} {cell}" for name, cell in row.items() if name != "step")
            self.note(f"step {step}/{self._total}  {cells}  {self._time_left(step)}")

    def stop(self) -> None:
        """End the phase; what it showed stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_due(self, step: int) -> bool:
        return step == self._done + 1 or step == self._total or step % max(1, -(-self._total // _PLAIN_LINES)) == 0

    def _time_left(self, step: int) -> str:
        seconds = (time.monotonic() - self._started) / (step - self._done) * (self._total - step)
        return f"left {int(seconds // 60)}:{int(seconds % 60):02d}"


def _cells(step: int, line: Mapping[str, Any]) -> Mapping[str, str]:
    """What is shown of a step, by the column's heading, the first ones first."""
    seconds = [line[f"time/{name}_seconds"] for name in ("rollout", "reward", "update")]
    seconds[2] += line["time/likelihood_seconds"]
    low, high = line["ratio/sequence_min"], line["ratio/sequence_max"]
    return {
        "step": str(step),
        "reward": f"{line['reward/mean']:.3f}",
        "clipped": f"{line['clip/token_fraction']:.1%}",
        "equal groups": f"{line['group/zero_variance_fraction']:.0%}",
        "tokens": f"{line['response/mean_tokens']:.1f}",
        "cut": f"{line['response/truncated_fraction']:.0%}",
        "s min…max": "none trained" if math.isnan(low) else f"{low:.4f}…{high:.4f}",
        "roll+reward+update s": "+".join(f"{value:.2f}" for value in seconds),
        "tok/s": f"{line['throughput/generated_tokens_per_second']:,.0f}",
    }


def _table(rows: Sequence[Mapping[str, str]], width: int) -> Table:
    """The rows with as many columns, the first ones first, as fit the width whole."""
    table, used = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)), -2
    shown = []
    for name in rows[0]:
        used += max(len(text) for text in (name, *(row[name] for row in rows))) + 2
        if used > width:
            break
        shown.append(name)
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def _bar() -> Progress:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn())
