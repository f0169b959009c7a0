"""Seconds a step with an engine beside the trainer: synchronous, and with `rollout.max_staleness` 1 and 2; whole runs.

    python -m benchmarks.overlap [--vllm PYTHON] [--turns 2] [--steps 13] [--keep DIR] [--smollm2]

The engine is the embedded one, or vLLM of that interpreter.

Responses are ragged, up to 512 tokens: the untrained model ends each with one token of about 200, and learns next to
nothing. With --smollm2 (after `make smollm2`) it is a real model of 135M parameters, whose responses to sums have up to
48 tokens. The synchronous run has both cores for either side; beside each other they have one each. The bound is what
one thread each would reach if nothing but the longer of the two sides were to be waited for.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.decode import SMOLLM2
from benchmarks.machine import load

SUMS = Path(__file__).parents[1] / "recipes" / "smollm2_sums.jsonl"
ARMS = {"synchronous, 2 threads": (0, 2), "synchronous, 1 thread": (0, 1), "η = 1": (1, 1), "η = 2": (2, 1)}
WARM, LAST = 3, 2  # steps that are not counted: beside the last ones nothing is sampled any more
RECIPE = """\
name: {name}
steps: {steps}
model: {{device: cpu, {model}}}
queries: {{path: {prompts}}}
rollout: {{{engine}, queries_per_step: {queries}, group_size: 4, max_new_tokens: {new_tokens},
  max_staleness: {staleness}}}
reward: [{{function: "reward.py:share"}}]
actor: {{old_logprobs: engine, optimizer: {{lr: 1.0e-7}}}}
evaluation: {{num_queries: 0}}
checkpoint: {{every: 0}}
report: {{tokens: false}}
"""
UNTRAINED = """tokenizer: fit, architecture: {model_type: qwen3, hidden_size: 192, intermediate_size: 768,
  num_hidden_layers: 4, num_attention_heads: 6, num_key_value_heads: 2, head_dim: 32, tie_word_embeddings: true,
  max_position_embeddings: 1024}"""
REWARD = "def share(completions, **_):\n    return [len(set(text)) / max(1, len(text)) for text in completions]\n"


def main() -> None:
    """Run each arm in turn, so many times, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that has vLLM")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--keep", type=Path, help="where the run directories stay; benchmarks.simulate reads them")
    parser.add_argument("--smollm2", action="store_true", help="the real model")
    options = parser.parse_args()
    real: dict[str, Any] = (
        {"model": f"path: {SMOLLM2}", "prompts": str(SUMS), "new_tokens": 48} if options.smollm2 else {}
    )
    seconds: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}  # of each turn
    with tempfile.TemporaryDirectory() as passing:
        place = prepare(options.keep or Path(passing))
        print(f"{load()}; means of steps {WARM + 1} to {options.steps - LAST} of {options.turns} runs each", flush=True)
        for turn in range(options.turns):
            for arm in ARMS:
                staleness, threads = ARMS[arm]
                how = {"vllm": options.vllm, "staleness": staleness, "threads": threads, "steps": options.steps}
                seconds[arm].append(_means(run(place, f"run_{staleness}_{threads}_{turn}", **how, **real)))
    print("| | s a step | sampling waited for | update | times as fast as synchronous, 2 threads |")
    print("|---|---|---|---|---|")
    first = [turn["total"] for turn in seconds["synchronous, 2 threads"]]
    for arm, turns in seconds.items():
        total, waited, update = (fmean(turn[name] for turn in turns) for name in ("total", "rollout", "update"))
        print(f"| {arm} | {total:.2f} | {waited:.2f} | {update:.2f} | {_ratio(first, [t['total'] for t in turns])} |")
    longer = [max(turn["rollout"], turn["total"] - turn["rollout"]) for turn in seconds["synchronous, 1 thread"]]
    print(f"| bound: the longer side alone, 1 thread | {fmean(longer):.2f} | | | {_ratio(first, longer)} |")


def _ratio(first: list[float], others: list[float]) -> str:
    ratios = [one / other for one, other in zip(first, others, strict=True)]
    return f"{fmean(first) / fmean(others):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def prepare(place: Path) -> Path:
    """Write the prompts, of one token (a word) and of 480 (symbols), and the reward function; the place again."""
    place.mkdir(parents=True, exist_ok=True)
    for name, first, length in (("queries", 0x4E00, 24), ("long", 0x2200, 480)):
        symbols = [chr(first + number) for number in range(200)]
        texts = ["".join(symbols[(7 * row + 3 * column) % 200] for column in range(length)) for row in range(256)]
        texts[0] = "".join(symbols)
        rows = "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
        (place / f"{name}.jsonl").write_text(rows, encoding="utf-8")
    (place / "reward.py").write_text(REWARD)
    return place


def run(
    place: Path,
    name: str,
    *,
    vllm: str | None,
    staleness: int,
    threads: int,
    steps: int,
    queries: int = 16,
    new_tokens: int = 512,
    prompts: str = "queries.jsonl",
    model: str = UNTRAINED,
) -> Path:
    """Make a run, with that many threads for either side; its directory."""
    engine = f"engine: vllm, vllm: {{python: {Path(vllm).absolute()}}}" if vllm else "engine: embedded"
    shape = {"steps": steps, "staleness": staleness, "queries": queries, "new_tokens": new_tokens, "prompts": prompts}
    shape |= {"model": model}
    (place / f"{name}.yaml").write_text(RECIPE.format(name=name, engine=engine, **shape))
    command = [sys.executable, "-m", "gspo", "train", f"{name}.yaml"]
    root = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": root}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return place / "runs" / name


def _means(directory: Path) -> dict[str, float]:
    """Seconds a step; no medians, since steps that wait and steps that do not may take turns."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] >= WARM][:-LAST]
    elapsed = [line["time/elapsed_seconds"] for line in lines]
    stages = {stage: fmean(line[f"time/{stage}_seconds"] for line in lines[1:]) for stage in ("rollout", "update")}
    return {"total": (elapsed[-1] - elapsed[0]) / (len(lines) - 1), **stages}


if __name__ == "__main__":
    main()
