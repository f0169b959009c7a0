"""Sampling beside training, simulated: runs of this machine predicted and compared; then 8 to 512 GPUs.

    python -m benchmarks.simulate [--runs DIR [--vllm PYTHON]]

Without options it prints the GPUs' tables alone. With `--runs`, the rates of this machine come from synchronous runs
whose directories lie in DIR/runs, and runs with `rollout.max_staleness` 1 and 2 are compared with what is simulated of
them. `--vllm` makes the runs first, as benchmarks.overlap does, in ten minutes.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import Assumed, Model, update
from benchmarks.machine import load
from benchmarks.overlap import WARM, prepare, run
from benchmarks.simulation import PROBE_TOKENS, PROBES, Rates, Setting, simulate

LONG_PROMPT = 480
# Every side has one thread. The rates are those of "small", "large" and "long"; two runs at the same time tell how much
# longer things take beside each other.
MEASURED: dict[str, dict[str, Any]] = {
    "small": {"queries": 4, "steps": 8},
    "large": {"queries": 40, "steps": 5},
    "long": {"new_tokens": 8, "prompts": "long.jsonl", "steps": 7},
    "pair_0": {"steps": 6},
    "pair_1": {"steps": 6},
}
COMPARED = {"synchronous": ("run_0_1_0", 0), "η = 1": ("run_1_1_0", 1), "η = 2": ("run_2_1_0", 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where runs lie, or are made")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter that has vLLM: make the runs")
    options = parser.parse_args(arguments)
    if options.vllm and not options.runs:
        parser.error("--vllm makes runs in the directory that --runs names")
    if options.vllm:
        print(load(), flush=True)
        make_runs(options.runs, options.vllm)
    if options.runs:
        compare(options.runs / "runs")
    show_clusters()


def make_runs(place: Path, vllm: str) -> None:
    """The synchronous runs that are measured, two of them at the same time, and those that are compared."""
    prepare(place)
    make: Callable[..., object] = partial(run, place, vllm=vllm, threads=1)
    for name in ("small", "large", "long"):
        make(name, staleness=0, **MEASURED[name])
    for name, staleness in COMPARED.values():
        make(name, staleness=staleness, steps=9)
    with ThreadPoolExecutor() as pool:
        [*pool.map(lambda name: make(name, staleness=0, **MEASURED[name]), ("pair_0", "pair_1"))]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A step of a run directory."""

    step: int
    groups: tuple[tuple[int, ...], ...]  # the tokens of their responses
    rollout: float  # seconds, as the next ones
    publish: float
    total: float

    @property
    def tokens(self) -> int:
        """Of all responses."""
        return sum(map(sum, self.groups))

    @property
    def trainer(self) -> float:
        """Seconds that neither sampling nor the hand-over took."""
        return self.total - self.rollout - self.publish


def read(directory: Path) -> list[Seen]:
    """The steps of a run directory that has `rollouts/`, between whose steps nothing is evaluated or saved."""
    seen, elapsed = [], None
    for line in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines()):
        rows = (directory / "rollouts" / f"step_{line['step']:06d}.jsonl").read_text().splitlines()
        groups: dict[str, list[int]] = {}
        for row in map(json.loads, rows):
            groups.setdefault(row["query"], []).append(row["tokens"])
        # Until the step before had ended: a step's line is written after its time.
        between = line["time/elapsed_seconds"] - line["time/total_seconds"] - elapsed if elapsed is not None else 0.0
        elapsed = line["time/elapsed_seconds"]
        seen.append(
            Seen(
                step=line["step"],
                groups=tuple(map(tuple, groups.values())),
                rollout=line["time/rollout_seconds"],
                publish=line["engine/publish_seconds"],
                total=line["time/total_seconds"] + between,
            )
        )
    return seen


