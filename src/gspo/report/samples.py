"""The responses of a run, read back from rollouts/step_*.jsonl."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.report.json_lines import read_json_lines

Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/metrics.md has its keys


def read_groups(path: Path) -> dict[str, list[Sample]]:
    """The responses of a step's file, by query, both in the order in which they were sampled."""
    groups: dict[str, list[Sample]] = {}
    for sample in read_json_lines(path)[0]:
        groups.setdefault(str(sample.get("query")), []).append(sample)
    return groups


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
