"""Which keys of a recipe may differ between a run and its resumption."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# None of them changes what is learned: how far, how often it is looked at or saved, where it lies, how long is waited.
_SAFE = re.compile(
    r"name|output_dir|steps|checkpoint\..*|report\..*|evaluation\.every|reward\.\d+\.(time_limit_seconds|concurrent_calls)"
)
# How the work is cut to fit the memory: equal but for rounding.
_ROUNDING = re.compile(r"rollout\.max_rows|actor\.(micro_batch_tokens|gradient_checkpointing|gradient_noise)")

# Keys that recipes of earlier versions do not have, with the value that says what was done then.
_ABSENT = {"model.trust_remote_code": False, "actor.discount": 1.0, "actor.minirl_cap": 5.0}
_LEVEL = "actor.correction_level"


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Lines `key: was …, is …`, by what the change does to a run."""

    safe: Sequence[str]
    rounding: Sequence[str]  # may be made, but the run is no longer bit by bit the one it would have been
    refused: Sequence[str]


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What differs between two recipes given as nested mappings."""
    before, after = _with_absent(dict(_leaves(then))), _with_absent(dict(_leaves(now)))
    safe: list[str] = []
    rounding: list[str] = []
    refused: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            kind = safe if _SAFE.fullmatch(key) else rounding if _ROUNDING.fullmatch(key) else refused
            kind.append(f"{key}: was {before.get(key)}, is {after.get(key)}")
    return Changes(safe=safe, rounding=rounding, refused=refused)


def _with_absent(leaves: dict[str, Any]) -> dict[str, Any]:
    by_token = leaves.get("actor.correction", "none") in ("none", "icepop")
    return {**_ABSENT, _LEVEL: "token" if by_token else "sequence", **leaves}


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and tree:
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{key}.{number}")
    else:
        yield key, tree
