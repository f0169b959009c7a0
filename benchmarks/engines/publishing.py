"""What it takes to publish a policy's weights and to prove them: seconds by part, beside a step; the trainer's peak."""

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.decode import SHAPE, SMOLLM2, spread
from benchmarks.engines.sampling import Work, new_policy
from benchmarks.engines.start import vllm_engine
from benchmarks.machine import peak_memory, reset_peak_memory
from benchmarks.memory import LARGE
from benchmarks.samples import scored
from gspo.engine.server import weights
from gspo.engine.server.api import Request
from gspo.engine.server.engine import ServerEngine
from gspo.learner.advantages import with_advantages
from gspo.learner.forward_passes import compute_old_logprobs
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer
from gspo.learner.update import update
from gspo.model.policy import Policy
from gspo.model.weights import weights_by_layer
from gspo.recipe.sections import ActorConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler

WORK = Work(sequences=64, tokens=64)  # of a step
ACTOR = ActorConfig(mini_batches=4)
_LOAD, _SAMPLE, _OTHER = "the server loads them", "probe: the server samples", "pause, caches, label, resume"
_WRITE, _SCORE = "weights written", "probe: the policy scores"
PARTS = (_WRITE, _LOAD, _OTHER, _SAMPLE, _SCORE)
HEAD = ["parameters", "publish, s", *(f"{part}, s" for part in PARTS), "the rest, s"]
HEAD += ["a step, s", "publish / step", "goal", "trainer's peak, MiB above", "largest layer, MiB", "on their way, MiB"]
_BY_PATH = {"/collective_rpc": _LOAD, "/inference/v1/generate": _SAMPLE}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A size of model."""

    architecture: Mapping[str, Any] | Path  # or the directory of a real one
    steps: int  # that are timed beside it; 0: none
    goal: float | None = None  # publishing as a share of a step, at most


MODELS = {
    "1M": Model(architecture={"model_type": "qwen3", "num_hidden_layers": 4, **SHAPE}, steps=3),
    "50M": Model(architecture=LARGE, steps=3, goal=0.10),
    "135M": Model(architecture=SMOLLM2, steps=3, goal=0.10),
    "200M": Model(
        architecture=LARGE
        | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
        | {"num_hidden_layers": 13},
        steps=0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One publish."""

    seconds: float
    parts: Mapping[str, float]  # seconds, by part
    above: int  # bytes: the trainer's peak above what it held before
    on_their_way: int  # bytes of the files that the server reads


def table_row(model: Model, python: str, rounds: int) -> list[str]:
    """Publish some times after a first that is not counted, each after a step where steps are timed."""
    policy = new_policy(model.architecture)
    steps, publishes = list[float](), list[Published]()
    with vllm_engine(policy, python) as engine:
        step = _step(policy, engine)
        publish(engine, 1)
        for number in range(1, rounds + 1):
            if number <= model.steps:
                steps.append(step(number))
            publishes.append(publish(engine, 1 + number))
    layer = max(sum(tensor.nbytes for tensor in tensors.values()) for tensors in weights_by_layer(policy))
    seconds = [one.seconds for one in publishes]
    parts = [[one.parts.get(part, 0.0) for one in publishes] for part in PARTS]
    rest = [one.seconds - sum(one.parts.values()) for one in publishes]
    shares = [one / own for one, own in zip(seconds, steps, strict=False)]
    return [
        f"{policy.num_parameters / 1e6:.1f}M",
        spread(seconds),
        *(f"{statistics.median(own):.3f}" for own in (*parts, rest)),
        spread(steps) if steps else "",
        spread(shares) if steps else "",
        "" if model.goal is None else f"{model.goal:.2f}",
        f"{max(one.above for one in publishes) / 2**20:.1f}",
        f"{layer / 2**20:.1f}",
        f"{max(one.on_their_way for one in publishes) / 2**20:.0f}",
    ]


def publish(engine: ServerEngine, version: int) -> Published:
    """Publish the present weights, and watch it."""
    _give_back_freed_memory()
    with _watched(engine) as watched:
        before, started = reset_peak_memory(), time.perf_counter()
        engine.publish(version)
        seconds = time.perf_counter() - started
    return Published(
        seconds=seconds,
        parts=watched.seconds(),
        above=peak_memory() - before,
        on_their_way=watched.on_their_way,
    )


class Watched:
    """When each part began and ended."""

    def __init__(self) -> None:
        self.on_their_way = 0
        self._spans: dict[str, list[tuple[float, float]]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A span of a part; those that overlap count once."""
        started = time.perf_counter()
        yield
        self._spans.setdefault(name, []).append((started, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        """Of each part."""
        return {name: covered(spans) for name, spans in self._spans.items()}


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what some spans cover together."""
    total, end = 0.0, 0.0
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


@contextmanager
def _watched(engine: ServerEngine) -> Iterator[Watched]:
    """Note what the engine does while it publishes."""
    watched, fleet, server = Watched(), engine._fleet, engine._fleet.servers[0]
    ask, weight_files, gap = server.ask, weights.weight_files, fleet._probe.gap

    async def watched_ask(request: Request, **options: Any) -> Any:
        with watched.part(_BY_PATH.get(request.path, _OTHER)):
            return await ask(request, **options)

    @contextmanager
    def watched_weights(*arguments: Any, **options: Any) -> Iterator[list[str]]:
        files = weight_files(*arguments, **options)
        with watched.part(_WRITE):
            paths = files.__enter__()
        watched.on_their_way = sum(Path(path).stat().st_blocks * 512 for path in paths)
        try:
            yield paths
        finally:
            files.__exit__(None, None, None)

    def watched_gap(completions: Any) -> Any:
        with watched.part(_SCORE):
            return gap(completions)

    with (
        patch.object(server, "ask", watched_ask),
        patch.object(weights, "weight_files", watched_weights),
        patch.object(fleet._probe, "gap", watched_gap),
    ):
        yield watched


def _step(policy: Policy, engine: ServerEngine) -> Callable[[int], float]:
    """What makes a step, of 64 sequences and 4 updates, and says how many seconds it took."""
    optimizer = Optimizer(policy.model, ACTOR.optimizer, total_steps=100)
    learner = Learner(policy=policy, optimizer=optimizer, actor=ACTOR, temperature=1.0)
    queries, rewards = WORK.queries(policy), [float(number % 2) for number in range(WORK.sequences)]
    sampler = Sampler(engine, policy)

    def step(number: int) -> float:
        started = time.perf_counter()
        groups = sampler.sample(queries, WORK.settings, SamplingKey(seed=number, step=1))
        batch = compute_old_logprobs(with_advantages(scored(groups, rewards)), learner)
        list(update(learner, batch))
        return time.perf_counter() - started

    return step


def _give_back_freed_memory() -> None:
    """To the kernel: what the allocator keeps of earlier work would hide what publishing takes."""
    ctypes.CDLL(None).malloc_trim(0)
