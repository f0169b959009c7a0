"""How far a run has come, all that a checkpoint holds besides weights, optimiser and random states; its clock.

On the disk it is plain JSON and a few flat tensors; nothing else can be read, so nothing can be run.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from gspo.learner.optimizer import Noise, StepReport
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.metrics.numbers import is_number
from gspo.queries.order import PassRates
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import EarlyStopConfig, RolloutConfig
from gspo.run.checkpoint.store import Position
from gspo.types import Batch, Drawn, Experts, Failure, Group, Query, Sample, Score, SequenceStats, Turn


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value of a metric so far.

    Example: Best(metric="reward/mean", best_is="highest", value=0.7, step=12, misses=2) has had two values since.
    """

    metric: str
    best_is: str  # highest or lowest
    value: float
    step: int
    misses: int = 0  # values since then, none of them a new best


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Counters and records of a phase, and what the step under way has come to so far.

    Example: Progress(steps=12, batch=…, reports=(report,)) has trained on the batch of step 13.
    """

    steps: int = 0  # that are finished
    batches_drawn: int = 0  # of the order of the queries
    num_taken: Mapping[str, int] = field(default_factory=dict)  # queries of each of queries.sources
    rows: str = ""  # those of now, as text; empty: the ones that the run began with
    rows_since: int = 0  # the batches that were drawn before them
    ahead: tuple[Drawn, ...] = ()  # what of them is for steps to come, in the order in which it will be taken
    skipped_in_a_row: int = 0  # updates
    seconds: float = 0.0  # that the run took up to here
    diagnoses: Mapping[str, str] = field(default_factory=dict)  # every sentence so far, by the diagnosis's name
    rollout_files: Mapping[str, Any] = field(default_factory=dict)  # of earlier versions
    reference_sha256: str | None = None  # of the weights that the reference model began with, where there is one
    pass_rates: PassRates = field(default_factory=dict)  # where queries.sampler goes by them
    clip_scale: tuple[float, float] | None = None  # of the clip range, where actor.clip_fraction sets it
    learning_rate_factor: float = 1.0  # of the schedule's rate; a hook may change it, and the temperature
    temperature: float | None = None  # of sampling; None: the recipe's
    best: Best | None = None  # by checkpoint.best
    early_stop: Best | None = None  # by early_stop.metric
    phases_begun: int = 0  # the number of the last that has begun by a condition
    held: tuple[str, int] = ("", 0)  # the condition of the phase to come, and for how many steps in a row it has held
    ended: tuple[str, int] | None = None  # early: why, and the recipe's steps then
    # Of the step under way:
    batch: Batch | None = None  # sampled and scored; None: not yet
    reports: tuple[MiniBatchReport, ...] = ()  # of all its mini-batches, once the policy is trained on it
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    def reason_for_end(self, steps: int) -> str | None:
        """Return why a run of so many steps has ended early; None where it goes on, with other steps than it had."""
        return self.ended[0] if self.ended and self.ended[1] == steps else None

    def is_over(self, steps: int) -> bool:
        """Tell whether a run of so many steps has ended, early or not."""
        return self.steps >= steps or self.reason_for_end(steps) is not None

    def sampling(self, rollout: RolloutConfig) -> RolloutConfig:
        """The recipe's, at the temperature of now."""
        return rollout if self.temperature is None else rollout.model_copy(update={"temperature": self.temperature})

    @property
    def position(self) -> Position:
        """Return what a checkpoint made now is named by."""
        return Position(self.steps, 0 if self.batch is None else 1 + bool(self.reports))


def next_best(
    best: Best | None, line: Mapping[str, Any], metric: str | None, best_is: str, margin: float = 0.0
) -> Best | None:
    """The best after a line of metrics; None where there is none yet. A new best is better by more than the margin."""
    if best is not None and (best.metric, best.best_is) != (metric, best_is):  # the recipe was changed since
        best = None
    if metric is None or not is_number(value := line.get(metric)):
        return best
    if best is None or (value - best.value) * (1 if best_is == "highest" else -1) > margin:
        return Best(metric=metric, best_is=best_is, value=value, step=line["step"])
    return replace(best, misses=best.misses + 1)


