"""On a GPU: decoding, update and a whole step of a 0.5B-parameter Qwen3 in bf16, against `generate`, limits and TRL.

    python -m benchmarks.gpu_speed                                   # decode and update; about 2 minutes
    python -m benchmarks.gpu_speed --trl-python .venv-trl/bin/python  # and whole steps against TRL (without vLLM)
    python -m benchmarks.gpu_speed --quick                           # a toy on whatever device there is: does it work?

Each measurement is printed when it is there, so a run that is broken off has those before it.

Goals: decode at least 8 times `generate`'s tokens/s, update at least 40 % of the measured bf16 matrix peak, a whole
step at least 3 times as fast as TRL's.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile

from benchmarks.cost import Shape, decode_bytes, update_flops
from benchmarks.machine import load, matmul_peak, memory_bandwidth, synchronize
from benchmarks.peer import compare
from benchmarks.samples import sample_of
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.loss import Denominators
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import Learner, accumulate_gradient
from gspo.model.head import Head
from gspo.model.load import fit_tokenizer
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.recipe.sections import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Group, Query

_say = partial(print, flush=True)  # one that is stopped has said what it has measured
HALF_BILLION: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
TOY = HALF_BILLION | {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1_000,
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is decoded and trained: groups of 8."""

    prompts: int
    prompt_tokens: int
    new_tokens: int  # that are decoded, by `generate` at 85 ms each
    trained_tokens: int  # of a response in the update
    group_size: int = 8


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the measurements, one a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--trl-python", help="an interpreter that has TRL: compares whole steps, too")
    options = parser.parse_args(arguments)
    if options.trl_python and options.quick:
        parser.error("--trl-python compares whole steps on a GPU: not with --quick")
    work = (
        Work(prompts=2, prompt_tokens=16, new_tokens=16, trained_tokens=16)
        if options.quick
        else Work(prompts=8, prompt_tokens=256, new_tokens=128, trained_tokens=1024)
    )
    policy = policy_of(TOY if options.quick else HALF_BILLION)
    dtype = next(policy.model.parameters()).dtype
    peak, bandwidth = matmul_peak(policy.device, dtype), memory_bandwidth(policy.device)
    name = torch.cuda.get_device_name() if policy.device.type == "cuda" else "CPU"
    _say(f"{name}, {dtype}, torch {torch.__version__}; {load()}")
    # Otherwise the figures below are those of the fallbacks.
    _say(f"packed: {policy.supports_packing}, {dict(EmbeddedEngine(policy).describe())}")
    _say(f"matrix products {peak / 1e12:.1f} TFLOP/s, reads {bandwidth / 1e9:.0f} GB/s")
    _logits(policy, options.repeats)
    groups = _decode(policy, work, options.repeats, bandwidth)
    _agreement(policy, work, groups)
    _update(policy, work, options.repeats, peak)
    if options.trl_python:
        del policy, groups  # what they hold of the GPU is the sides'
        torch.cuda.empty_cache()
        compare.main(["--trl-python", options.trl_python, "--workloads", "half a billion"])


def policy_of(architecture: dict[str, Any]) -> Policy:
    """A new model that ends no response before its full length."""
    tokenizer = fit_tokenizer(["0123456789"])
    policy = load_policy(ModelConfig(architecture=architecture, tokenizer="fit"), tokenizer, seed=0)
    policy.model.generation_config.eos_token_id = None
    return replace(policy, stop_ids=(-1,))


def _logits(policy: Policy, repeats: int) -> None:
    """What float32 logits of bfloat16 operands cost, beside logits that are rounded to bfloat16."""
    weight = policy.head.weight.detach().bfloat16()
    for rows in (64, 1024):  # of a step of decoding, of a chunk of the update
        hidden = torch.randn(rows, weight.shape[1], device=weight.device).bfloat16()
        exact, rounded = _alternating(
            policy.device,
            repeats,
            partial(Head(weight=weight).logits, hidden),
            partial(torch.nn.functional.linear, hidden, weight),
        )
        _say(f"float32 logits of {rows} bfloat16 rows: {exact / rounded:.2f} times the seconds of rounded ones")


def _prompts(work: Work) -> list[list[int]]:
    return [[1 + (number + row) % 9 for number in range(work.prompt_tokens)] for row in range(work.prompts)]


