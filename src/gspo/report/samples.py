"""The responses of a run, read back from rollouts/step_*.jsonl or evaluation/step_*.jsonl."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.report.run_files import RunFiles, is_step, section
from gspo.run.plain_files import content_of, parsed

# Of a token's |log ratio|, the numbers at which its colour gets stronger: the same in every view, so that the noise of
# rounding has no colour, and a step can be compared with another. tokens.js has them, too.
LEVELS = (0.001, 0.01, 0.1, 0.5)
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/reference/run_directory.md has its keys

_KINDS: Mapping[Any, Sequence[str]] = {
    str: ("query", "prompt", "completion", "finish_reason"),
    dict: ("rewards", "columns", "extra"),
    list | None: ("token_characters", "token_log_ratios", "token_advantages", "prompt_words"),
}
_NUMBERS = ("reward", "advantage", "sequence_ratio", "clipped", "mini_batch", "policy_version", "tokens")  # or null


def read_sample(line: bytes) -> Sample | None:
    """The response that a line of a file is; None where it is none, as half a line is."""
    content = parsed(line) or {}
    try:
        return content if "query" in content and _is_sample(content) else None
    except (ValueError, OverflowError, RecursionError):  # a number that JSON does not have, or too large; too deep
        return None


def _is_sample(line: Sample) -> bool:
    """Whether all that is made of a response can be made of this one; a later version may say more of it."""
    if not all(isinstance(line[name], kind) for kind, names in _KINDS.items() for name in names if name in line):
        return False
    lists = {name: line.get(name) or () for name in _KINDS[list | None]}
    json.dumps({name: value for name, value in line.items() if name not in lists}, allow_nan=False)
    places = (line.get("tokens", 0), *lists["token_characters"], *lists["prompt_words"])
    numbers = [*map(line.get, _NUMBERS), *line.get("rewards", {}).values(), *chain(*lists.values())]
    are_numbers = set(map(type, numbers)) <= {int, float, type(None)}
    are_small = are_numbers and is_number(sum(map(abs, filter(None, numbers))))
    return are_small and all(map(is_step, places)) and len(lists["prompt_words"]) in (0, 2)


def read_groups(path: Path) -> dict[str, list[Sample]]:
    """The responses of a step's file, by query, both in the order in which they were sampled."""
    return by_query(filter(None, map(read_sample, content_of(path).split(b"\n")[:-1])))


def by_query(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The responses to each query, both in their order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["query"], []).append(sample)
    return groups


def pass_threshold(run: RunFiles, evaluated: str | None = None) -> float:
    """What a response must get to pass: the recipe's, or that of the suite of this name."""
    evaluation = section(run.recipe, "evaluation")
    suites = {suite["name"]: suite for suite in evaluation.get("suites", ())}
    return float(suites.get(evaluated, evaluation).get("pass_threshold", 1.0))


def passes(sample: Sample, threshold: float) -> bool | None:
    """Whether a response passes by the first reward function that applies, as in an evaluation; None: none applies."""
    parts, failure = sample.get("rewards", {"": sample.get("reward")}), str(sample.get("failure"))
    for function, part in parts.items():
        if part is not None:
            return part >= threshold
        if failure.startswith(f"reward function {function}: "):
            return False
    return None


def interest(group: Sequence[Sample]) -> int:
    """How much a group shows: 0 of equal rewards; 2 or more where a mini-batch after the first trained it; else 1."""
    rewards = {sample.get("reward") for sample in group} - {None}
    moved = [sample.get("mini_batch") or 0 for sample in group if sample.get("sequence_ratio") not in (None, 1.0)]
    return 0 if len(rewards) < 2 else 2 + int(max(moved)) if any(moved) else 1


def cut_prompt(sample: Sample) -> list[str]:
    """The prompt in three parts, of which the second is the user's last words; empty where it is not said where."""
    prompt = sample.get("prompt", "")
    start, end = sample.get("prompt_words") or (len(prompt), len(prompt))
    return [prompt[:start], prompt[start:end], prompt[end:]]


def cut_into_tokens(sample: Sample) -> Sequence[str] | None:
    """The text that each token of a response makes; None where the file does not say."""
    text, lengths = sample.get("completion", ""), sample.get("token_characters")
    if lengths is None or sum(lengths) != len(text):
        return None
    return [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