def rates_of(runs: Path) -> Rates:
    """Fitted to the synchronous runs in a directory; the first steps, in which all gets warm, are left out."""
    small, large, long, alone, *pair = (
        [own for own in read(runs / name) if own.step > 2]
        for name in ("small", "large", "long", "run_0_1_0", "pair_0", "pair_1")
    )
    # Rows end one by one, so a step decodes as often as its longest response has tokens.
    per_step, per_row, prefill = _fitted(
        [[max(map(max, own.groups)), own.tokens, prompt * len(own.groups)], own.rollout]
        for steps, prompt in ((small, 1), (large, 1), (long, LONG_PROMPT))
        for own in steps
    )
    fixed, per_token = _fitted([[1, own.tokens], own.trainer] for own in small + large)
    publish = statistics.median(own.publish for own in small + large + long)
    beside = {
        part: statistics.median(
            getattr(own, part) / getattr(other, part) for run in pair for own, other in zip(run, alone, strict=False)
        )
        for part in ("rollout", "trainer")
    }
    return Rates(
        decode=lambda rows: per_step + per_row * rows,
        prefill=prefill,
        publish=publish - PROBE_TOKENS * (per_step + PROBES * per_row),
        update=lambda tokens: fixed + per_token * tokens,
        decode_beside=beside["rollout"],
        update_beside=beside["trainer"],
    )


def _fitted(rows: Any) -> list[float]:
    """What each number must be multiplied by so that they add up to the seconds, by least relative squares."""
    rows = list(rows)
    seconds = np.array([row[1] for row in rows])
    numbers = np.array([row[0] for row in rows], dtype=float) / seconds[:, None]
    return [float(value) for value in np.linalg.lstsq(numbers, np.ones(len(rows)), rcond=None)[0]]


def compare(runs: Path) -> None:
    """Print the rates, and what was measured beside what is simulated."""
    rates = rates_of(runs)
    row, token = rates.decode(1) - rates.decode(0), rates.update(1) - rates.update(0)
    print(f"decode: {1e3 * rates.decode(0):.2f} ms a step and {1e3 * row:.3f} ms a row")
    print(f"read: {1e3 * rates.prefill:.3f} ms a token; publish: {rates.publish:.2f} s")
    print(f"trainer: {rates.update(0):.2f} s a step and {1e3 * token:.3f} ms a token")
    print(f"beside the other: servers {rates.decode_beside:.2f} times as long, trainer {rates.update_beside:.2f}\n")
    print("| | s a step | simulated | simulated / measured | sampling waited for, s | simulated |")
    print("|---|---|---|---|---|---|")
    groups = [group for own in read(runs / "run_0_1_0") for group in own.groups]
    for arm, (name, staleness) in COMPARED.items():
        seen = read(runs / name)
        setting = Setting(staleness=staleness, queries=len(seen[0].groups))
        steps = simulate(setting, rates, lambda number: groups[number % len(groups)], steps=len(seen))
        took, waited = (statistics.mean(getattr(own, part) for own in seen[WARM:]) for part in ("total", "rollout"))
        total, wait = (statistics.mean(getattr(own, part) for own in steps[WARM:]) for part in ("total", "waited"))
        print(f"| {arm} | {took:.2f} | {total:.2f} | {total / took:.2f} | {waited:.2f} | {wait:.2f} |")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is assumed: a step as AReaL has it, and what is reached of an H100's numbers."""

    queries: int = 512
    group: int = 16
    prompt: int = 1024  # tokens
    median: float = 6000.0  # tokens of a response; their logarithms are normal
    sigma: float = 0.9
    longest: int = 31_744
    bandwidth: float = 0.7 * 3.35e12  # bytes a second that a GPU reads
    flops: float = 0.4 * 989e12  # a second and GPU
    launch: float = 60e-6  # seconds a layer in each decode step, whatever there is to compute
    memory: float = 0.85 * 80e9  # bytes of a GPU for weights and cache
    hand_over: float = 1.0  # seconds that new weights take besides being sent with 40e9 bytes a second
    rows: int = 512  # at once on a server, if its memory has room for them
    sampling: float = 0.75  # of the GPUs, where the two sides do not take turns on all of them