def _decode(policy: Policy, work: Work, repeats: int, bandwidth: float) -> list[Group]:
    """Tokens a second of the engine and of `generate`, in turn."""
    queries = [
        Query(id=str(number), prompt="", text="", prompt_ids=tuple(prompt), columns={})
        for number, prompt in enumerate(_prompts(work))
    ]
    groups, sampler = list[Group](), Sampler(EmbeddedEngine(policy), policy)
    settings = RolloutConfig(max_new_tokens=work.new_tokens, group_size=work.group_size)
    repeated = torch.tensor(_prompts(work), device=policy.device).repeat_interleave(work.group_size, dim=0)

    def engine() -> None:
        groups[:] = sampler.sample(queries, settings, SamplingKey(seed=0, step=1))

    def plain() -> None:
        policy.model.generate(
            repeated,
            attention_mask=torch.ones_like(repeated),
            do_sample=True,
            top_k=0,
            max_new_tokens=work.new_tokens,
            pad_token_id=0,
        )

    ours, theirs = _alternating(policy.device, repeats, engine, plain)
    tokens = work.prompts * work.group_size * work.new_tokens
    lengths = [[work.new_tokens] * work.group_size] * work.prompts
    shape, width = Shape.of(policy.model.config), repeated.new_empty(0, dtype=policy.head.weight.dtype).element_size()
    least = decode_bytes(shape, [work.prompt_tokens] * work.prompts, lengths, width=width) / bandwidth
    _say(f"decode: {tokens / ours:,.0f} tokens/s, generate {tokens / theirs:,.0f}, {theirs / ours:.2f} times (goal 8);")
    _say(f"        {least / ours:.0%} of what memory bandwidth allows")
    _say(f"        {1e3 * ours / work.new_tokens:.1f} ms a token; {_busy(policy.device, engine, work.new_tokens)}")
    return groups


def _agreement(policy: Policy, work: Work, groups: list[Group]) -> None:
    """Log-likelihoods of the engine against the policy's packed pass: the same weights must say the same."""
    sequences = _sequences(work, groups[:1])
    with torch.no_grad():
        logprobs = response_likelihood(policy, sequences).logprobs.cpu()
    gap = (logprobs - torch.cat([rollout.sampler_logprobs for rollout in groups[0].samples])).abs()
    _say(f"engine against policy, log-likelihood of a token: mean gap {gap.mean():.1e}, largest {gap.max():.1e}")


def _busy(device: torch.device, call: Callable[[], object], steps: int) -> str:
    """How many kernels (on a CPU: operators) a step has, and how long they take: the rest of its time are launches."""
    with profile() as profiled:
        call()
        synchronize(device)
    kind, measure = DeviceType.CPU, "self_cpu_time_total"
    if device.type == "cuda":
        kind, measure = DeviceType.CUDA, "self_device_time_total"
    events = [event for event in profiled.key_averages() if event.device_type == kind]
    number, microseconds = sum(event.count for event in events), sum(getattr(event, measure) for event in events)
    return f"{number / steps:,.0f} kernels a token, {microseconds / steps / 1e3:.2f} ms together"


def _update(policy: Policy, work: Work, repeats: int, peak: float) -> None:
    """One mini-batch of all groups: forward, backward, optimiser step."""
    optimizer, actor = Optimizer(policy.model, OptimizerConfig(), total_steps=1), ActorConfig()
    learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=1.0)
    samples = [
        sample_of(prompt, torch.randint(1, 10, (work.trained_tokens,)), advantage=(-1.0) ** index)
        for prompt in _prompts(work)
        for index in range(work.group_size)
    ]

    def step() -> None:
        accumulate_gradient(learner, samples, Denominators(num_sequences=len(samples)), 0)
        optimizer.step()

    (duration,) = _alternating(policy.device, repeats, step)
    lengths = [[work.trained_tokens] * work.group_size] * work.prompts
    flops = update_flops(Shape.of(policy.model.config), [work.prompt_tokens] * work.prompts, lengths)
    tokens = len(samples) * work.trained_tokens
    _say(f"update: {tokens / duration:,.0f} response tokens/s, {flops / duration / peak:.0%} of the peak (goal 40 %)")


def _sequences(work: Work, groups: list[Group]) -> list[TokenSequence]:
    return [
        TokenSequence(prompt_ids=tuple(prompt), response_ids=rollout.token_ids)
        for prompt, group in zip(_prompts(work)[: len(groups)], groups, strict=True)
        for rollout in group.samples
    ]


def _alternating(device: torch.device, repeats: int, *sides: Callable[[], object]) -> list[float]:
    """The fastest of each side's turns, after one that is not counted."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats + 1):
        for side, durations in zip(sides, found, strict=True):
            synchronize(device)
            started = time.perf_counter()
            side()
            synchronize(device)
            durations.append(time.perf_counter() - started)
    return [min(durations[1:]) for durations in found]


if __name__ == "__main__":
    main()
