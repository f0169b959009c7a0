"""The engines: who samples how fast, what gspo costs beside a bare client, and what publishing takes.

    python -m benchmarks.engines --vllm-python .venv-vllm/bin/python              # all tables, about 11 minutes
    python -m benchmarks.engines --vllm-python … --only cost --rounds 15
    python -m benchmarks.engines --vllm-python … --quick                          # 64 × 64 and 1M alone
    python -m benchmarks.engines --vllm-python … --quick --rounds 3 --model "SmolLM2, 135M" --models 135M

All sides hold a Qwen3 of 1.0M parameters, or another model, in float32 and sample at temperature 1; no token ends a
response, so that all do the same work. They take turns within one run. Tables have medians, with the range in brackets.
"""

import argparse
from collections.abc import Iterable, Sequence

import torch

from benchmarks import decode
from benchmarks.engines import cost, publishing, sampling
from benchmarks.engines.start import vllm_engine
from benchmarks.machine import load
from gspo.rollout.sampler import Sampler

SIZE = "Qwen3, 1.0M"
TABLES = ("sampling", "cost", "publishing")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="the interpreter that has vLLM")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="some of the tables")
    parser.add_argument("--rounds", type=int, help="of each row, after one that is not counted (7; quick: 2)")
    parser.add_argument("--model", choices=decode.MODELS, default=SIZE, help="whose responses are sampled")
    parser.add_argument(
        "--models",
        nargs="+",
        choices=publishing.MODELS,
        default=["1M", "50M", "200M"],
        help="whose weights are published",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest size and the first model alone")
    options = parser.parse_args(arguments)
    rounds = options.rounds or (2 if options.quick else 7)
    works = sampling.WORKS[:1] if options.quick else sampling.WORKS
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {rounds} rounds; before: {load()}")
    wanted, python = set(options.only), options.vllm_python
    if wanted & {"sampling", "cost"}:
        policy = sampling.new_policy(decode.MODELS[options.model])
        with vllm_engine(policy, python) as engine:
            print(", ".join(f"{name}: {value}" for name, value in engine.describe().items()))
            if "sampling" in wanted:
                rows = (sampling.table_row(work, policy, Sampler(engine, policy), rounds) for work in works)
                _print("Sampling", sampling.HEAD, rows)
            if "cost" in wanted:
                rows = (cost.table_row(work, policy, engine, rounds) for work in works)
                _print("gspo beside a bare client of the same server", cost.HEAD, rows)
    if "publishing" in wanted:
        models = [publishing.MODELS[name] for name in (options.models[:1] if options.quick else options.models)]
        rows = (publishing.table_row(model, python, rounds) for model in models)
        _print("Publishing", publishing.HEAD, rows)
    print(f"\nafter: {load()}")


def _print(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n{title}\n\n| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
