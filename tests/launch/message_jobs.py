"""What three ranks say to each other when something fails, written to files: a process of its own forks them."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from gspo import train
from gspo.engine.engine import Prompt, Sampling
from gspo.errors import HAS_LAUNCHER, RENDEZVOUS, LostRankError, Stopped, UserError
from gspo.interrupt import Interrupt
from gspo.learner import trainer as learner
from gspo.learner.models import Models
from gspo.learner.optimizer import check_optimizer
from gspo.learner.ranks import (
    gathered,
    highest,
    is_of_all,
    joined,
    meet,
    on_all,
    rank,
    sharding_of,
    stop_all,
    tell,
    told,
    wait_for_note,
)
from gspo.learner.sampling import completed
from gspo.learner.trainer import Trainer, by_all, trainer_of_rank_0
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import OptimizerConfig

TINY = Path(__file__).parents[1] / "tiny.yaml"

PATIENCE = 4.0  # seconds; on a busy machine ranks need more than 2 to find each other
# Jobs in which a rank is waited for so long, and no longer.
IMPATIENT = ("told", "slow", "stuck", "silent", "loses one", "first is interrupted again")


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
        with joined(seconds=PATIENCE if job in IMPATIENT else 20.0):
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


def _tell() -> Any:
    """Rank 0 takes longer than any collective would be waited for."""
    if rank() > 0:
        return [told(), told()]
    time.sleep(PATIENCE + 1.0)
    tell("word", 1, [2])
    tell("word")
    return "told"


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
    if rank() == 0:
        tell("notes", check_optimizer(settings, where="actor.optimizer", device=device, num_ranks=3))
    notes = told() if rank() > 0 else None
    sharding = sharding_of("none", device, torch.float32)
    assert sharding is not None
    group, number = sharding.mesh.get_group(0), torch.tensor(rank())
    torch.distributed.all_reduce(number, group=group)
    return [notes, int(number)]


def _led(lead: Callable[[Trainer], Any]) -> Callable[[], Any]:
    """As in a run: rank 0 does this, and the others serve until it ends."""

    def run() -> Any:
        if rank() > 0:
            return Trainer().serve()
        with trainer_of_rank_0() as trainer:
            result = lead(trainer)
            trainer.end(result)
            return result

    return run


def _fail_to_lead(error: BaseException) -> Callable[[], Any]:
    def lead(_: Trainer) -> None:
        raise error

    return _led(lead)


class _Engine:
    """Continues a prompt by its key; it fails on one rank, or not at all."""

    def __init__(self, failing: int | None) -> None:
        self._failing = failing

    def submit(self, prompts: Sequence[Prompt], _: Sampling) -> list[Future[int]]:
        if rank() == self._failing:
            raise ValueError(f"of rank {rank()}")
        futures = [Future[int]() for _ in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            future.set_result(prompt.key)
        return futures


def _sample(*, stopped: int | None = None, failing: int | None = None) -> Any:
    engine: Any = _Engine(failing)
    prompts = [Prompt(ids=(4, 5), key=number, max_new_tokens=1, group=number // 2) for number in range(8)]
    with Interrupt(lambda _: None) as interrupt:
        if rank() == stopped:
            interrupt.signal = signal.SIGTERM
        return completed(engine, None, prompts, Sampling(), ())


def _stop_meanwhile(trainer: Any) -> None:
    """A thread of rank 0 has all sample, when its main thread hears a signal."""
    threading.Thread(target=trainer._try, args=["take a while"]).start()
    time.sleep(0.2)
    raise Stopped(signal.SIGTERM)


def _take_a_while() -> list[int]:
    time.sleep(1.0)
    return gathered(rank())


def _try(_: Trainer, work: str) -> Any:
    return WORK[work]()


WORK: dict[str, Callable[[], Any]] = {
    "give": lambda: gathered(rank()),
    "sample": _sample,
    "take a while": _take_a_while,
    "one fails": lambda: on_all(_fail(1)),
    "one fails alone": lambda: _fail(1)() and highest(0),
    "first fails alone": lambda: _fail(0)() and highest(0),
    "one is stopped": lambda: stop_all(signal.SIGTERM if rank() == 2 else None),
    "one is stopped in sampling": lambda: _sample(stopped=1),
    "one cannot sample": lambda: _sample(failing=2),
}
setattr(Trainer, _try.__name__, by_all(_try))  # a verb that is any of these


def _verb(work: str) -> Callable[[], Any]:
    """A verb; where it fails and ranks can still do something together, they do: a run saves itself on its way out."""

    def lead(trainer: Any) -> Any:
        try:
            return trainer._try(work)
        except BaseException:
            assert trainer.is_busy or trainer._try("give") == [0, 1, 2]
            raise

    return _led(lead)


def _load(*failing: int) -> Callable[[], Any]:
    """Some ranks cannot load their part of the models."""

    def load_models(*_: Any, **__: Any) -> Any:
        if rank() in failing:
            raise UserError(f"no file on rank {rank()}", where="model.path")
        return Models(policy=None)  # type: ignore[arg-type]

    def lead(trainer: Trainer) -> str:
        trainer.load(load_recipe(TINY), "a tokenizer")
        return f"loaded with {trainer._tokenizer}"

    def run() -> Any:
        learner.load_models = load_models
        return _led(lead)()

    return run


JOBS: dict[str, Callable[[], Any]] = {
    "told": _tell,
    "ended": _led(lambda _: "the outcome"),
    "first fails": _fail_to_lead(ValueError("of rank 0")),
    "first is stopped": _fail_to_lead(Stopped(signal.SIGTERM)),
    "first is stopped meanwhile": _led(_stop_meanwhile),
    "first is interrupted again": _fail_to_lead(KeyboardInterrupt()),
    "loses one": _fail_to_lead(LostRankError("rank 2 is gone")),
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
    "loads": _load(),
    "one cannot load": _load(1),
    "none can load": _load(0, 1, 2),
    **{f"verb: {work}": _verb(work) for work in WORK},
}


if __name__ == "__main__":
    main()
