"""What a terminal shows while a run goes on: curves over the steps, where their time goes, what is waited for."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.text import Text

PATIENCE_SECONDS = 2.0  # what takes less is over before anybody has read a word of it
_LEVELS = "▁▂▃▄▅▆▇█"
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_RECENT = 10  # steps that the shares of the stages and the time left are a mean over
_WIDEST = 60  # columns of a curve or a bar
_SAMPLED = 20  # values that a column of a curve is a mean of at most, so that drawing stays quick
_HUGE = 1e100  # beyond it, differences and sums may not be finite
_DIGITS = {"reward": 3, "response tokens": 1, "loss": 3}  # after the point
_STAGES = {
    "new weights": ("publish",),
    "sampling": ("rollout",),
    "rewards": ("reward",),
    "likelihoods": ("appraisal", "likelihood"),
    "update": ("update",),
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
        left = f", about {duration(seconds * (total - done) / done)} left" if 0 < done < total and seconds > 30 else ""
        return f"{self.name}: {seconds:.0f} s so far{count}{left}"


@dataclass(kw_only=True)
class Phase:
    """A cold start or reinforcement learning under way, and what its steps have come to.

    Example: Phase(title="GSPO", total=60, step=12, curves={"reward": [0.5, 0.6]}, facts={"clipped": "2%"})
    """

    title: str
    total: int  # steps
    step: int  # the last that is done
    first: int = field(init=False)  # the last that was done when this process started the phase
    curves: dict[str, list[float]] = field(default_factory=dict)  # a number a step
    facts: Mapping[str, str] = field(default_factory=dict)  # of the last step
    shares: list[Mapping[str, float]] = field(default_factory=list)  # of a step's time, by stage, for the last steps
    diagnoses: Sequence[str] = ()  # that hold now
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.started = self.step, time.monotonic()
        self._ends = deque([self.started], maxlen=_RECENT + 1)  # of the last steps

    def add(self, step: int, numbers: Mapping[str, float], line: Mapping[str, Any] | None = None) -> None:
        """A step is done; `numbers` go on with the curves, and a line of metrics tells more of it."""
        self.step = step
        self._ends.append(time.monotonic())
        # A new dictionary, since a thread may be drawing the old one.
        self.curves = {name: self.curves.get(name, []) for name in [*self.curves, *numbers]}
        for name, value in numbers.items():
            self.curves[name].append(value)
        if line is not None:
            self.facts = facts(line)
            self.shares = [*self.shares, shares(line)][-_RECENT:]

    @property
    def text(self) -> str:
        """The last step in a line."""
        numbers = [f"{name} {values[-1]:.{_DIGITS[name]}f}" for name, values in self.curves.items()]
        total, *stages = time_by_stage(self.shares[-1:]) if self.shares else [""]
        times = [f"{total} ({', '.join(stages)})"] if total else []
        return "  ".join([*numbers, *(f"{name} {fact}" for name, fact in self.facts.items()), *times])

    @property
    def seconds_left(self) -> float:
        """An estimate, from the mean of the last steps."""
        a_step = (self._ends[-1] - self._ends[0]) / max(1, len(self._ends) - 1)
        return max(0.0, a_step * (self.total - self.step) - (time.monotonic() - self._ends[-1]))


def facts(line: Mapping[str, Any]) -> Mapping[str, str]:
    """The numbers of a step beside its reward and length, with what they are called."""
    low, high = line["ratio/sequence_min"], line["ratio/sequence_max"]
    return {
        "clipped tokens": f"{line['clip/token_fraction']:.1%}",
        "equal-reward groups": f"{line['group/zero_variance_fraction']:.0%}",
        "cut off": f"{line['response/truncated_fraction']:.0%}",
        "sequence ratio": "– (nothing to train on)" if math.isnan(low) else f"{low:.4f}…{high:.4f}",
        "tokens/s": f"{line['throughput/generated_tokens_per_second']:,.0f}",
        **_ahead(line),
    }


def _ahead(line: Mapping[str, Any]) -> Mapping[str, str]:
    """Of a step whose groups were sampled ahead: its tokens' age, what is ahead, who had nothing to do."""
    if "staleness/mean" not in line:
        return {}
    idle = [f"{who} {line[f'source/{who}_idle_fraction']:.0%}" for who in ("trainer", "engine")]
    tokens = line["staleness/tokens_by_age"]
    ages = [f"{age}: {number / max(1.0, sum(tokens)):.0%}" for age, number in enumerate(tokens) if number]
    dropped = line["staleness/dropped_groups"]
    return {
        "tokens' age": f"{line['staleness/mean']:.1f} steps ({', '.join(ages)})",
        "ahead": f"{line['source/waiting']:.0f} sampled, {line['source/in_flight']:.0f} in flight",
        **({"too old": f"{dropped:.0f} groups"} if dropped else {}),
        "idle": ", ".join(idle).replace("nan%", "–"),  # a step that was begun by another process
    }


