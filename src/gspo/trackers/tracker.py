"""What a tracker is: TensorBoard, trackio and Weights & Biases, each an extra of the package."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gspo.errors import UserError

NAMES = ("tensorboard", "trackio", "wandb")  # of the packages, too
SAMPLES = "samples"  # the table's name among the metrics


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a tracker is told of a run."""

    run: str | None  # the tracker's own number for it; None: it is a new one
    name: str
    project: str
    config: Mapping[str, Any]  # the recipe's tree
    directory: Path  # for what the tracker writes


class Tracker(Protocol):
    """A tracker's run, open to be written; any method may raise or wait, for training does neither."""

    run: str  # the tracker's own number for it
    last_step: int | None  # the last one that it has; None: it cannot say

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """Send all of a step, which is later than those before; `samples` is a table's rows, mostly none."""

    def close(self) -> None:
        """Wait until everything is where the tracker keeps it."""


def check_trackers(names: Iterable[str], *, where: str) -> None:
    """UserError for a name that is no tracker's, and for a tracker whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise UserError(f"there is no tracker {name!r}", where=where, fix=f"there are: {', '.join(NAMES)}")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a mere directory of that name, as wandb itself makes
            what = f"the tracker {name} needs the package {name}, which is not installed"
            raise UserError(what, where=where, fix=f"pip install {name}")


def open_tracker(name: str, opening: Opening) -> Tracker:
    """The tracker of a name, which is imported only here: some take seconds."""
    tracker: Tracker = import_module(f"gspo.trackers.{name}_tracker").open_run(opening)
    return tracker
