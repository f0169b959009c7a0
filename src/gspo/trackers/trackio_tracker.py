"""trackio: a database on this machine, or the Space or server that its environment variables name."""

from collections.abc import Mapping, Sequence
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import get_storage_mode

from gspo.trackers.tracker import SAMPLES, Opening


class TrackioRun:
    """A run in a project of trackio's."""

    def __init__(self, opening: Opening) -> None:
        resume = "never" if opening.run is None else "allow"
        self._run = trackio.init(
            opening.project,
            name=opening.name,
            config=dict(opening.config),
            resume=resume,
            embed=False,
            auto_log_cpu=False,  # it is the training's numbers that are wanted, under the same names as everywhere
            auto_log_gpu=False,
        )
        if opening.run is not None:
            self._run.id = opening.run  # trackio takes up the last run of the name, which may be another's by now
        self.run: str = self._run.id
        # Where the database is elsewhere, only trackio's own process there can say what it has.
        self._is_here = self._run.url is None and get_storage_mode() == "sqlite"
        self.last_step = self._stored() if self._is_here else None
        self._logged: int | None = None

    def log(self, step: int, metrics: Mapping[str, float], samples: Sequence[Mapping[str, Any]]) -> None:
        """One row, with the table in it."""
        table = {SAMPLES: trackio.Table(data=[dict(row) for row in samples])} if samples else {}
        self._run.log({**metrics, **table}, step=step)
        self._logged = step

    def close(self) -> None:
        """Wait for trackio's thread, which tells nobody when it fails; RuntimeError where its database lacks steps."""
        self._run.finish()
        if self._is_here and self._logged is not None and self._stored() < self._logged:
            raise RuntimeError(f"trackio has stored the steps up to {self._stored()} only, not up to {self._logged}")

    def _stored(self) -> int:
        found = SQLiteStorage.get_max_step_for_run(self._run.project, run_id=self.run)
        return -1 if found is None else found


def open_run(opening: Opening) -> TrackioRun:
    """Begin a run, or go on with it."""
    return TrackioRun(opening)
