"""The samples that go into the page: all of them where they fit, else evenly fewer, and what is said of that."""

import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.report.run_files import RunFiles
from gspo.report.samples import Sample, cut_into_tokens, read_groups

Groups = Mapping[int, Mapping[str, Sequence[Sample]]]  # by step and query

_RATIO_DECIMALS = 4  # of a log ratio a token: finer than any colour, and half the page
_LONGEST = 4000  # tokens of a response that are shown; of a longer one the first and the last of them
_LEVEL = 6  # gzip's: the next three take twice the time for a hundredth of the size
_TRIED = 8  # steps by which the size of all is estimated
_DROPPED = ("prompt", "query")  # the group has them


@dataclass(frozen=True, kw_only=True)
class SampleData:
    """The samples of one run, compressed JSON, and in words how many of all they are."""

    content: bytes
    told: str


def sample_data(run: RunFiles, max_bytes: int) -> SampleData:
    """The samples of a run in at most so many bytes; groups are left out whole, as many in every step.

    Which ones is the same in every step as far as can be, by a hash of the query, so that a query can be followed.
    """
    files = run.rollout_files
    steps = sorted(files)
    groups_a_step, fits = _estimate(run, steps, max_bytes)
    kept, every = groups_a_step, 1
    if fits < 1:
        kept = max(1, math.floor(groups_a_step * fits))
        every = max(1, math.ceil(1 / (groups_a_step * fits)))
    chosen = {step: _kept(read_groups(files[step]), kept) for step in _every(steps, every)}
    while len(content := _packed(chosen)) > max_bytes and chosen:
        if kept > 1:
            kept = max(1, min(kept - 1, math.floor(kept * max_bytes / len(content))))
            chosen = {step: _kept(groups, kept) for step, groups in chosen.items()}
        elif len(chosen) > 1:
            every *= 2
            chosen = {step: chosen[step] for step in _every(sorted(chosen), 2)}
        else:
            chosen = {}
    return SampleData(content=content, told=_told(run, steps, groups_a_step, kept, every, chosen))


def _estimate(run: RunFiles, steps: Sequence[int], max_bytes: int) -> tuple[int, float]:
    """The most groups of a step, and which part of all groups is about as large as may be."""
    tried = _every(steps, max(1, len(steps) // _TRIED))
    found = {step: read_groups(run.rollout_files[step]) for step in tried}
    size = len(_packed(found)) * len(steps) / max(1, len(tried))
    return max((len(groups) for groups in found.values()), default=0), max_bytes / max(1.0, size)


def _every(steps: Sequence[int], every: int) -> list[int]:
    """Evenly spread, the first and the last among them."""
    return [step for place, step in enumerate(steps) if place % every == 0 or place == len(steps) - 1]


def _kept(groups: Mapping[str, Sequence[Sample]], count: int) -> dict[str, Sequence[Sample]]:
    chosen = set(sorted(groups, key=lambda query: hashlib.sha256(query.encode()).digest())[:count])
    return {query: samples for query, samples in groups.items() if query in chosen}


def _packed(chosen: Groups) -> bytes:
    tree = [
        {
            "step": step,
            "groups": [
                {"query": query, "prompt": samples[0].get("prompt"), "samples": [_shown(sample) for sample in samples]}
                for query, samples in groups.items()
            ],
        }
        for step, groups in chosen.items()
    ]
    return gzip.compress(json.dumps(tree, separators=(",", ":")).encode(), _LEVEL, mtime=0)


def _shown(sample: Sample) -> dict[str, Any]:
    """The line as the page shows it: without what its group says already, and the middle of a very long text."""
    shown = {key: value for key, value in _without_middle(sample).items() if key not in _DROPPED}
    for name in ("token_log_ratios", "token_advantages"):
        if isinstance(numbers := shown.get(name), list):
            shown[name] = [None if one is None else round(one, _RATIO_DECIMALS) for one in numbers]
    return shown


def _without_middle(sample: Sample) -> Sample:
    pieces = cut_into_tokens(sample) or list(str(sample.get("completion", "")))
    if len(pieces) <= _LONGEST:
        return sample
    half = _LONGEST // 2
    middle = f"\n[… {len(pieces) - _LONGEST:,} tokens are left out here …]\n"

    def cut(values: Any, filler: Any) -> Any:
        return [*values[:half], filler, *values[-half:]] if isinstance(values, list) else values

    return {
        **sample,
        "completion": "".join([*pieces[:half], middle, *pieces[-half:]]),
        "token_characters": cut(sample.get("token_characters"), len(middle)),
        "token_log_ratios": cut(sample.get("token_log_ratios"), None),
        "token_advantages": cut(sample.get("token_advantages"), None),
    }


def _told(run: RunFiles, steps: Sequence[int], groups_a_step: int, kept: int, every: int, chosen: Groups) -> str:
    if not steps:
        off = (run.recipe.get("report") or {}).get("rollouts") is False
        return "The recipe has report.rollouts: false: no samples were kept." if off else "There are no samples yet."
    where = run.path / "rollouts"
    if kept >= groups_a_step and every == 1:
        return f"All samples of all {len(steps)} steps."
    if not chosen:
        return f"No group is small enough for this page; all samples are in {where} (gspo show {run.path})."
    which = "every step" if every == 1 else f"{len(chosen)} of {len(steps)} steps, evenly spread"
    return (
        f"Thinned to fit a page: {kept} of {groups_a_step} queries of {which}, each with all its responses; "
        f"all samples are in {where}."
    )
