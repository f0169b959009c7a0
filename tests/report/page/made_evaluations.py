"""Evaluations made by hand, in the format of `gspo eval`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
_NUMBERS = (
    *("pass_at_1", "error_over_questions", "error_over_samples", "reward_mean", "reward_error", "mean_response_tokens"),
    *("truncated_fraction", "num_questions", "num_failed", "num_unjudged", "seconds_sampling", "seconds_judging"),
)


def response(query: str, passed: bool | None, *, number: int = 0, **changes: Any) -> Line:
    """A line of evaluation.json's responses."""
    reward = None if passed is None else float(passed)
    made: Line = {
        "query": query,
        "sample": number,
        "prompt": f"You are asked: what is {query}?",
        "columns": {"answer": "42"},
        "completion": f"It is {number}.",
        "reward": reward,
        "rewards": {"math": reward},
        "passed": passed,
        "failure": None,
        "extra": {},
        "tokens": 10 + number,
        "finish_reason": "stop",
    }
    return {**made, **changes}


def responses(passed: Mapping[str, Sequence[bool | None]]) -> list[Line]:
    """Those to each question, that passed so."""
    return [response(query, own, number=number) for query, row in passed.items() for number, own in enumerate(row)]


def suite(lines: Sequence[Line], *, settings: Mapping[str, Any] | None = None, **numbers: Any) -> dict[str, Any]:
    """A suite with these responses; of its numbers those that are given, the others null."""
    return {
        "settings": {"samples": 2, "temperature": 1.0, "max_new_tokens": 64, **(settings or {})},
        "data": {"path": "sums.jsonl", "num_rows": 4, "sha256": "d1"},
        "numbers": {**dict.fromkeys(_NUMBERS), "num_responses": len(lines), "pass_at_k": {}, **numbers},
        "responses": list(lines),
    }


def write_evaluation(path: Path, *, name: str = "small", **suites: Mapping[str, Any]) -> Path:
    """An evaluation's directory."""
    path.mkdir(parents=True, exist_ok=True)
    model = {"path": f"models/{name}", "name": name, "sha256": "0123"}
    tree = {"format": 1, "gspo": "0.1.0", "model": model, "engine": {"name": "embedded"}, "seed": 7, "suites": suites}
    (path / "evaluation.json").write_text(json.dumps(tree), encoding="utf-8")
    return path
