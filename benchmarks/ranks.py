"""The update on two ranks of one thread each, sharded, beside one process of two threads; they take turns.

    python -m benchmarks.ranks [--turns 5] [--responses 32] [--tokens 128] [--sizes 1M 50M]
    python -m benchmarks.ranks --sizes 135M --memory 135M    # SmolLM2, after `make smollm2`

The update is the gradient of a mini-batch and an optimiser step. Gives the seconds, their ratio, how much memory a
process needs above what it has when its libraries are loaded, to load the model from files and to train it, and what
the ranks send each other in an update: the bytes over the loopback interface, in sizes of the model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.decode import SMOLLM2
from benchmarks.machine import load, peak_memory, reset_peak_memory
from gspo.learner.loss import Denominators
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.ranks import gathered, sharding_of
from gspo.learner.update import accumulate_gradient
from gspo.model.load import fit_tokenizer
from gspo.model.policy import load_policy
from gspo.recipe.sections import ActorConfig, ModelConfig, OptimizerConfig
from gspo.types import Query, Sample

SIZES = {"1M": (128, 4), "50M": (640, 7), "250M": (768, 28), "135M": None}  # hidden size and layers; None: SmolLM2
GROUP, PROMPT, VOCABULARY = 8, 64, 8_000


def main() -> None:
    """Measure and print the table; or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--responses", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "50M"], help="whose time is taken")
    parser.add_argument("--memory", choices=SIZES, default="250M", help="the size whose memory is measured")
    parser.add_argument("--work", metavar="SIZE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(options)
        return
    print(
        f"{load()}; medians of {options.turns} turns; responses of {options.tokens} tokens, {options.responses} a step"
    )
    print("| parameters | 1 process, s | 2 ranks, s | times as fast | sent, models |")
    print("|---|---|---|---|---|")
    for size in options.sizes:
        _compare(options, size)
    print("\n| processes | each loads, MiB | each trains, MiB |")
    print("|---|---|---|")
    for number in (1, 2, 4):
        _measure_memory(options, options.memory, number)


def _compare(options: argparse.Namespace, size: str) -> None:
    """One process and two ranks, which take turns."""
    with tempfile.TemporaryDirectory() as place:
        _save_model(size, Path(place))
        ways = [_start(options, size, 1, place), _start(options, size, 2, place)]
        told: list[list[dict[str, Any]]] = [[], []]
        for _ in range(options.turns + 1):
            for own, processes in zip(told, ways, strict=True):
                own.append(_turn(processes))
        for process in (process for processes in ways for process in processes):
            process.communicate()
    one, two = ([turn["seconds"] for turn in own[1:]] for own in told)  # the first warms up
    ratios = [first / second for first, second in zip(one, two, strict=True)]
    times = f"{statistics.median(one):.2f} | {statistics.median(two):.2f}"
    ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    sent = statistics.median(turn["sent"] for turn in told[1][1:])
    print(f"| {told[0][0]['parameters']:,} | {times} | {ratio} | {sent:.2f} |", flush=True)


def _measure_memory(options: argparse.Namespace, size: str, number: int) -> None:
    """What each process has at most above its libraries, of a model of many layers."""
    with tempfile.TemporaryDirectory() as place:
        _save_model(size, Path(place))
        # What is freed is not to be counted: glibc would keep it.
        processes = _start(options, size, number, place, MALLOC_MMAP_THRESHOLD_=str(2**20))
        told = [_turn(processes) for _ in range(2)][-1]  # moments are there from the second update on
        for process in processes:
            process.communicate()
    if number == 1:
        model = 4 * told["parameters"] / 2**20
        print(f"| {told['parameters']:,} parameters | {model:.0f} | {4 * model:.0f} |")
    print(f"| {number} | {told['loaded'] / 2**20:.0f} | {told['bytes'] / 2**20:.0f} |", flush=True)


def _save_model(size: str, place: Path) -> None:
    shape = SIZES[size]
    if shape is None:
        (place / "model").symlink_to(SMOLLM2.resolve(strict=True))
        return
    width, layers = shape
    architecture: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 32,
        "num_key_value_heads": width // 64,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    recipe = ModelConfig(architecture=architecture, tokenizer="fit", device="cpu")
    load_policy(recipe, fit_tokenizer(["0123456789"]), seed=0).save(place / "model")


def _sent() -> int:
    """The bytes that have gone over the loopback interface."""
    (line,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.partition(":")[2].split()[0])


def _start(
    options: argparse.Namespace, size: str, number: int, place: str, **environment: str
) -> list["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "benchmarks.ranks", "--work", size, "--responses", str(options.responses)]
    command += ["--tokens", str(options.tokens)]
    own = {"OMP_NUM_THREADS": str(max(1, 2 // number)), "WORLD_SIZE": str(number), "STORE": f"{place}/{number}"}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen(command, env={**os.environ, **environment, **own, "RANK": str(n)}, **pipes)
        for n in range(number)
    ]


def _turn(processes: list["subprocess.Popen[str]"]) -> dict[str, Any]:
    """Have all of them make an update; what the first says of it."""
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.stdout.readline() for process in processes if process.stdout]
    told: dict[str, Any] = json.loads(lines[0])
    return told


def _work(options: argparse.Namespace) -> None:
    """Make an update whenever a line comes, and say how long it took."""
    number = int(os.environ["WORLD_SIZE"])
    if number > 1:
        store, own = f"file://{os.environ['STORE']}", int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=store, rank=own, world_size=number, timeout=timedelta(minutes=5))
    recipe = ModelConfig(path=str(Path(os.environ["STORE"]).with_name("model")), device="cpu")
    tokenizer, sharding = fit_tokenizer(["0123456789"]), sharding_of("full", torch.device("cpu"), torch.float32)
    before = reset_peak_memory()
    policy = load_policy(recipe, tokenizer, seed=0, sharding=sharding)
    loaded, parameters = peak_memory() - before, policy.num_parameters
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=100)
    learner = Learner(policy=policy, optimizer=optimizer, actor=ActorConfig(gradient_noise=False), temperature=1.0)
    samples = _samples(options.responses, options.tokens)
    for _ in sys.stdin:
        gathered(None)
        started, sent = time.perf_counter(), _sent()
        accumulate_gradient(learner, samples, Denominators(num_sequences=len(samples)), 0)
        optimizer.step()
        gathered(None)
        seconds, models = time.perf_counter() - started, (_sent() - sent) / (4 * parameters)
        said: dict[str, float] = {"seconds": seconds, "sent": models, "loaded": loaded, "bytes": peak_memory() - before}
        print(json.dumps({**said, "parameters": parameters}), flush=True)


def _samples(number: int, num_tokens: int) -> list[Sample]:
    generator, samples = torch.Generator().manual_seed(0), list[Sample]()
    for index in range(number):
        if index % GROUP == 0:
            prompt = torch.randint(10, VOCABULARY, (PROMPT,), generator=generator).tolist()
            query = Query(id=str(index), prompt="", text="", prompt_ids=tuple(prompt), columns={})
        samples.append(
            Sample(
                query=query,
                token_ids=torch.randint(10, VOCABULARY, (num_tokens,), generator=generator),
                loss_mask=torch.ones(num_tokens, dtype=torch.bool),
                text="",
                finish_reason="length",
                sampler_logprobs=torch.full((num_tokens,), -9.0),
                versions=((0, num_tokens),),
                advantage=(-1.0) ** index,
            )
        )
    return samples


if __name__ == "__main__":
    main()
