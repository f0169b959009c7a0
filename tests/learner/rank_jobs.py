"""Mini-batches on several ranks, in processes that are forked once everything is imported; test_ranks.py looks at them.

    python -m tests.learner.rank_jobs DIRECTORY

Each job writes a file of tensors. No process that has made a backward pass is forked: its threads would not survive.
"""

import datetime
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.conftest import FAMILIES, SHAPE, TEXTS
from tests.samples import query_of, sample_from

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.learner.engine_of_ranks import EngineOfRanks
from gspo.learner.loss import Denominators
from gspo.learner.micro_batching import Learner, for_each_sample, places_of_ranks, split_tokens
from gspo.learner.optimizer import Optimizer
from gspo.learner.ranks import num_ranks, rank, sharding_of, tell
from gspo.learner.trainer import Trainer
from gspo.learner.update import accumulate_gradient
from gspo.model.load import fit_tokenizer
from gspo.model.lora import moved_adapter
from gspo.model.packing import TokenSequence
from gspo.model.parameters import whole
from gspo.model.policy import Policy, checkpoint_gradients, dtype_of, load_policy, response_likelihood
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import ActorConfig, LoraConfig, ModelConfig, OptimizerConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Experts, Sample

TINY = load_recipe(Path(__file__).parents[1] / "tiny.yaml")
ALL = 10**6  # tokens: a single micro-batch
SEQUENCES = 40  # of the mini-batch, of which some have no advantage
CLIP = {"clip_low": 0.03, "clip_high": 0.04}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, keys of the actor, and samples."""

    family: str = "qwen3"
    changes: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    is_bfloat16: bool = False
    num_samples: int = 17
    lora: LoraConfig | None = None
    shift: float = 0.06  # of the log-likelihoods of π_old


# By the number of ranks: the tokens of a micro-batch, and as how many ranks one process cuts the mini-batch.
RUNS = {1: [(ALL, 1), (ALL, 2)], 2: [(ALL, 1), (60, 1)], 4: [(60, 1)]}
JOBS = {
    "dense": Job(),
    "tied": Job(changes={"tie_word_embeddings": True}, keys={"importance_sampling_level": "token"}),
    "experts": Job(family="qwen3_moe", keys={"importance_sampling_level": "sequence_token", "router_aux_loss": 0.1}),
    "checkpointing": Job(family="qwen3_moe", keys={"gradient_checkpointing": True}),
    "replay": Job(family="qwen3_moe", keys={"routing_replay": "policy"}),
    "bfloat16": Job(is_bfloat16=True),
    "noise": Job(keys={"gradient_noise": True}),
    "lora": Job(lora=LoraConfig(rank=3)),
    "lora noise": Job(lora=LoraConfig(rslora=True), keys={"gradient_noise": True}),
    "clipped": Job(shift=0.5),  # passes without a gradient
    "few samples": Job(num_samples=3),  # fewer than ranks
}
SAMPLES_IN = {1: (ALL, 1), 2: (60, 1), 4: (60, 1)}
# On 4 ranks, two copies of the shares: one job for each kind of model and of what ranks add up.
OF_FOUR = ("dense", "experts", "noise", "lora", "few samples")


def jobs_of(number: int) -> Sequence[str]:
    """Return the names of the jobs that so many ranks do."""
    return OF_FOUR if number == 4 else tuple(JOBS)


def main() -> None:
    """Do all jobs on 1, 2 and 4 ranks."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    # This process computes nothing: torch's threads do not survive a fork.
    torch.multiprocessing.start_processes(_save_models, args=(Path(sys.argv[1]),), nprocs=1, start_method="fork")
    for number in RUNS:
        arguments = (number, Path(sys.argv[1]))
        torch.multiprocessing.start_processes(_rank, args=arguments, nprocs=number, start_method="fork")


def _save_models(_: int, directory: Path) -> None:
    for name, job in JOBS.items():
        _save_model(job, directory / f"model of {name}")


def _rank(rank: int, number: int, directory: Path) -> None:
    if number > 1:
        store, seconds = f"file://{directory}/store{number}", datetime.timedelta(seconds=240)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=number, timeout=seconds)
    for name in jobs_of(number):
        for tokens, as_ranks in RUNS[number]:
            result = _do(directory, number, name, tokens, as_ranks)
            if rank == 0:
                torch.save(result, directory / f"{name} {number} {tokens}{' as 2' if as_ranks == 2 else ''}")
    if number > 1:
        dist.destroy_process_group()


