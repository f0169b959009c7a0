"""The steps of a run, read as it writes them."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import writable
from gspo.report.run_files import RunFiles
from gspo.run.plain_files import parsed

LAST = sys.maxsize  # the number of a step after all others
_NUM_TABLES, _NUM_ROWS = 20, 8  # of a run, and of a table
_COLUMNS = ("query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason")
Table = list[Mapping[str, Any]]  # its rows, all with the same columns


def lines_up_to(path: Path, announced: Iterable[int]) -> Iterator[Mapping[str, Any]]:
    """The lines of a run's metrics.jsonl up to each step that is announced, and with LAST to the end of the file.

    A step is announced when all of its files are written. Each line is read once; the whole file is never in memory.
    """
    place = 0
    for last in announced:
        with suppress(FileNotFoundError), (path / "metrics.jsonl").open("rb") as file:
            file.seek(place)
            for text in file:
                line = parsed(text)
                if not text.endswith(b"\n") or (line and line["step"] > last):
                    break  # still being written
                place += len(text)
                if line:
                    yield line
        if last == LAST:
            return


def table_of(run: RunFiles, step: int) -> Table:
    """The first responses of a step, for about 20 steps evenly spread, the last among them; none for the others."""
    steps, path = run.recipe["steps"], run.rollout_files.get(step)
    if not path or step * _NUM_TABLES // steps == (step - 1) * _NUM_TABLES // steps:
        return []
    with path.open("rb") as file:
        samples = [sample for line in islice(file, _NUM_ROWS) if (sample := parsed(line))]
    return [writable({column: sample[column] for column in _COLUMNS}) for sample in samples]
