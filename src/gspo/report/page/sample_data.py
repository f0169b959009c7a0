"""The samples that go into the page: all of them where they fit, else evenly fewer, and what is said of that."""

import gzip
import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, colour_floor, cut_into_tokens, read_groups
from gspo.report.shapes import section

_DIGITS = 3  # of a number a token: finer than any colour, and half the page
_LONGEST = 4000  # tokens of a response that are shown; of a longer one the first and the last of them
_CHARACTERS = 4  # about what a token has, where the file does not say
_LEVEL = 6  # gzip's: the next three take twice the time for a hundredth of the size
_TRIED = 12  # steps by which the size of all is estimated
_ALL = sys.maxsize  # groups of a step, however many
_MARGIN = 0.93  # of what may be taken, by that estimate: to begin again costs as much as all of it
_UNKNOWN: Sample = {
    **dict.fromkeys(("reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch", "policy_version")),
    **{"completion": "", "rewards": {}, "tokens": 0, "finish_reason": "unknown"},
}
_DROPPED = ("prompt", "query", "columns")  # the group has them


@dataclass(frozen=True, kw_only=True)
class StepSamples:
    """The groups of one step that the page has: compressed JSON, unpacked when they are looked at."""

    step: int
    queries: Sequence[str]
    colour_floor: float  # the log ratio that the scale of its tokens' colours reaches at least
    content: bytes


@dataclass(frozen=True, kw_only=True)
class SampleData:
    """The samples of one run, and in words how many of all they are."""

    steps: Sequence[StepSamples]
    told: str


def sample_data(run: RunFiles, max_bytes: int) -> SampleData:
    """The samples of a run in at most so many bytes; groups are left out whole, as many in every step.

    Which ones is the same in every step as far as can be, by a hash of the query, so that a query can be followed.
    """
    files = run.rollout_files
    groups_a_step, fits = _estimate([files[step] for step in _every(sorted(files), max(1, len(files) // _TRIED))])
    share = max_bytes / max(1.0, fits * len(files))
    kept = _ALL if share >= 1 else max(1, math.floor(groups_a_step * share * _MARGIN))
    every = max(1, math.ceil(1 / max(max(1, groups_a_step) * share, 1e-9)))
    while (found := _within(run, files, _every(sorted(files), every), kept, max_bytes)) is None:
        if kept > 1:
            kept = max(1, math.floor(min(kept, groups_a_step) * _MARGIN))
        elif every < len(files):
            every *= 2
        else:
            found = []
            break
    most = max([groups_a_step, *(len(one.queries) for one in found)])
    is_all = kept >= most and len(found) == len(files)
    return SampleData(steps=found, told=_told(run, found, len(files), None if is_all else most))


def _estimate(paths: Sequence[Path]) -> tuple[int, float]:
    """The most groups of a step, and the mean size of one with all its groups."""
    found = [read_groups(path) for path in paths]
    sizes = [_size(list(groups), _packed(groups)) for groups in found]
    return max(map(len, found), default=0), sum(sizes) / max(1, len(sizes))


def _within(
    run: RunFiles, files: Mapping[int, Path], steps: Sequence[int], groups_a_step: int, max_bytes: int
) -> list[StepSamples] | None:
    """Of each step so many groups, one step in memory at a time; None where that is too much."""
    found, left = [], max_bytes
    lines = {line["step"]: line for line in run.lines}
    for step in steps:
        groups = _kept(read_groups(files[step]), groups_a_step)
        floor = float(f"{colour_floor(lines.get(step, {})):.{_DIGITS}g}")
        found.append(StepSamples(step=step, queries=list(groups), colour_floor=floor, content=_packed(groups)))
        left -= _size(found[-1].queries, found[-1].content)
        if left < 0:
            return None
    return found


def _size(queries: Sequence[str], content: bytes) -> int:
    """What a step takes: its groups, and its place in the index."""
    return len(content) + len(json.dumps(queries))


def _every(steps: Sequence[int], every: int) -> list[int]:
    """Evenly spread, the first and the last among them."""
    return [step for place, step in enumerate(steps) if place % every == 0 or place == len(steps) - 1]


def _kept(groups: Mapping[str, Sequence[Sample]], count: int) -> dict[str, Sequence[Sample]]:
    chosen = set(sorted(groups, key=lambda query: hashlib.sha256(query.encode(errors="replace")).digest())[:count])
    return {query: samples for query, samples in groups.items() if query in chosen}


def _packed(groups: Mapping[str, Sequence[Sample]]) -> bytes:
    tree = [
        {
            "query": query,
            "prompt": samples[0].get("prompt"),
            "columns": samples[0].get("columns"),
            "samples": [_shown(sample) for sample in samples],
        }
        for query, samples in groups.items()
    ]
    return gzip.compress(json.dumps(tree, separators=(",", ":")).encode(), _LEVEL, mtime=0)


def _shown(sample: Sample) -> dict[str, Any]:
    """The line as the page shows it: without what its group says already, and the middle of a very long text."""
    shown = {key: value for key, value in _without_middle({**_UNKNOWN, **sample}).items() if key not in _DROPPED}
    for name in ("token_log_ratios", "token_advantages"):
        if isinstance(numbers := shown.get(name), list):
            shown[name] = [None if one is None else float(f"{one:.{_DIGITS}g}") for one in numbers]
    if cut_into_tokens(shown) is None:  # the page could not tell whose a number is
        return {name: None if name.startswith("token_") else value for name, value in shown.items()}
    return shown


def _without_middle(sample: Sample) -> Sample:
    text = str(sample.get("completion", ""))
    if int(sample.get("tokens") or len(text) // _CHARACTERS) <= _LONGEST:
        return sample
    pieces = cut_into_tokens(sample) or [text[i : i + _CHARACTERS] for i in range(0, len(text), _CHARACTERS)]
    if len(pieces) <= _LONGEST:
        return sample
    half = _LONGEST // 2
    first, last = "".join(pieces[:half]), "".join(pieces[-half:])
    middle = f"\n[… {len(text) - len(first) - len(last):,} characters are left out here …]\n"

    def cut(values: Any, filler: Any) -> Any:
        is_whole = isinstance(values, list) and len(values) == len(pieces)
        return [*values[:half], filler, *values[-half:]] if is_whole else None

    return {
        **sample,
        "completion": first + middle + last,
        "token_characters": cut(sample.get("token_characters"), len(middle)),
        "token_log_ratios": cut(sample.get("token_log_ratios"), None),
        "token_advantages": cut(sample.get("token_advantages"), None),
    }


def _told(run: RunFiles, found: Sequence[StepSamples], num_steps: int, most: int | None) -> str:
    """`most`: how many groups a step has; None where all are kept."""
    if not num_steps:
        off = section(run.recipe, "report").get("rollouts") is False
        return "The recipe has report.rollouts: false: no samples were kept." if off else "There are no samples yet."
    where = run.path / "rollouts"
    if not found:
        return f"No group is small enough for this page; all samples are in {where} (gspo show {run.path})."
    if most is None:
        return f"All samples of all {num_steps} steps." if num_steps > 1 else "All samples of its one step."
    which = "every step" if len(found) == num_steps else f"{len(found)} of {num_steps} steps, evenly spread"
    sizes = sorted(len(one.queries) for one in found)
    count = f"{sizes[-1]}" if sizes[0] == sizes[-1] else f"up to {sizes[-1]}"
    return (
        f"Thinned to fit a page: {count} of {most} queries of {which}, each with all its responses; "
        f"all samples are in {where}."
    )
