"""The responses of a run, read back from rollouts/step_*.jsonl."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from gspo.errors import writable
from gspo.metrics.numbers import is_number
from gspo.report.run_files import RunFiles
from gspo.report.shapes import is_step
from gspo.report.shapes import sample as sample_of
from gspo.run.plain_files import for_reading, parsed, read_json_lines

_WIDEST = 0.2  # CISPO's range, to five times the probability, would leave everything pale
_NUM_TABLES, _NUM_ROWS = 20, 8  # of a run, and of a table
_COLUMNS = ("query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason")
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/metrics.md has its keys


def read_groups(path: Path) -> dict[str, list[Sample]]:
    """The responses of a step's file, by query, both in the order in which they were sampled."""
    groups: dict[str, list[Sample]] = {}
    for line in read_json_lines(path)[0]:
        sample = sample_of(line)
        groups.setdefault(str(sample.get("query")), []).append(sample)
    return groups


def table_of(run: RunFiles, step: int) -> list[Sample]:
    """The first responses of a step, all with the same columns, for about 20 steps evenly spread; else none."""
    steps = run.recipe["steps"]
    has_table = is_step(steps) and steps and step * _NUM_TABLES // steps > (step - 1) * _NUM_TABLES // steps
    if not has_table or (path := run.rollout_files.get(step)) is None:
        return []
    with open(path, "rb", opener=for_reading) as file:
        samples = [sample_of(line) for text in islice(file, _NUM_ROWS) if (line := parsed(text)) is not None]
    return [writable({column: sample.get(column) for column in _COLUMNS}) for sample in samples]


def colour_floor(line: Mapping[str, Any]) -> float:
    """The log ratio that a scale of colours reaches at least, from the step's line of metrics: the clip range's.

    Of its nearer end, and 0.2 where that is wider; 0 where the line does not say. Without it the noise of rounding
    would have the colours of what an update does.
    """
    low, high = line.get("clip/low"), line.get("clip/high")
    if not (is_number(low) and is_number(high) and low > 0 and high > 0):
        return 0.0
    return min(_WIDEST, math.log1p(high), -math.log1p(-low) if low < 1 else math.inf)


def cut_into_tokens(sample: Sample) -> Sequence[str] | None:
    """The text that each token of a response makes; None where the file does not say."""
    lengths = sample.get("token_characters")
    if not (isinstance(lengths, list) and all(isinstance(length, int) and length >= 0 for length in lengths)):
        return None
    text, place, found = str(sample.get("completion", "")), 0, []
    for length in lengths:
        found.append(text[place : place + length])
        place += length
    return found if place == len(text) else None
