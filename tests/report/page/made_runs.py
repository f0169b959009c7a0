"""Run directories made by hand, in the format of real ones, of numbers that are recognised wherever they turn up.

A metric at a step of a seed is its base + step/100 + seed²/1000, so that no two of them are equal.
"""

import json
import math
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gspo.run.lock import Lock

Line = dict[str, Any]

NUM_STEPS = 6
NUM_LAYERS = 3
EVALUATED = (0, 3, NUM_STEPS)  # the steps whose lines have an evaluation
NO_ENTROPY = 4  # the step whose entropy is null: a gap
QUANTILES = (0.91, 0.93, 0.96, 0.98, 0.99, 1.02, 1.05)
CLIP = (0.03, 0.04)
STAGES = ("rollout", "reward", "likelihood", "update", "checkpoint")
MIB = 2**20

BASES: Mapping[str, float] = {
    "reward/mean": 0.2,
    "reward/std": 0.3,
    "group/zero_variance_fraction": 0.11,
    "response/mean_tokens": 30.0,
    "response/truncated_fraction": 0.05,
    "clip/sequence_fraction": 0.4,
    "clip/token_fraction": 0.15,
    "policy/entropy": 1.5,
    "policy/grad_norm": 0.7,
    "throughput/generated_tokens_per_second": 5000.0,
    "throughput/trained_tokens_per_second": 9000.0,
    **{f"time/{stage}_seconds": 1.0 + place for place, stage in enumerate(STAGES)},
}


def number(base: float, step: int, seed: int = 0) -> float:
    """What a metric of this base is at a step of a seed."""
    return round(base + step / 100 + seed**2 / 1000, 6)


def recipe(name: str = "made", seed: int = 0, **changes: Any) -> dict[str, Any]:
    """A recipe as recipe.yaml has it, of the keys that a report reads; changes replace whole keys."""
    made: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "steps": NUM_STEPS,
        "output_dir": None,
        "model": {"path": None, "architecture": {"model_type": "qwen3_moe", "num_experts": 8}},
        "queries": {"path": None, "procedural": {"task": "chain_sum", "size": 64}},
        "reward": [{"function": "reasoning_gym", "weight": 1.0}],
        "actor": {"importance_sampling_level": "sequence", "clip_low": 0.003, "clip_high": 0.004, "mini_batches": 2},
        "report": {"trackers": [], "rollouts": True, "tokens": True},
    }
    return {**made, **changes}


def evaluation(step: int, seed: int = 0) -> Line:
    """The part of a line that an evaluation adds."""
    return {
        "evaluation/held_out/pass_at_1": number(0.25, step, seed),
        "evaluation/held_out/standard_error": number(0.02, step, seed),
        "evaluation/held_out/mean_tokens": number(28.0, step, seed),
        "evaluation/held_out/truncated_fraction": number(0.01, step, seed),
    }


def metrics_line(step: int, seed: int = 0, *, experts: bool = True) -> Line:
    """A line of metrics.jsonl; that of step 0 is the evaluation before training."""
    if step == 0:
        return {"step": 0, "time/elapsed_seconds": 0.0, **evaluation(0, seed)}
    line: Line = {"step": step, **{name: number(base, step, seed) for name, base in BASES.items()}}
    line["ratio/sequence_quantiles"] = [number(base, step, seed) for base in QUANTILES]
    line["clip/low"], line["clip/high"] = CLIP
    line["time/total_seconds"] = sum(line[f"time/{stage}_seconds"] for stage in STAGES)
    line["time/elapsed_seconds"] = 60.0 * step
    line["source/trainer_idle_fraction"], line["staleness/tokens_by_age"] = 0.5, [100.0, 50.0 * step]
    line["source/trainer_waited_seconds"] = [share * line["time/total_seconds"] for share in (0.0, 0.25, 0.5, 0.75)]
    line["source/engine_sampled_seconds"] = [share * line["time/total_seconds"] for share in (0.25, 0.5, 0.75, 2.0)]
    line["memory/peak_bytes"] = float((100 + step + 10 * seed) * MIB)
    if step == NO_ENTROPY:
        line["policy/entropy"] = None
    if experts:
        by_layer = [number(0.1 * (layer + 1), step, seed) for layer in range(NUM_LAYERS)]
        line["moe/expert_change_fraction"] = sum(by_layer) / NUM_LAYERS
        line["moe/expert_change_fraction_by_layer"] = by_layer
    return {**line, **(evaluation(step, seed) if step in EVALUATED else {})}


