"""The samples that a page carries: as many groups as fit, and of very many queries some, chosen by a hash of the query.

`gspo view` serves them all.
"""

import base64
import gzip
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gspo.report.run_files import RunFiles
from gspo.report.sample_index import Place, SampleSet, sample_sets

_MAX_BYTES = 12_000_000  # of the files, in a page: packed a half of that at most, and mostly a twentieth
_MAX_QUERIES = 5_000  # in its table


def samples_json(runs: Sequence[RunFiles]) -> str:
    """What a page carries of the runs' samples: the index of each set, and its groups by step, packed."""
    sets = sample_sets(runs)
    num_of_folder = Counter(
        samples.key[:2] for samples in sets
    )  # of evaluated sets, however many, as much as of training
    shares = [_MAX_BYTES // len(num_of_folder) // num_of_folder[samples.key[:2]] for samples in sets]
    carried = [_carried(samples, share) for samples, share in zip(sets, shares, strict=True)]
    indices, contents = zip(*carried, strict=True)
    return json.dumps({"live": False, "index": packed(indices), "contents": contents})


def _carried(samples: SampleSet, max_bytes: int) -> tuple[dict[str, Any], dict[int, str]]:
    """The index of a set, with each group's place in what its step carries, and that, packed."""
    samples.look()
    names = {place.query for places in samples.steps.values() for place in places}
    by_hash = sorted(names, key=lambda query: hashlib.sha256(query.encode(errors="replace")).digest())[:_MAX_QUERIES]
    chosen = _chosen(samples.steps, by_hash, max_bytes)
    places, contents = {}, {}
    for step in samples.steps:
        step_places = sorted(place for at, place in chosen if at == step)
        places.update({(step, place): number for number, place in enumerate(step_places)})
        contents[step] = packed([samples.group(step, place) for place in step_places])
    return samples.index(set(by_hash), places), contents


def _chosen(steps: Mapping[int, Sequence[Place]], queries: Sequence[str], max_bytes: int) -> set[tuple[int, int]]:
    """Of every step as many groups as there is room for, the same queries in each as far as can be."""
    ranks = {query: rank for rank, query in enumerate(queries)}
    order = []
    for number, (step, places) in enumerate(sorted(steps.items())):
        spread = 0 if number == len(steps) - 1 else int(f"{number:032b}"[::-1], 2)  # the ends, the middle, quarters …
        ranked = sorted((ranks[place.query], at) for at, place in enumerate(places) if place.query in ranks)
        order += [(turn, spread, step, at) for turn, (_, at) in enumerate(ranked)]
    chosen = set()
    for _, _, step, at in sorted(order):
        if (size := sum(size for _, size in steps[step][at].spans)) <= max_bytes:
            chosen.add((step, at))
            max_bytes -= size
    return chosen


def packed(content: Any) -> str:
    """The content as the page's scripts unpack it: JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
