"""An adapter against all weights, with SmolLM2-135M (`make smollm2`): seconds of a step, memory, size of a checkpoint.

python -m benchmarks.lora --rounds 2      # about 10 minutes on two cores

In turn, each way in a process of its own; ratios are of the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_sums.yaml"
KEYS = ["steps=4", "rollout.queries_per_step=8", "rollout.group_size=8", "rollout.max_new_tokens=48"]
KEYS += ["actor.mini_batches=4", "evaluation.num_queries=0", "checkpoint.keep=1", "report.rollouts=false"]
WAYS = {
    "all weights": [],
    "LoRA, rank 16": ["model.lora={}", "actor.optimizer.lr=3e-4"],
    "LoRA, rank 1": ["model.lora={rank: 1}", "actor.optimizer.lr=3e-4"],
}
MEASURES = ("step, s", "sampling, s", "update, s", "peak memory, MiB", "checkpoint, MiB")


def measured(keys: list[str]) -> list[float]:
    """The measures of a run: medians over its steps but the first, in which all is warmed up."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = ["train", str(RECIPE), *KEYS, *keys, f"output_dir={run}"]
        subprocess.run([sys.executable, "-m", "gspo.cli", *words], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
        (checkpoint,) = (run / "checkpoints").iterdir()
        size = sum(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())

    def median(name: str) -> float:
        return statistics.median(line[name] for line in lines)

    times = [median(f"time/{stage}_seconds") for stage in ("total", "rollout", "update")]
    return [*times, max(line["memory/peak_bytes"] for line in lines) / 2**20, size / 2**20]


def main() -> None:
    """Print a table: the measures of each way, and beside them their ratios to those of all weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    rounds: list[dict[str, Any]] = []
    for _ in range(parser.parse_args().rounds):
        rounds.append({name: measured(keys) for name, keys in WAYS.items()})
    print("| | " + " | ".join(MEASURES) + " |\n|---" * 1 + "|---" * len(MEASURES) + "|")
    for name in WAYS:
        cells = []
        for number in range(len(MEASURES)):
            own = [each[name][number] for each in rounds]
            ratios = [each[name][number] / each["all weights"][number] for each in rounds]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            cells.append(f"{statistics.mean(own):,.1f}" + ("" if name == "all weights" else f" ({spread})"))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
