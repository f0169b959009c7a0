"""An adapter against all weights, with SmolLM2-135M (`make smollm2`): seconds of a step, memory, size of a checkpoint.

python -m benchmarks.lora --rounds 2      # about 10 minutes on two cores
python -m benchmarks.lora --rounds 3 --vllm .venv-vllm/bin/python      # publishing to vLLM; about 6 minutes a round

In turn, each way in a process (with --vllm a server) of its own; ratios are of the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gspo import loop
from gspo.engine.make import make_engine
from gspo.engine.server.engine import ServerEngine
from gspo.model.load import make_tokenizer
from gspo.model.policy import load_policy
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Query

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


PUBLISHED = {
    "all weights": [],
    "LoRA, rank 16, merged": ["model.lora={}"],
    "LoRA, rank 16, as an adapter": ["model.lora={}", "rollout.vllm.adapters=true"],
}
TIMES = ("hand-over, s", "with its proof, s", "sampling, s")
_VERSIONS = 6


async def _awaited(work: Awaitable[None]) -> None:
    await work


def published(keys: list[str], python: str) -> list[float]:
    """Seconds of a hand-over to vLLM, of one with its proof, and of 64 responses of 48 tokens, once warm: medians."""
    words = [f"rollout.vllm.python={python}", "rollout.engine=vllm", *keys]
    recipe = load_recipe(RECIPE, words)
    tokenizer = make_tokenizer(recipe.model, ())
    policy = replace(load_policy(recipe.model, tokenizer, seed=0), stop_ids=())
    settings = RolloutConfig(max_new_tokens=48, group_size=8)
    queries = [
        Query(id=f"{n}", prompt="", text="", prompt_ids=tuple(range(100 * n + 40, 100 * n + 80)), columns={})
        for n in range(8)
    ]
    times: list[list[float]] = []
    with tempfile.TemporaryDirectory() as scratch:
        engine = make_engine(recipe, policy, directory=Path(scratch), longest_sequence=128)
        assert isinstance(engine, ServerEngine)
        sampler, fleet = Sampler(engine, policy), engine._fleet
        try:
            for version in range(_VERSIONS):
                with torch.no_grad():
                    for parameter in policy.model.parameters():
                        if parameter.requires_grad:
                            parameter += 1e-5 * torch.randn_like(parameter)
                started, label = time.monotonic(), f"benchmark-{version}"
                weights = fleet.adapters.ready(label) if fleet.adapters else fleet._weights()
                with weights as hand_over:
                    loop.run(_awaited(hand_over(fleet.servers[0], label)))
                handed = time.monotonic() - started
                sampler.publish(version)
                whole = sampler.engine.take_metrics()["engine/publish_seconds"]
                started = time.monotonic()
                sampler.sample(queries, settings, SamplingKey(seed=0, step=version + 1))
                times.append([handed, whole, time.monotonic() - started])
        finally:
            engine.close()
    return [statistics.median(each) for each in zip(*times[1:], strict=True)]


def main() -> None:
    """Print a table: the measures of each way, and beside them their ratios to those of all weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm", help="an interpreter that has vLLM")
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        if options.vllm:
            rounds.append({name: published(keys, options.vllm) for name, keys in PUBLISHED.items()})
        else:
            rounds.append({name: measured(keys) for name, keys in WAYS.items()})
    measures = TIMES if options.vllm else MEASURES
    print("| | " + " | ".join(measures) + " |\n|---" * 1 + "|---" * len(measures) + "|")
    for name in rounds[0]:
        cells = []
        for number in range(len(measures)):
            own = [each[name][number] for each in rounds]
            ratios = [each[name][number] / each["all weights"][number] for each in rounds]
            spread = f"{min(ratios):.2f}–{max(ratios):.2f}"
            cells.append(f"{statistics.mean(own):,.1f}" + ("" if name == "all weights" else f" ({spread})"))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