def reason_to_stop(best: Best | None, line: Mapping[str, Any], settings: EarlyStopConfig) -> str | None:
    """Say why the run ends early after a line of metrics; None where it goes on."""
    if best is None or not is_number(value := line.get(best.metric)):
        return None
    goal, patience = settings.goal, settings.patience
    if goal is not None and (value >= goal if best.best_is == "highest" else value <= goal):
        return f"early_stop: {best.metric} is {value:g}, and the goal is {goal:g}"
    if patience is not None and best.misses >= patience:
        return f"early_stop: {best.metric} was {best.value:g} at step {best.step}; {best.misses} values were no better"
    return None


def next_phases(progress: Progress, recipe: Recipe, line: Mapping[str, Any]) -> Progress:
    """The progress after a line of metrics, by which the condition of the phase to come may hold once more."""
    step, every = line["step"], recipe.evaluation.every
    number = recipe.num_begun(step, progress.phases_begun)
    when = recipe.phases[number].when if number < len(recipe.phases) else None
    if when is None or not is_number(value := line.get(when.metric)):
        return progress
    # An evaluation at the end of the run, or of an early one, would be none in a longer run.
    if when.metric.startswith("evaluation/") and step and not (every and step % every == 0):
        return progress
    condition, before = f"{number}: {when.metric} {when.above} {when.below}", progress.held
    held = 1 + (before[1] if before[0] == condition else 0) if when.holds(value) else 0
    begun = number + 1 if held >= when.steps else progress.phases_begun
    return replace(progress, phases_begun=begun, held=(condition, held))


class Clock:
    """Counts from when it is made, or goes on from what a resumed run has counted.

    A stage is timed within `watch(name)`, a context of its own.
    """

    def __init__(self, watch: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._watch = watch
        self.seconds: dict[str, float] = {}  # of the step under way, by stage
        self._start = time.monotonic()  # never the wall clock, which may be set back

    def resume(self, elapsed: float) -> None:
        """Go on from the seconds that earlier processes have counted."""
        self._start = time.monotonic() - elapsed

    @property
    def elapsed(self) -> float:
        """Seconds of the run so far, those before a resume included."""
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a stage."""
        with self._watch(name):
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds to another stage than the one within which they passed."""
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds


_RECORDS: Mapping[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Activation, Batch, Best, Drawn, Experts, Failure, Group, MiniBatchReport, Noise),
        *(Progress, Sample, Score, SequenceStats, StepReport, Turn),
    )
}
# Marks of what JSON has no form for; a mapping of the records never has such a key.
_TENSOR, _QUERY, _RECORD = "$tensor", "$query", "$record"


def encode(record: Any) -> tuple[str, dict[str, Tensor]]:
    """A record, or a nesting of records whose keys are text, as JSON and, by dtype, tensors laid end to end."""
    parts: dict[str, list[Tensor]] = {}
    ends: Counter[str] = Counter()
    # A group's members share the experts of their prompt, in memory that they share after a resume, too.
    places: dict[Any, tuple[Tensor, list[Any]]] = {}  # with the tensor, so that no other comes to lie there

    def place(tensor: Tensor) -> list[Any]:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in places:
            dtype = str(tensor.dtype).removeprefix("torch.")
            places[key] = (tensor, [dtype, ends[dtype], list(tensor.shape)])
            ends[dtype] += tensor.numel()
            parts.setdefault(dtype, []).append(tensor.detach().cpu().flatten())
        return places[key][1]

    def plain(value: Any) -> dict[str, Any]:
        if isinstance(value, Tensor):
            return {_TENSOR: place(value)}
        if isinstance(value, Query):
            return {_QUERY: value.id}
        if _RECORDS.get(name := type(value).__name__) is type(value):
            return {_RECORD: name, **vars(value)}
        raise TypeError(f"{name} is no record of a run: it could not be read back")

    text = json.dumps(record, default=plain)
    return text, {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}


def decode(text: str, tensors: Mapping[str, Tensor], queries: Mapping[str, Query]) -> Any:
    """Return what `encode` was given, its lists as tuples; queries are named by id and looked up."""

    def value_of(tree: Any) -> Any:
        if isinstance(tree, list):
            return tuple(map(value_of, tree))
        if not isinstance(tree, dict):
            return tree
        if _TENSOR in tree:
            dtype, start, shape = tree[_TENSOR]
            return tensors[dtype][start : start + prod(shape)].reshape(shape)
        if _QUERY in tree:
            return queries[tree[_QUERY]]
        entries = {name: value_of(entry) for name, entry in tree.items() if name != _RECORD}
        return _RECORDS[tree[_RECORD]](**entries) if _RECORD in tree else entries

    return value_of(json.loads(text))
