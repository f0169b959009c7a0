"""Run directories as training leaves them, made in milliseconds."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HOSTILE = "<script>alert('x')</script> <em>no</em> | a `code` &amp; **b** [c](d)\n| --- |\n\n\x02\\ _e_ # é\t$x_1$ <b>"
METRICS = {
    "reward/mean": 0.25,
    "reward/format/mean": 1.5,
    "memory/peak_bytes": 268435456,
    "ratio/sequence_quantiles": [0.5, None, 1.5],
    "ratio/sequence_quantiles_by_mini_batch": [[1.0, 2.0], [3.0]],
    "clip/token_fraction_by_length": [0.5, 0.25],
    "policy/grad_norm": None,
}
NUMBERS = {  # the same as a tracker has them; exact in 32 bits
    "reward/mean": 0.25,
    "reward/format/mean": 1.5,
    "memory/peak_bytes": 268435456,
    "ratio/sequence_quantiles/0": 0.5,
    "ratio/sequence_quantiles/2": 1.5,
}
COLUMNS = ["query", "prompt", "completion", "reward", "advantage", "sequence_ratio", "clipped", "finish_reason"]


class MadeRun:
    """A run's directory."""

    def __init__(self, path: Path, *, steps: int = 3, project: str = "made", **recipe: Any) -> None:
        self.path = path
        path.mkdir(parents=True)
        tree = {"name": path.name, "steps": steps, "model": {"path": None}, "report": {"project": project}, **recipe}
        (path / "recipe.yaml").write_text(yaml.safe_dump(tree))

    def step(self, number: int, *, rollouts: int = 10, loss: float | None = None) -> None:
        """Write a step as training does: its line, then its rollouts."""
        self.line("metrics.jsonl", {"step": number, **METRICS, "policy/loss": loss})
        rest = {"advantage": -0.5, "sequence_ratio": None, "clipped": 0.0, "finish_reason": "stop", "tokens": 7}
        for place in range(rollouts if number else 0):
            row = {"query": f"q:{place}", "prompt": "1+1=", "completion": HOSTILE, "reward": float(place), **rest}
            self.line(f"rollouts/step_{number:06d}.jsonl", row)

    def line(self, file: str, content: Mapping[str, Any]) -> None:
        (self.path / file).parent.mkdir(exist_ok=True)
        with (self.path / file).open("a", encoding="utf-8") as log:
            log.write(json.dumps(content, ensure_ascii=False) + "\n")

    def state(self, name: str = "wandb", **changes: Any) -> Any:
        """What the file of a tracker says, after changes are written to it."""
        file = self.path / "trackers" / f"{name}.json"
        if changes:
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **changes}))
        return json.loads(file.read_text())
