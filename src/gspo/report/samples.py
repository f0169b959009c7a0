"""The responses of a run, read back from rollouts/step_*.jsonl or evaluation/step_*.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gspo.report.run_files import RunFiles, section
from gspo.run.plain_files import read_json_lines

# Of a token's |log ratio|, the numbers at which its colour gets stronger: the same in every view, so that the noise of
# rounding has no colour, and a step can be compared with another. tokens.js has them, too.
LEVELS = (0.001, 0.01, 0.1, 0.5)
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/reference/run_directory.md has its keys
Groups = Mapping[str, Sequence[Sample]]  # the responses to each query, both in the order in which they were sampled


def read_groups(path: Path) -> tuple[Groups, int]:
    """The responses of a step's file, and how many lines of it could not be read."""
    samples, num_bad = read_json_lines(path)
    return by_query(samples), num_bad


def by_query(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The responses to each query, both in their order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["query"], []).append(sample)
    return groups


def pass_threshold(run: RunFiles, evaluated: str | None = None) -> float:
    """Return what a response must get to pass: the recipe's, or that of the suite of this name."""
    evaluation = section(run.recipe, "evaluation")
    suites = {suite["name"]: suite for suite in evaluation.get("suites", ())}
    return float(suites.get(evaluated, evaluation).get("pass_threshold", 1.0))


def passes(sample: Sample, threshold: float) -> bool | None:
    """Whether a response passes by the first reward function that applies, as in an evaluation; None: none applies."""
    for function, part in sample["rewards"].items():
        if part is not None:
            return bool(part >= threshold)
        if str(sample["failure"]).startswith(f"reward function {function}: "):
            return False
    return None


def interest(group: Sequence[Sample]) -> int:
    """How much a group shows: 0 of equal rewards; 2 or more where a mini-batch after the first trained it; else 1."""
    rewards = {sample["reward"] for sample in group} - {None}
    moved = [sample.get("mini_batch") or 0 for sample in group if sample.get("sequence_ratio") not in (None, 1.0)]
    return 0 if len(rewards) < 2 else 2 + max(moved) if any(moved) else 1


def cut_prompt(sample: Sample) -> list[str]:
    """The prompt in three parts, of which the second is the user's last words; empty where it is not said where."""
    prompt = sample["prompt"]
    start, end = sample.get("prompt_words") or (len(prompt), len(prompt))
    return [prompt[:start], prompt[start:end], prompt[end:]]


def cut_into_tokens(sample: Sample) -> Sequence[str] | None:
    """The text that each token of a response makes; None where the file does not say."""
    text, lengths = sample["completion"], sample.get("token_characters")
    return lengths and [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
