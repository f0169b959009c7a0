"""Seconds a step with an engine beside the trainer: synchronous, and with `rollout.max_staleness` 1 and 2; whole runs.

    python -m benchmarks.overlap [--vllm PYTHON] [--turns 2] [--steps 12] [--keep DIR]

The engine is the embedded one, or vLLM of that interpreter.

Responses are ragged, up to 512 tokens: the untrained model ends each with one token of about 200, and learns next to
nothing. The synchronous run has both cores for either side; beside each other they have one each. The bound is what
one thread each would reach if nothing but the longer of the two sides were to be waited for.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.machine import load

ARMS = {"synchronous, 2 threads": (0, 2), "synchronous, 1 thread": (0, 1), "η = 1": (1, 1), "η = 2": (2, 1)}
WARM, LAST = 3, 2  # steps that are not counted: beside the last ones nothing is sampled any more
RECIPE = """\
name: {name}
steps: {steps}
model:
  tokenizer: fit
  device: cpu
  architecture: {{model_type: qwen3, hidden_size: 192, intermediate_size: 768, num_hidden_layers: 4,
    num_attention_heads: 6, num_key_value_heads: 2, head_dim: 32, tie_word_embeddings: true,
    max_position_embeddings: 1024}}
queries: {{path: {prompts}}}
rollout: {{{engine}, queries_per_step: {queries}, group_size: 4, max_new_tokens: {new_tokens},
  max_staleness: {staleness}}}
reward: [{{function: "reward.py:share"}}]
actor: {{old_logprobs: engine, optimizer: {{lr: 1.0e-7}}}}
evaluation: {{num_queries: 0}}
checkpoint: {{every: 0}}
report: {{tokens: false}}
"""
REWARD = "def share(completions, **_):\n    return [len(set(text)) / max(1, len(text)) for text in completions]\n"


def main() -> None:
    """Run each arm in turn, so many times, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that has vLLM")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="where the run directories stay; benchmarks.simulate reads them")
    options = parser.parse_args()
    told: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as passing:
        place = prepare(options.keep or Path(passing))
        print(
            f"{load()}; medians of steps {WARM + 1} to {options.steps - LAST} of {options.turns} runs each", flush=True
        )
        for turn in range(options.turns):
            for arm in ARMS:
                staleness, threads = ARMS[arm]
                how = {"vllm": options.vllm, "staleness": staleness, "threads": threads, "steps": options.steps}
                told[arm] += _seconds(run(place, f"run_{staleness}_{threads}_{turn}", **how))
    print("| | s a step | sampling waited for | update | times as fast as synchronous, 2 threads |")
    print("|---|---|---|---|---|")
    seconds = {
        arm: {name: statistics.median(line[name] for line in lines) for name in lines[0]} for arm, lines in told.items()
    }
    first = seconds["synchronous, 2 threads"]["total"]
    for arm, own in seconds.items():
        print(
            f"| {arm} | {own['total']:.2f} | {own['rollout']:.2f} | {own['update']:.2f} | {first / own['total']:.2f} |"
        )
    one = seconds["synchronous, 1 thread"]
    longer = max(one["rollout"], one["total"] - one["rollout"])
    print(f"| bound: the longer side alone, 1 thread | {longer:.2f} | | | {first / longer:.2f} |")


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
) -> Path:
    """Make a run, with that many threads for either side; its directory."""
    engine = f"engine: vllm, vllm: {{python: {Path(vllm).absolute()}}}" if vllm else "engine: embedded"
    shape = {"steps": steps, "staleness": staleness, "queries": queries, "new_tokens": new_tokens, "prompts": prompts}
    (place / f"{name}.yaml").write_text(RECIPE.format(name=name, engine=engine, **shape))
    command = [sys.executable, "-m", "gspo", "train", f"{name}.yaml"]
    root = str(Path(__file__).parents[1] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": root}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return place / "runs" / name


def _seconds(directory: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line["step"] > WARM][:-LAST]
    return [{stage: line[f"time/{stage}_seconds"] for stage in ("total", "rollout", "update")} for line in counted]


if __name__ == "__main__":
    main()