def show_clusters() -> None:
    """Print what is assumed, and the tokens a second of each number of GPUs."""
    dense = Model(layers=28, hidden=1536, attention=12 * 128, key_value=2 * 128, experts=1, active=1, width=8960)
    plain = Cluster()
    print(f"\n{plain}")
    head = "GPUs | synchronous, all in turn | η = 0, split | η = 1, split | η = 4, split"
    print(f"\n| model | responses a step | {head} | η = 1 / η = 0 | η = 4 / synchronous |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, model, width, numbers, assumed in (
        ("1.5B", dense, 1, (8, 64, 128, 512), plain),
        ("1.5B", dense, 1, (128,), replace(plain, queries=128)),
        ("30B-A3B", Model(), 2, (64, 512), plain),
    ):
        lengths, responses = _lengths(assumed), assumed.queries * assumed.group
        for gpus in numbers:
            speeds = [
                _tokens_a_second(
                    model, assumed, lengths, gpus=gpus, width=width, staleness=staleness, is_split=is_split
                )
                for staleness, is_split in ((0, False), (0, True), (1, True), (4, True))
            ]
            cells = [f"{speed / 1000:.1f}k" for speed in speeds]
            cells += [f"{speeds[2] / speeds[1]:.2f}", f"{speeds[3] / speeds[0]:.2f}"]
            print(f"| {name} | {responses:,} | {gpus} | {' | '.join(cells)} |", flush=True)


def _lengths(assumed: Cluster) -> list[list[int]]:
    """Those of the responses of several steps' groups."""
    draw = partial(random.Random(0).lognormvariate, math.log(assumed.median), assumed.sigma)
    sizes = [[round(draw()) for _ in range(assumed.group)] for _ in range(30 * assumed.queries)]
    return [[min(max(1, size), assumed.longest) for size in group] for group in sizes]


def _tokens_a_second(
    model: Model,
    assumed: Cluster,
    lengths: Sequence[Sequence[int]],
    *,
    gpus: int,
    width: int,
    staleness: int,
    is_split: bool,
) -> float:
    """Trained on, on that many GPUs, of which a server has `width`."""
    tokens = [length for group in lengths for length in group]
    # A token has on average half as many before it as the response has that it is in.
    of_token = sum(length**2 for length in tokens) // sum(tokens)
    sampling = round(gpus * assumed.sampling) if is_split else gpus
    cache = 2 * 2 * model.layers * model.key_value  # bytes a token
    room = (width * assumed.memory - 2 * model.parameters) / cache / (assumed.prompt + of_token / 2)
    setting = Setting(
        staleness=staleness,
        queries=assumed.queries,
        servers=sampling // width,
        rows=min(assumed.rows, int(room)),
        prompt=assumed.prompt,
        most_read=8192,
    )
    rates = Rates(
        decode=lru_cache(partial(_decode_seconds, model, assumed, width)),
        held=cache / assumed.bandwidth / width,
        prefill=model.flops(1, of_token) / 4 / assumed.flops / width,
        publish=assumed.hand_over + 2 * model.parameters / width / 40e9,
        update=partial(_update_seconds, model, assumed, gpus - sampling if is_split else gpus, of_token),
    )
    window = 1 + staleness  # steps: after so many much repeats itself
    steps = simulate(setting, rates, lambda number: lengths[number % len(lengths)], steps=6 * window)
    counted = steps[2 * window : 5 * window]  # before, the servers fill; after, they empty
    return sum(step.tokens for step in counted) / sum(step.total for step in counted)


def _decode_seconds(model: Model, assumed: Cluster, width: int, rows: int) -> float:
    """A token of each row: weights are read, of the experts those that any row needs."""
    needed = model.experts * (1 - (1 - model.active / model.experts) ** rows)
    weights = model.layers * model.layer(1) + model.outside / 2
    read = 2 * (weights + (needed - 1) * model.layers * 3 * model.hidden * model.width) / assumed.bandwidth
    active = model.layers * model.layer(model.active) + model.outside / 2
    return model.layers * assumed.launch + max(read, 2 * rows * active / assumed.flops) / width


def _update_seconds(model: Model, assumed: Cluster, gpus: int, length: int, tokens: int) -> float:
    """Of benchmarks.cluster, where talking hides behind computing, or computing behind it."""
    step = Assumed(responses=tokens // length, length=length, micro_batch=65_536, flops=assumed.flops)
    own = update(model, step, gpus)
    return max(own.computes, own.talks)


if __name__ == "__main__":
    main()