def sample(
    query: str = "sum:1", prompt: str = "2 + 3 =", *, words: Sequence[str] = ("The ", "sum"), **changes: Any
) -> Line:
    """A line of rollouts/step_*.jsonl of these tokens and an end token; untrained where no log ratios are given."""
    ratios = [one for one in changes.get("token_log_ratios") or () if one is not None]
    made: Line = {
        "query": query,
        "prompt": prompt,
        "completion": "".join(words),
        "reward": 0.5,
        "rewards": {"reasoning_gym": changes.get("reward", 0.5)},
        "failure": None,
        "advantage": 0.0,
        "sequence_ratio": math.exp(sum(ratios) / len(ratios)) if ratios else None,
        "clipped": 0.0 if ratios else None,
        "mini_batch": 1 if ratios else None,
        "tokens": len(words) + 1,
        "finish_reason": "stop",
        "policy_version": 2,
        "token_characters": [*map(len, words), 0],
        "token_log_ratios": None,
        "token_advantages": None,
    }
    return {**made, **changes}


def rollouts(step: int) -> list[Line]:
    """Two trained groups of four, and in even steps one of equal rewards, which is not trained."""
    made = [_trained(step, query, place) for query in ("sum:1", "sum:2") for place in range(4)]
    if step % 2 == 0:
        made += [sample("even:3", "Is 3 even?", words=("No", f", by {step}.{place}")) for place in range(4)]
    return made


def _trained(step: int, query: str, place: int) -> Line:
    """Of rewards 0, 0.25, 0.75 and none; the second is clipped whole, the third in part, the last cut off."""
    reward = (0.0, 0.25, 0.75, None)[place]
    words = [
        "Let ",
        "us ",
        "add",
        ": ",
        *(f"{term}+" for term in range(place + step)),
        f"Answer-{query}-{step}-{place}",
    ]
    size = 0.001 * (place + 1) + 0.0001 * step
    return sample(
        query,
        f"Add {query}, please: 1 + {step} =",
        words=words,
        reward=reward,
        advantage=0.0 if reward is None else reward - 1 / 3,
        clipped=(0.0, 1.0, 0.25, 0.0)[place],
        mini_batch=place % 2,
        finish_reason="length" if place == 3 else "stop",
        failure="ValueError: no number here" if reward is None else None,
        policy_version=2 * step - 2,
        token_log_ratios=[round(size * (-1) ** token * (token + 1) / 10, 5) for token in range(len(words) + 1)],
    )


def begun(**changes: Any) -> Line:
    """The history's line of a beginning: a run that is written with it as its last line is under way, and locked."""
    made: Line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "event": "begun",
        "process": os.getpid(),
        "seconds": 0.0,
        "host": socket.gethostname(),
        "working_directory": "a place/with spaces",
        "introduction": "made: Qwen3MoeForCausalLM, 1,000 parameters\n64 queries to train on",
        "environment": {"python": "3.11.7", "gspo": "0.1.0", "device": "cpu"},
        "cold_start_step": 0,
        "step": 0,
    }
    return {**made, **changes}


def ended(how: str = "finished", reason: str | None = None, step: int = NUM_STEPS) -> Line:
    """The history's line of an end, after 100 seconds."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    place = {"seconds": 100.0, "cold_start_step": 0, "step": step}
    return {"time": time, "event": "ended", "how": how, "reason": reason, **place}


_locks: dict[Path, Lock] = {}


def write_run(
    path: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    lines: Iterable[Line] = (),
    samples: Mapping[int, Sequence[Line]] | None = None,
    history: Sequence[Line] | None = None,
) -> Path:
    """A run's directory of exactly these contents; by default of a run that has finished before its first step."""
    path.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(dict(recipe() if settings is None else settings), sort_keys=False, allow_unicode=True)
    (path / "recipe.yaml").write_text(text, encoding="utf-8")
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    events = [begun(), ended()] if history is None else history
    if lock := _locks.pop(path.absolute(), None):
        lock.release()
    if events and events[-1].get("event") in ("begun", "resumed"):
        _locks[path.absolute()] = Lock(path)
    (path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events), encoding="utf-8")
    if samples is not None:
        (path / "rollouts").mkdir(exist_ok=True)
    for step, group in (samples or {}).items():
        text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in group)
        (path / "rollouts" / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
    return path


def made_run(
    path: Path,
    *,
    name: str = "made",
    seed: int = 0,
    steps: int = NUM_STEPS,
    experts: bool = True,
    with_samples: bool = True,
    **changes: Any,
) -> Path:
    """A finished run of all its parts; changes are of the recipe. Those that differ in name and seed are an arm."""
    path.mkdir(parents=True, exist_ok=True)
    cold_start = ({"step": step, "loss": number(2.0, -step, seed)} for step in range(1, 11))
    (path / "cold_start.jsonl").write_text("".join(json.dumps(line) + "\n" for line in cold_start), encoding="utf-8")
    return write_run(
        path,
        settings=recipe(name, seed, **changes),
        lines=[metrics_line(step, seed, experts=experts) for step in range(steps + 1)],
        samples={step: rollouts(step) for step in range(1, steps + 1)} if with_samples else None,
        history=[begun(), ended(step=steps)],
    )
