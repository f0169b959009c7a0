"""Which keys of a recipe may differ between a run and its resumption."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# None of them changes what is learned: how far, how often it is looked at or saved, where it lies, how long is waited,
# or how the work is cut to fit the memory (equal up to rounding, and to which of the sampler's numbers a row gets).
_SAFE = re.compile(
    r"name|output_dir|steps|checkpoint\..*|report\..*|evaluation\.every|rollout\.max_rows"
    r"|reward\.\d+\.(time_limit_seconds|concurrent_calls)|actor\.(micro_batch_tokens|gradient_checkpointing)"
)


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Lines `key: was …, is …` for two recipes as nested mappings: the safe changes, and those that are not."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    safe: list[str] = []
    unsafe: list[str] = []
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            (safe if _SAFE.fullmatch(key) else unsafe).append(f"{key}: was {before.get(key)}, is {after.get(key)}")
    return safe, unsafe


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list) and tree:
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{key}.{number}")
    else:
        yield key, tree
