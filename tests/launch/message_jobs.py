"""What three ranks say to each other when something fails, written to files: a process of its own forks them."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gspo import train
from gspo.errors import HAS_LAUNCHER, RENDEZVOUS, LostRankError, Stopped, UserError
from gspo.learner.optimizer import check_optimizer
from gspo.model.sharding import sharding_of
from gspo.ranks import (
    from_first,
    gathered,
    highest,
    is_of_all,
    joined,
    meet,
    on_all,
    rank,
    stop_all,
    wait_for_note,
)
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import OptimizerConfig

TINY = Path(__file__).parents[1] / "tiny.yaml"

PATIENCE = 4.0  # seconds; on a busy machine ranks need more than 2 to find each other


def main() -> None:
    """Run each job on three ranks, and write what each rank has come to."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    for job in JOBS:
        children = [_fork(job, own, directory) for own in range(3)]
        for child in children:
            os.waitpid(child, 0)


def _fork(job: str, own: int, directory: Path) -> int:
    if child := os.fork():
        return child
    os.environ |= {"RANK": str(own), "WORLD_SIZE": "3", RENDEZVOUS: f"file://{directory}/store {job}", HAS_LAUNCHER: ""}
    result: Any
    try:
        with joined(seconds=PATIENCE if job in ("slow", "stuck", "silent", "loses one") else 20.0):
            result = JOBS[job]()
    except BaseException as error:
        result = [type(error).__name__, str(error), is_of_all(error)]
    (directory / f"{job} {own}").write_text(json.dumps(result))
    os._exit(0)


def _fail(*ranks: int) -> Callable[[], str]:
    def make() -> str:
        if rank() in ranks:
            raise ValueError(f"of rank {rank()}")
        return f"made by {rank()}"

    return make


def _slow() -> Any:
    """Waiting is no failure: rank 1 comes later than any collective would wait."""
    if rank() == 1:
        time.sleep(PATIENCE + 1.0)
    meet()
    return gathered(rank())


def _stuck() -> Any:
    """Rank 1 lives, and is not where the others are."""
    for _ in range(3 if rank() == 1 else 4):
        highest(0)
    if rank() == 1:
        time.sleep(PATIENCE + 3.0)
    return None


def _stopped() -> Any:
    try:
        stop_all(signal.SIGTERM if rank() == 2 else None)
    except Stopped as stop:
        return [int(stop.args[0]), is_of_all(stop)]
    return None


def _silent() -> Any:
    """Rank 1 is gone before it has said what rank 0 waits for."""
    if rank() == 1:
        time.sleep(0.5)
        os._exit(0)
    return wait_for_note("word", by=1) if rank() == 0 else None


def _fail_alone() -> None:
    """Rank 1 meets an error that nobody expects where the others wait for it: it does not wait for them, too."""

    def make() -> None:
        if rank() == 1:
            raise ValueError("of rank 1")
        highest(0)

    on_all(make, UserError)


def _train(*keys: str) -> Callable[[], Any]:
    """A run with input that every rank finds wrong."""
    return lambda: train(load_recipe(TINY, [*keys, "evaluation.num_queries=0"]))


def _try_optimizer() -> Any:
    """Rank 0 tries an optimiser on parameters that ranks share, while the others wait; then all make their mesh."""
    settings, device = OptimizerConfig(name="torch.optim.Muon"), torch.device("cpu")
    notes = from_first(lambda: check_optimizer(settings, where="actor.optimizer", device=device, num_ranks=3))
    sharding = sharding_of("none", device, torch.float32)
    assert sharding is not None
    group, number = sharding.mesh.get_group(0), torch.tensor(rank())
    torch.distributed.all_reduce(number, group=group)
    return [notes, int(number)]


def _lose_one() -> None:
    raise LostRankError("rank 2 is gone")


JOBS: dict[str, Callable[[], Any]] = {
    "made": lambda: from_first(_fail()),
    "first fails": lambda: from_first(_fail(0)),
    "one fails": lambda: on_all(_fail(1)),
    "all fail": lambda: on_all(_fail(0, 1, 2)),
    "one fails within": lambda: on_all(lambda: on_all(_fail(1)), ValueError),
    "one fails alone": _fail_alone,
    "no tracker": _train("report.trackers=[wandb]"),
    "not to be shared": _train("model.architecture.model_type=gpt_oss", "model.architecture.num_local_experts=4"),
    "none fails": lambda: on_all(_fail()),
    "stopped": _stopped,
    "slow": _slow,
    "stuck": _stuck,
    "silent": _silent,
    "tries": _try_optimizer,
    "loses one": lambda: from_first(_lose_one),
}


if __name__ == "__main__":
    main()
