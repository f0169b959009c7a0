"""Run directories as training leaves them, made in milliseconds."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gspo.run.lock import Lock

HOSTILE = "<script>alert('x')</script> <em>no</em> | a `code` &amp; **b** [c](d)\n| --- |\n\x02\\ _e_ # é\t$x_1$ <b>"
METRICS = {
    "reward/mean": 0.25,
    "reward/format/mean": 1.5,
    "memory/peak_bytes": 268435456,
    "ratio/sequence_quantiles": [0.5, None, 1.5],
    "ratio/sequence_quantiles_by_mini_batch": [[1.0, 2.0], [3.0]],
    "policy/grad_norm": None,
}
NUMBERS = {  # the same as a tracker has them; exact in 32 bits
    "reward/mean": 0.25,
    "reward/format/mean": 1.5,
    "memory/peak_bytes": 268435456,
    "ratio/sequence_quantiles/0": 0.5,
    "ratio/sequence_quantiles/2": 1.5,
    "ratio/sequence_quantiles_by_mini_batch/0/0": 1.0,
    "ratio/sequence_quantiles_by_mini_batch/0/1": 2.0,
    "ratio/sequence_quantiles_by_mini_batch/1/0": 3.0,
}
COLUMNS = ["query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason"]


class MadeRun:
    """A run's directory."""

    def __init__(self, path: Path, *, steps: int = 3, **recipe: Any) -> None:
        self.path = path
        self.lock: Lock | None = None
        path.mkdir(parents=True)
        tree = {"name": path.name, "steps": steps, "model": {"path": None}, "report": {"project": "made"}, **recipe}
        (path / "recipe.yaml").write_text(yaml.safe_dump(tree))

    def step(self, number: int, *, rollouts: int = 10, loss: float | None = None) -> None:
        """Write a step as training does: its line, then its rollouts."""
        self.line("metrics.jsonl", {"step": number, **METRICS, "policy/loss": loss})
        if number and rollouts:
            self.rollouts(number, rollouts)

    def rollouts(self, step: int, number: int) -> None:
        rest = {"advantage": -0.5, "sequence_ratio": None, "clipped": 0.0, "finish_reason": "stop", "tokens": 7}
        for place in range(number):
            row = {"query": f"q:{place}", "prompt": "1+1=", "completion": HOSTILE, "reward": float(place), **rest}
            self.line(f"rollouts/step_{step:06d}.jsonl", row)

    def event(self, event: str, **more: Any) -> None:
        """Write an event; from one with a `process`, which is this one, to its end the run is locked as it goes on."""
        if "process" in more and self.lock is None:
            self.lock = Lock(self.path)
        if event == "ended" and self.lock is not None:
            self.lock.release()
            self.lock = None
        about = {"event": event, "time": "2126-01-01T00:00:00+00:00", "host": socket.gethostname(), **more}
        self.line("history.jsonl", about)

    def line(self, file: str, content: Mapping[str, Any]) -> None:
        (self.path / file).parent.mkdir(exist_ok=True)
        with (self.path / file).open("a", encoding="utf-8") as log:
            log.write(json.dumps(content, ensure_ascii=False) + "\n")