def _do(directory: Path, number: int, name: str, tokens: int, as_ranks: int) -> dict[str, Any]:
    """Add up the gradient of a mini-batch, and make a step; on one rank in as many parts as ranks would have."""
    job = JOBS[name]
    keys = {"micro_batch_tokens": tokens, "mini_batches": 1, "gradient_noise": False, **CLIP, **job.keys}
    actor, policy = ActorConfig(**keys), _policy(directory / f"model of {name}", job)
    if actor.gradient_checkpointing:
        checkpoint_gradients(policy)
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-3), total_steps=3)
    learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=0.9)
    samples = _samples(len(policy.tokenizer))[: job.num_samples]
    parts = places_of_ranks(learner, samples, range(len(samples)), as_ranks)

    def own(sequences: Sequence[TokenSequence]) -> Iterator[tuple[torch.Tensor, Experts | None]]:
        likelihood = response_likelihood(policy, sequences, temperature=0.9)
        chosen = map(_others, likelihood.experts) if likelihood.experts else repeat(None)
        return zip(split_tokens(likelihood.logprobs, sequences), chosen, strict=False)

    # Before the gradient, which must not change by it; once for each number of ranks.
    sampled = _sampled(policy) if (tokens, as_ranks) == SAMPLES_IN[number] else {}
    rng, old = random.Random(1), dict[int, tuple[torch.Tensor, Experts | None]]()
    for part in parts:
        old |= zip(part, for_each_sample(learner, [samples[place] for place in part], own), strict=True)
    samples = [
        replace(sample, old_logprobs=logprobs + rng.gauss(0, job.shift), old_experts=chosen, advantage=rng.gauss(0, 1))
        for sample, (logprobs, chosen) in zip(samples, (old[place] for place in range(len(samples))), strict=True)
    ]
    denominators = Denominators(num_sequences=SEQUENCES)
    done = [accumulate_gradient(learner, [samples[place] for place in part], denominators, 0) for part in parts]
    report, trained = done[0]
    stats = [own.stats for own in trained.values() if own.stats is not None]
    names = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    gradient = {name: whole(own).clone() for name, own in zip(names, optimizer.gradient(), strict=True)}
    step = optimizer.step()
    return {
        "gradient": gradient,
        "weights": policy.weights(),
        "numbers": [report.loss, report.balance_loss, float(report.num_trained), step.grad_norm],
        "noise": None if report.noise is None else [report.noise.signal, report.noise.noise],
        "ratios": [own.sequence_ratio for own in stats],
        **sampled,
        "old": torch.cat([old[place][0] for place in range(len(samples))]),
    }


def _others(experts: Experts) -> Experts:
    """Of each token of the response other experts than the routers have chosen, for a replay that shows."""
    return replace(experts, row=(experts.row + 1) % FAMILIES["qwen3_moe"]["num_experts"])


def _sampled(policy: Policy) -> Any:
    """What the run's engine says of itself, and the tokens of responses to some queries: each rank decodes its own."""
    trainer = Trainer()
    trainer.recipe, trainer.policy = TINY, policy
    if rank() > 0:
        return trainer.serve()
    engine = EmbeddedEngine(policy) if num_ranks() == 1 else EngineOfRanks(trainer)
    queries = [query_of([3 + n, 5, 4], n) for n in range(3)]
    settings = RolloutConfig(max_new_tokens=9, group_size=2)
    groups = Sampler(engine, policy).sample(queries, settings, SamplingKey(seed=0, step=1))
    sampled = [sample.token_ids.tolist() for group in groups for sample in group.samples]
    trainer.weights()  # which has the ranks share the model again
    result = {"sampled": sampled, "description": dict(engine.describe())}
    tell("ended", result)
    return result


def _save_model(job: Job, directory: Path) -> None:
    architecture = {"model_type": job.family, **SHAPE, **FAMILIES.get(job.family, {}), **job.changes}
    recipe = ModelConfig(architecture=architecture, tokenizer="fit", dtype=_dtype(job), device="cpu")
    load_policy(recipe, fit_tokenizer(TEXTS), seed=0).save(directory)


def _policy(directory: Path, job: Job) -> Policy:
    recipe = ModelConfig(path=str(directory), dtype=_dtype(job), device="cpu", lora=job.lora)
    setting = "hybrid" if num_ranks() == 4 else "full"  # as on two hosts of two ranks
    sharding = sharding_of(setting, torch.device("cpu"), dtype_of(recipe))
    policy = load_policy(recipe, fit_tokenizer(TEXTS), seed=0, sharding=sharding)
    for name, numbers in (moved_adapter(policy.model) or {}).items():  # of a new one half of the gradient is 0
        policy.model.get_parameter(name).data = numbers
    return policy


def _dtype(job: Job) -> Any:
    return "bfloat16" if job.is_bfloat16 else "float32"


def _samples(vocabulary: int) -> list[Sample]:
    """Groups of one prompt with ragged responses, the last of them long."""
    rng = random.Random(4)

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    samples = []
    for prompt, lengths in ((5, (3,)), (13, (1, 9, 4, 12, 1)), (2, (5, 1, 7)), (6, (11, 2, 1, 8)), (3, (60, 2, 9, 4))):
        prompt_ids = tuple(ids(prompt))
        for length in lengths:
            sequence = TokenSequence(prompt_ids=prompt_ids, response_ids=torch.tensor(ids(length)))
            samples.append(sample_from(sequence, advantage=1.0))
    return samples


if __name__ == "__main__":
    main()
