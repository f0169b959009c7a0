"""Weights & Biases: online, or offline where WANDB_MODE says so."""

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from gspo.trackers.tracker import SAMPLES, Opening

# What wandb would add by itself: the output and the load of the process that sends, which trains nothing, and the code.
_SETTINGS = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False)


class WandbRun:
    """A run at W&B."""

    def __init__(self, opening: Opening) -> None:
        opening.directory.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=opening.project,
            name=opening.name,
            id=opening.run,
            resume="allow",
            config=dict(opening.config),
            dir=opening.directory.parent,  # wandb itself adds a directory of its name
            settings=_SETTINGS,
        )
        self.run: str = self._run.id
        # Where it goes on at W&B, that says how far it has come there, whatever was lost on the way.
        self.last_step = None if self._run.offline or not self._run.resumed else self._run.starting_step - 1

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """One row, with the table in it."""
        table: dict[str, Any] = {}
        if samples:
            columns = list(samples[0])
            rows = [[row[column] for column in columns] for row in samples]
            table = {SAMPLES: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)}
        self._run.log({**metrics, **table}, step=step, commit=True)

    def close(self) -> None:
        """Wait until everything is uploaded; offline, until it is in the file that `wandb sync` uploads."""
        self._run.finish()


def open_run(opening: Opening) -> WandbRun:
    """Begin a run, or go on with it; wandb.Error without a login or without an answer."""
    return WandbRun(opening)
