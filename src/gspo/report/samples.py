"""The responses of a run, read back from rollouts/step_*.jsonl or evaluation/step_*.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.metrics.numbers import is_number
from gspo.report.run_files import RunFiles
from gspo.report.shapes import is_sample, is_step, section
from gspo.run.plain_files import parsed, read_json_lines

# Of a token's |log ratio|, the numbers at which its colour gets stronger: the same in every view, so that the noise of
# rounding has no colour, and a step can be compared with another. tokens.js has them, too.
LEVELS = (0.001, 0.01, 0.1, 0.5)
Sample = Mapping[str, Any]  # a line of rollouts/step_*.jsonl; docs/reference/run_directory.md has its keys


def read_sample(line: bytes) -> Sample | None:
    """The response that a line of a file is; None where it is none."""
    content = parsed(line)
    return content if content is not None and is_sample(content) else None


def read_groups(path: Path) -> dict[str, list[Sample]]:
    """The responses of a step's file, by query, both in the order in which they were sampled."""
    return by_query(filter(is_sample, read_json_lines(path)[0]))


def by_query(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """The responses to each query, both in their order."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample["query"], []).append(sample)
    return groups


def pass_threshold(run: RunFiles, evaluated: str | None = None) -> float:
    """What a response must get to pass: the recipe's, or that of the suite of this name."""
    evaluation = section(run.recipe, "evaluation")
    suites = evaluation.get("suites")
    named = [suite for suite in suites if isinstance(suite, Mapping)] if isinstance(suites, list) else []
    settings = next((suite for suite in named if evaluated is not None and suite.get("name") == evaluated), evaluation)
    threshold = settings.get("pass_threshold")
    return float(threshold) if is_number(threshold) else 1.0


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
    prompt, words = str(sample.get("prompt", "")), sample.get("prompt_words") or []
    start, end = words if len(words) == 2 and all(map(is_step, words)) else (len(prompt), len(prompt))
    return [prompt[:start], prompt[start:end], prompt[end:]]


def cut_into_tokens(sample: Sample) -> Sequence[str] | None:
    """The text that each token of a response makes; None where the file does not say."""
    lengths = sample.get("token_characters")
    if not (isinstance(lengths, list) and all(isinstance(length, int) and length >= 0 for length in lengths)):
        return None
    text, place, pieces = str(sample.get("completion", "")), 0, []
    for length in lengths:
        pieces.append(text[place : place + length])
        place += length
    return pieces if place == len(text) else None
