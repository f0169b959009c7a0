"""The samples that a page carries: those of the last steps, as many as fit. `gspo view` serves them all."""

import base64
import gzip
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from gspo.report.run_files import RunFiles
from gspo.report.sample_index import Place, SampleSet, sample_sets

_MAX_BYTES = 12_000_000  # of the files, in a page: packed a half of that at most, and mostly a twentieth
_MAX_GROUPS = 100_000  # in the table of a set: it has the last steps of a longer run


def samples_json(runs: Sequence[RunFiles]) -> str:
    """What a page carries of the runs' samples: the index of each set, and its groups by step, packed."""
    sets = sample_sets(runs)
    sets_in = Counter(samples.key[:2] for samples in sets)  # evaluated sets share what training has alone
    carried = [_carried(samples, _MAX_BYTES // len(sets_in) // sets_in[samples.key[:2]]) for samples in sets]
    indices, contents = zip(*carried, strict=True)
    return json.dumps({"live": False, "index": packed(indices), "contents": contents})


def _carried(samples: SampleSet, max_bytes: int) -> tuple[dict[str, Any], dict[int, str]]:
    """The index of a set, and what each step carries, packed."""
    samples.look()
    carried = _last_groups(samples.steps, max_bytes)
    contents = {step: packed([samples.group(step, place) for place in range(num)]) for step, num in carried.items()}
    return samples.index(carried), contents


def _last_groups(steps: Mapping[int, Sequence[Place]], max_bytes: int) -> dict[int, int]:
    """Of the last steps, which the table has, how many of the first groups of each fit into the page."""
    carried, num_groups = dict[int, int](), 0
    for step, places in sorted(steps.items(), reverse=True):
        num_groups += len(places)
        if carried and num_groups > _MAX_GROUPS:
            break
        sizes = [sum(size for _, size in place.spans) for place in places]
        carried[step] = bisect_right([*accumulate(sizes)], max_bytes)
        max_bytes -= sum(sizes)
    return carried


def packed(content: Any) -> str:
    """The content as the page's scripts unpack it: JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
