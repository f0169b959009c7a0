"""The responses of a run, read back from rollouts/step_*.jsonl."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.report.shapes import sample as sample_of
from gspo.run.plain_files import read_json_lines

_WIDEST = 0.2  # CISPO's range, to five times the probability, would leave everything pale
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/metrics.md has its keys


def read_groups(path: Path) -> dict[str, list[Sample]]:
    """The responses of a step's file, by query, both in the order in which they were sampled."""
    groups: dict[str, list[Sample]] = {}
    for line in read_json_lines(path)[0]:
        sample = sample_of(line)
        groups.setdefault(str(sample.get("query")), []).append(sample)
    return groups


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
