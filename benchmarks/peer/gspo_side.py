"""gspo's side: the project's own `train`, which takes its turns through the display it is given."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import gspo
from benchmarks.peer import workloads
from benchmarks.peer.turns import Turns
from gspo.recipe.schema import Recipe
from gspo.run.console import Display


class TakesTurns(Display):
    """Ends a turn with every step: one rollout batch and its optimiser steps."""

    def __init__(self, turns: Turns, sequences: int) -> None:
        super().__init__(quiet=True)
        self.turns, self.sequences = turns, sequences

    def start(self, phase: str, total: int, *, done: int = 0) -> None:
        """The model is loaded, the loop begins."""
        self.turns.next()

    def after_step(self, step: int, line: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """A rollout batch has been trained on: a hook of gspo's."""
        self.turns.add(
            rollout=line["time/rollout_seconds"],
            old=line["time/likelihood_seconds"],
            update=line["time/update_seconds"],
            sequences=self.sequences,
            tokens=round(line["response/mean_tokens"] * self.sequences),
            optimizer_steps=workloads.MINI_BATCHES - round(line["policy/skipped_updates"]),
        )
        self.turns.next()


def main() -> None:
    """Train until the turns end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--old-logprobs", default="recompute")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    turns, work = Turns(), workloads.WORKLOADS[options.workload]
    recipe = Recipe.model_validate(
        {
            "name": "bench",
            "steps": 10**6,
            "output_dir": str(options.directory / f"run_{options.old_logprobs}"),
            "model": {
                "path": str(options.directory / "model"),
                "device": "cuda" if work.gpu else "cpu",
                "lora": {"rank": workloads.RANK, "alpha": workloads.ALPHA} if work.lora else None,
            },
            "queries": {"chat": False},
            "rollout": {
                "queries_per_step": work.sequences // work.group_size,
                "group_size": work.group_size,
                "max_new_tokens": work.max_new_tokens,
            },
            "actor": {
                "clip_low": workloads.CLIP_LOW,
                "clip_high": workloads.CLIP_HIGH,
                "mini_batches": workloads.MINI_BATCHES,
                "old_logprobs": options.old_logprobs,
                "optimizer": {"lr": workloads.LEARNING_RATE},
            },
            "evaluation": {"num_queries": 0},
            "report": {"rollouts": False},
            "checkpoint": {"seconds": None},  # the other side saves nothing either
        }
    )
    display = TakesTurns(turns, work.sequences)
    rows, reward = workloads.rows(work), workloads.equal_or_even
    gspo.train(recipe, queries=rows, reward=reward, display=display, on_step=display.after_step)


if __name__ == "__main__":
    main()