def shares(line: Mapping[str, Any]) -> Mapping[str, float]:
    """The seconds of a step by stage: what most of it goes to, then all else."""
    stages = {name: sum(line.get(f"time/{part}_seconds", 0.0) for part in parts) for name, parts in _STAGES.items()}
    return {**stages, "other": max(0.0, line.get("time/total_seconds", 0.0) - sum(stages.values()))}


def time_by_stage(steps: Sequence[Mapping[str, float]], bar: int = 0) -> list[str]:
    """Such as `2.05 s a step`, `sampling 48%`, …: the mean, then each stage of at least a hundredth of it."""
    seconds = {name: fmean(step[name] for step in steps) for name in steps[0]}
    total = sum(seconds.values())
    parts = {name: value / total for name, value in seconds.items() if total and value / total >= 0.01}
    words = [(name, "━" * round(bar * part), f"{part:.0%}") for name, part in parts.items()]
    return [f"{total:.2f} s a step", *(" ".join(filter(None, stage)) for stage in words)]


def finite(values: Iterable[float]) -> list[float]:
    """Those that a curve can show."""
    return [value for value in values if abs(value) < _HUGE]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of at most `width` columns, each the mean of its values; blank where none is finite."""
    columns = min(len(values), width)
    ends = [place * len(values) // columns for place in range(columns + 1)]
    cells = [values[start : end : 1 + (end - start) // _SAMPLED] for start, end in pairwise(ends)]
    sums = [math.fsum(numbers) / len(numbers) if (numbers := finite(cell)) else math.nan for cell in cells]
    low, high = min(finite(sums), default=0.0), max(finite(sums), default=0.0)
    heights = [(value - low) / (high - low) if high > low else value * 0 + 0.5 for value in sums]
    return "".join(_LEVELS[round(h * (len(_LEVELS) - 1))] if math.isfinite(h) else " " for h in heights)


def bar(done: int, total: int, width: int) -> str:
    """Such as `━━━━────`; empty where there is no room for one."""
    full = width * done // max(1, total)
    return "━" * full + "─" * (width - full) if width >= 5 else ""


def duration(seconds: float) -> str:
    """Such as `0:31` or `2:05:09`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def view(phase: Phase | None, activity: Activity | None, alert: str, width: int) -> Group:
    """All lines; of a phase as many as ever, so that the screen does not jump when an activity ends."""
    lines = [] if phase is None else list(_phase_lines(phase, width))
    if activity is not None and (phase is None or time.monotonic() - activity.started >= PATIENCE_SECONDS):
        spinner = _SPINNER[int(time.monotonic() * 4) % len(_SPINNER)]
        done, total, _ = activity.count or (0, 0, "")
        room = width - len(activity.text) - 4
        text = f"{spinner} {activity.text}  {bar(done, total, min(room, _WIDEST)) if total else ''}"
        lines.append(_line(text, "cyan"))
    elif phase is not None:
        lines.append(Text(""))
    if alert:
        lines.append(Text(alert, style="bold yellow"))
    return Group(*lines)


def _phase_lines(phase: Phase, width: int) -> Iterator[Text]:
    count, times = f"{phase.step}/{phase.total}", [f"{duration(time.monotonic() - phase.started)} so far"]
    if phase.first < phase.step < phase.total:
        times.append(f"about {duration(phase.seconds_left)} left")
    room = width - len("   ".join([phase.title, count, *times])) - 3
    pieces = [phase.title, bar(phase.step, phase.total, min(room, _WIDEST)), count, *times]
    yield from (_line(line, "bold") for line in _filled(list(filter(None, pieces)), width))
    yield Text("")
    label = max(map(len, phase.curves), default=0)
    for name, values in phase.curves.items():
        head = f"{name:<{label}}  {values[-1]:>7.{_DIGITS[name]}f}  "
        curve = sparkline(values, min(_WIDEST, max(1, width - len(head))))
        yield Text.assemble(head, (curve, "green"), no_wrap=True, overflow="ellipsis")
    stages = time_by_stage(phase.shares, bar=10) if phase.shares else []
    for pieces in ([""], [f"{name} {fact}" for name, fact in phase.facts.items()], stages):
        yield from map(_line, _filled(pieces, width))
    for sentence in phase.diagnoses:
        yield Text(f"diagnosis: {sentence}", style="yellow")


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _filled(pieces: Sequence[str], width: int) -> list[str]:
    """Lines of whole pieces, as many in each as fit."""
    lines: list[str] = []
    for piece in pieces:
        if lines and len(lines[-1]) + 3 + len(piece) <= width:
            lines[-1] += f"   {piece}"
        else:
            lines.append(piece)
    return lines
