"""What each lever gains: a whole step with it and without it, in turn, on the workloads of benchmarks/peer.

    python -m benchmarks.levers            # the table of docs/benchmarks/performance.md, about 5 minutes
    python -m benchmarks.levers --quick    # a small run that only shows that it works

A step is a rollout batch, its old log-likelihoods and four mini-batches, as `gspo train` makes them. "without" changes
one thing in the running code and nothing in what is computed.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.machine import load
from benchmarks.peer import workloads
from benchmarks.samples import scored
from gspo.engine.embedded import decoding
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.advantages import with_advantages
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import Learner, token_sequence, trained_samples
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import update
from gspo.model.load import make_tokenizer
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.recipe.sections import ActorConfig, ModelConfig, OptimizerConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Batch, Query

ACTOR = ActorConfig(clip_low=workloads.CLIP_LOW, clip_high=workloads.CLIP_HIGH, mini_batches=workloads.MINI_BATCHES)


@dataclass(kw_only=True)
class Step:
    """One workload's step, and the parts of it that a lever changes."""

    policy: Policy
    optimizer: Optimizer
    queries: list[Query]
    sampling: RolloutConfig
    actor: ActorConfig
    first_pass: bool = False  # old log-likelihoods of the first mini-batch get a pass of their own
    train_all: bool = False  # sequences without an advantage are computed, too

    def run(self, seed: int) -> float:
        """Seconds of the step."""
        started = time.perf_counter()
        batch = self._batch(seed)
        learner = Learner(policy=self.policy, optimizer=self.optimizer, actor=self.actor, temperature=1.0)
        batch = compute_old_logprobs(batch, learner)
        if self.first_pass:
            part = trained_samples(batch.groups, self.actor)[: len(batch.samples) // workloads.MINI_BATCHES]
            with torch.no_grad():
                response_likelihood(self.policy, [token_sequence(sample, self.actor) for sample in part])
        list(update(learner, batch))
        return time.perf_counter() - started

    def _batch(self, seed: int) -> Batch:
        sampler = Sampler(EmbeddedEngine(self.policy, max_rows=self.sampling.max_rows), self.policy)
        groups = sampler.sample(self.queries, self.sampling, SamplingKey(seed=seed, step=1))
        rewards = [
            reward
            for group in groups
            for reward in workloads.equal_or_even(
                [], [sample.text for sample in group.samples], [group.query.columns["equal"]] * len(group.samples)
            )
        ]
        batch = with_advantages(scored(groups, rewards))
        if self.train_all:
            batch = batch.with_changed({s: replace(s, advantage=s.advantage or 1e-30) for s in batch.samples})
        return batch


def attribute(name: str, value: object) -> Callable[[Step], AbstractContextManager[object]]:
    """Without: a name of a module stands for something else."""
    return lambda step: patch(f"gspo.{name}", value)


def setting(**values: Any) -> Callable[[Step], AbstractContextManager[object]]:
    """Without: the step does something differently."""
    return lambda step: patch.multiple(step, **values)


def _padded(step: Step) -> AbstractContextManager[object]:
    """Without: a pass for each block of sequences, padded to its longest; a prompt once a sequence."""
    return patch.object(step, "policy", replace(step.policy, supports_packing=False))


def _prompts_read_for_each(_: Step) -> AbstractContextManager[object]:
    """Without: every response reads its prompt by itself."""
    return patch.object(decoding, "in_groups", lambda prompts: [range(n, n + 1) for n in range(len(prompts))])


LEVERS: list[tuple[str, list[str], Callable[[Step], AbstractContextManager[object]]]] = [
    (
        "decoding: the decoder written out",
        ["short", "ragged"],
        attribute("engine.embedded.decoding.fast_decoder", lambda _: None),
    ),
    (
        "decoding: finished rows dropped",
        ["short", "ragged"],
        attribute("engine.embedded.decoding._COMPACT_BELOW", 1e-9),
    ),
    ("decoding: a prompt read once", ["short", "long prompt"], _prompts_read_for_each),
    ("decoding: rows refilled, 16 at once", ["ragged"], attribute("engine.embedded.decoding._REFILL_BELOW", {})),
    ("update: packed, no padding", ["short", "ragged"], _padded),
    ("update: a prompt read once", ["short", "long prompt"], attribute("model.packing._shares", lambda *_: False)),
    ("update: first pass is π_old", ["short", "ragged"], setting(first_pass=True)),
    ("update: no advantage, no work", ["half equal"], setting(train_all=True)),
    ("old_logprobs: engine", ["short", "ragged"], setting(actor=ACTOR)),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each lever and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args(arguments)
    turns = 1 if options.quick else options.turns
    print(f"{load()}, {torch.get_num_threads()} threads; median (min–max) of {turns} pairs after one not counted\n")
    print("| lever | workload | step, s | without it, s | without / with |\n|---|---|---|---|---|")
    for lever, names, without in LEVERS[:1] if options.quick else LEVERS:
        for name in names:
            print(f"| {lever} | {name} | " + " | ".join(_pairs(lever, name, without, turns)) + " |", flush=True)


def _pairs(
    lever: str, workload: str, without: Callable[[Step], AbstractContextManager[object]], turns: int
) -> list[str]:
    step = _step(workload, lever)
    pairs = []
    refill = {"cpu": 0.75} if "refilled" in lever else {}  # which the engine does by itself on a GPU only
    with patch.dict(decoding._REFILL_BELOW, refill):
        for seed in range(turns + 1):
            with_it = step.run(seed)
            with without(step):
                pairs.append((with_it, step.run(seed)))
    del pairs[0]
    ratios = [b / a for a, b in pairs]
    medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    return [f"{medians[0]:.2f}", f"{medians[1]:.2f}", spread]


def _step(workload: str, lever: str) -> Step:
    work = workloads.WORKLOADS[workload]
    with tempfile.TemporaryDirectory() as folder:
        workloads.write_model(work, Path(folder))
        recipe = ModelConfig(path=folder)
        policy = load_policy(recipe, make_tokenizer(recipe, []), seed=0)
    num_queries = work.sequences // work.group_size
    queries = [
        Query(
            id=f"row:{number}",
            prompt=row["prompt"],
            text=row["prompt"],
            prompt_ids=tuple(policy.tokenizer(row["prompt"]).input_ids),
            columns=row,
        )
        for number, row in enumerate(workloads.rows(work)[:num_queries])
    ]
    max_rows = 16 if "16 at once" in lever else 512
    return Step(
        policy=policy,
        optimizer=Optimizer(policy.model, OptimizerConfig(lr=workloads.LEARNING_RATE), total_steps=1),
        queries=queries,
        sampling=RolloutConfig(max_new_tokens=work.max_new_tokens, max_rows=max_rows, group_size=work.group_size),
        actor=ACTOR.model_copy(update={"old_logprobs": "engine"}) if "engine" in lever else ACTOR,
    )


if __name__ == "__main__":
    main()
