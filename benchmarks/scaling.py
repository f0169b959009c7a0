"""How decoding and updating scale with response length, group size and vocabulary, against the cost model.

    python -m benchmarks.scaling            # the tables of docs/benchmarks/performance.md, about 10 minutes
    python -m benchmarks.scaling --quick    # a small run that only shows that it works
    python -m benchmarks.scaling --model models/smollm2-135m --groups 8 16 32 --tokens 32    # a real model

Every response has its full length. "of peak" is the cost model's operations (benchmarks/cost.py) over the measured
time, as a part of what this machine's matrix products reach; the rest is attention, norms, memory and overhead.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cost import Shape, decode_bytes, decode_flops, update_flops
from benchmarks.machine import load, matmul_peak, memory_bandwidth
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.loss import Denominators
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import Learner, accumulate_gradient
from gspo.model.load import fit_tokenizer, load_tokenizer
from gspo.model.policy import Policy, load_policy
from gspo.recipe.sections import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Query

LENGTHS = [64, 256, 1024, 4096]
GROUPS = [4, 8, 16, 32, 64]
VOCABULARIES = [1_000, 8_000, 32_000, 152_000]
PROMPT = 64
TOKENS = 256  # of a response, where its length is not what varies


def main(arguments: Sequence[str] | None = None) -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", help="a model directory, in place of the untrained ones: groups alone")
    parser.add_argument("--groups", type=int, nargs="+", default=GROUPS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a response, where groups vary")
    options = parser.parse_args(arguments)
    repeats = 1 if options.quick else options.repeats
    cpu = torch.device("cpu")
    peak, bandwidth = matmul_peak(cpu, torch.float32), memory_bandwidth(cpu)
    print(
        f"{torch.get_num_threads()} threads, matrix products {peak / 1e9:.0f} GFLOP/s, reads {bandwidth / 1e9:.0f} GB/s"
    )
    print(f"{load()}; the fastest of {repeats} after one that is not counted\n")
    head = "decode, s | tokens/s | GB/s read | of peak | update, s | tokens/s | of peak |"
    keep = slice(0, 1) if options.quick else slice(None)
    policy = _real_policy(options.model) if options.model else _policy(1_000)
    tables = [(f"group size ({options.tokens} tokens)", [(n, policy, n, options.tokens) for n in options.groups[keep]])]
    if not options.model:
        of_lengths = [(n, policy, 8, n) for n in LENGTHS[keep]]
        of_vocabularies = [(n, _policy(n), 8, options.tokens) for n in VOCABULARIES[keep]]
        tables.insert(0, ("response length (groups of 8)", of_lengths))
        tables.append((f"vocabulary (groups of 8, {options.tokens} tokens)", of_vocabularies))
    for title, cases in tables:
        print(f"| {title} | {head}\n" + "|---" * 8 + "|")
        for value, policy, group_size, length in cases:
            print(
                f"| {value:,} | " + " | ".join(_measure(policy, group_size, length, repeats, peak)) + " |", flush=True
            )
        print()


def _policy(vocabulary: int) -> Policy:
    """An untrained Qwen3 of 1M parameters besides its embedding, whose responses never end by themselves."""
    architecture: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }
    tokenizer = fit_tokenizer(["0123456789"])
    policy = load_policy(ModelConfig(architecture=architecture, tokenizer="fit", device="cpu"), tokenizer, seed=0)
    return replace(policy, stop_ids=(-1,))


def _real_policy(path: str) -> Policy:
    """The model in a directory; its responses never end by themselves, either."""
    policy = load_policy(ModelConfig(path=path, device="cpu"), load_tokenizer(path), seed=0)
    return replace(policy, stop_ids=(-1,))


def _measure(policy: Policy, group_size: int, length: int, repeats: int, peak: float) -> list[str]:
    prompt = [1 + number % 9 for number in range(PROMPT)]
    query = Query(id="0", prompt="", text="", prompt_ids=tuple(prompt), columns={})
    settings, actor = RolloutConfig(max_new_tokens=length, group_size=group_size), ActorConfig()
    optimizer = Optimizer(policy.model, OptimizerConfig(), total_steps=1)
    learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=1.0)
    sampler, decoding, updating = Sampler(EmbeddedEngine(policy), policy), list[float](), list[float]()
    for seed in range(repeats + 1):
        started = time.perf_counter()
        (group,) = sampler.sample([query], settings, SamplingKey(seed=seed, step=1))
        decoding.append(time.perf_counter() - started)
        samples = [replace(sample, advantage=(-1.0) ** index) for index, sample in enumerate(group.samples)]
        started = time.perf_counter()
        accumulate_gradient(learner, samples, Denominators(num_sequences=group_size), 0)
        optimizer.step()
        updating.append(time.perf_counter() - started)
    shape, tokens = Shape.of(policy.model.config), group_size * length
    lengths = [[length] * group_size]
    decode, update = min(decoding[1:]), min(updating[1:])
    return [
        f"{decode:.2f}",
        f"{tokens / decode:,.0f}",
        f"{decode_bytes(shape, [PROMPT], lengths, width=4) / decode / 1e9:.1f}",
        f"{decode_flops(shape, [PROMPT], lengths) / decode / peak:.0%}",
        f"{update:.2f}",
        f"{tokens / update:,.0f}",
        f"{update_flops(shape, [PROMPT], lengths) / update / peak:.0%}",
    ]


if __name__ == "__main__":
    main()
