"""The steps of a run, read as it writes them."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import writable
from gspo.report.run_files import RunFiles, is_step
from gspo.report.samples import read_sample
from gspo.run.plain_files import for_reading, parsed

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
        with suppress(FileNotFoundError), open(path / "metrics.jsonl", "rb", opener=for_reading) as file:
            file.seek(place)
            for text in file:
                line = parsed(text) or {}
                if not text.endswith(b"\n") or (is_step(step := line.get("step")) and step > last):
                    break  # still being written
                place += len(text)
                if is_step(step):
                    yield line
        if last == LAST:
            return


def table_of(run: RunFiles, step: int) -> Table:
    """The first responses of a step, for about 20 steps evenly spread, the last among them; none for the others."""
    steps = run.recipe["steps"]
    has_table = is_step(steps) and steps and step * _NUM_TABLES // steps > (step - 1) * _NUM_TABLES // steps
    if not has_table or (path := run.rollout_files.get(step)) is None:
        return []
    with open(path, "rb", opener=for_reading) as file:
        samples = filter(None, map(read_sample, islice(file, _NUM_ROWS)))
        return [writable({column: sample.get(column) for column in _COLUMNS}) for sample in samples]
