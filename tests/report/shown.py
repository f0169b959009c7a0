"""Rollouts made by hand, and what `gspo show` makes of them."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from gspo.report.show import show

RUN = Path("runs/a")
UNTRAINED: dict[str, Any] = {
    "advantage": 0.0,
    "sequence_ratio": None,
    "clipped": None,
    "mini_batch": None,
    "token_log_ratios": None,
}


def sample(query: str = "q:1", **changes: Any) -> dict[str, Any]:
    made = {
        "query": query,
        "prompt": "2 + 2 =",
        "completion": "it is 4",
        "reward": 1.0,
        "rewards": {"verifier": 1.0, "format": 0.5},
        "failure": None,
        "advantage": 0.75,
        "sequence_ratio": 1.00125,
        "clipped": 0.5,
        "mini_batch": 2,
        "tokens": 4,
        "finish_reason": "stop",
        "policy_version": 8,
        "token_characters": [2, 3, 2, 0],
        "token_log_ratios": [0.0, 0.002, -0.004, 0.001],
        "token_advantages": None,
    }
    return {**made, **changes}


def write(recipe: str = "", /, metrics: str = "", **steps: list[dict[str, Any]]) -> None:
    """A run of five steps with these rollouts, as it writes them."""
    (RUN / "rollouts").mkdir(parents=True, exist_ok=True)
    (RUN / "recipe.yaml").write_text("name: mine\nsteps: 5\nmodel: {}\n" + recipe, encoding="utf-8")
    (RUN / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    for name, samples in steps.items():
        lines = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in samples]
        file = RUN / "rollouts" / f"step_{int(name.removeprefix('s')):06d}.jsonl"
        file.write_text("".join(lines), encoding="utf-8")


def shown(step: int | None = None, query: str | None = None, *, as_json: bool = False, **console: Any) -> str:
    file = io.StringIO()
    made = Console(file=file, width=40, highlight=False, **console)
    show(RUN, step=step, query=query, as_json=as_json, console=made)
    return file.getvalue()


def coloured(**given: Any) -> str:
    return shown(**given, force_terminal=True, color_system="truecolor")


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
