"""What a checkpoint costs the loop: the same update steps with and without one being taken and written, alternating.

    python -m benchmarks.checkpoint [--parameters 1M 100M] [--rounds 7] [--directory DIR]

Prints a row a model for docs/guides/resuming.md: bytes on disk, seconds the loop stands still (a copy is taken),
seconds the thread then writes, and what all of it adds to the steps that run meanwhile.
"""

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.samples import sample_of
from gspo.learner.loss import Denominators
from gspo.learner.optimizer import Optimizer
from gspo.learner.trainer import Trainer
from gspo.learner.update import Learner, accumulate_gradient
from gspo.model.inputs import quiet_transformers
from gspo.model.load import fit_tokenizer
from gspo.model.policy import load_policy
from gspo.recipe.sections import ActorConfig, CheckpointConfig, ModelConfig, OptimizerConfig
from gspo.run.checkpoint.checkpointer import Checkpointer
from gspo.run.checkpoint.store import Store
from gspo.run.directory import RunDirectory
from gspo.run.progress import Clock, Progress

ARCHITECTURES = {
    "1M": {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 2},
    "100M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11, "num_attention_heads": 12},
}
SEQUENCES, TOKENS = 8, 64  # of one optimiser step


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parameters", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, default=None, help="the disk that is written to")
    options = parser.parse_args()
    print("| parameters | bytes | loop stands still, s | written in, s | a step, s | adds to the loop, s | steps |")
    print("|---|---|---|---|---|---|---|")
    for name in options.parameters:
        home = Path(tempfile.mkdtemp(dir=options.directory))
        try:
            quiet_transformers()
            print(_row(name, home, options.rounds), flush=True)
        finally:
            shutil.rmtree(home)


def _row(name: str, home: Path, rounds: int) -> str:
    trainer, step = _training(name)
    directory = RunDirectory(home)
    directory.recipe_text = "name: benchmark\n"
    checkpointer = Checkpointer(
        store=Store(directory.checkpoints),
        settings=CheckpointConfig(keep=1),
        trainer=trainer,
        directory=directory,
        clock=Clock(),
        about={},
        progress=Progress(),
    )
    step()
    step()
    seconds = _seconds(step)
    _write(checkpointer, 0)  # memory, and the disk's first
    writing = _seconds(checkpointer.wait)
    num_steps = max(2, -(-int(1.5 * writing / seconds * 10) // 10) + 1)  # enough for the thread to end within them
    still, written, plain, loaded = [], [], [], []
    for number in range(1, rounds + 1):
        plain.append(_seconds(lambda: [step() for _ in range(num_steps)]))
        began = time.perf_counter()
        still.append(_seconds(lambda: _write(checkpointer, number)))  # noqa: B023 - called at once
        for _ in range(num_steps):
            step()
        loaded.append(time.perf_counter() - began)
        checkpointer.wait()
        written.append(_seconds(lambda: _written(checkpointer, rounds + number)))  # noqa: B023
    added = [with_one - without for with_one, without in zip(loaded, plain, strict=True)]
    size = sum(path.stat().st_size for path in (home / "checkpoints").rglob("*") if path.is_file())
    return (
        f"| {trainer.policy.num_parameters:,} | {size:,} | {_spread(still)} | {_spread(written)} "
        f"| {statistics.median(plain) / num_steps:.3f} | {_spread(added)} | {num_steps} |"
    )


def _training(name: str) -> tuple[Trainer, Callable[[], object]]:
    tokenizer = fit_tokenizer([" ".join("".join(letters) for letters in itertools.product("abcdefghijkl", repeat=3))])
    shape = ARCHITECTURES[name]
    heads = {"num_key_value_heads": shape["num_attention_heads"], "head_dim": 64}
    architecture = {"model_type": "qwen3", "max_position_embeddings": 256, **heads, **shape}
    policy = load_policy(ModelConfig(architecture=architecture, tokenizer="fit", device="cpu"), tokenizer, seed=0)
    optimizer = Optimizer(policy.model, OptimizerConfig(lr=1e-4), total_steps=10**6)
    generator = torch.Generator().manual_seed(0)
    samples = [
        sample_of(
            torch.randint(3, len(tokenizer), (8,), generator=generator).tolist(),
            torch.randint(3, len(tokenizer), (TOKENS,), generator=generator),
            advantage=1.0 if index % 2 else -1.0,
        )
        for index in range(SEQUENCES)
    ]
    learner = Learner(policy=policy, optimizer=optimizer, actor=ActorConfig(), temperature=1.0)

    def step() -> None:
        accumulate_gradient(learner, samples, Denominators(num_sequences=SEQUENCES), 0)
        optimizer.step()

    trainer = Trainer()
    trainer.policy, trainer._optimizer, trainer._parts = policy, optimizer, {"optimizer": optimizer}
    return trainer, step


def _write(checkpointer: Checkpointer, number: int) -> None:
    checkpointer.note(Progress(steps=number))
    checkpointer.save()


def _written(checkpointer: Checkpointer, number: int) -> None:
    """With nothing else going on."""
    _write(checkpointer, number)
    checkpointer.wait()


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    main()
