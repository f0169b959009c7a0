"""gspo against TRL's GSPO: same model, prompts, reward, clip range and mini-batches, taking turns.

    make bench                                   # all workloads, about 16 minutes; the table of performance.md
    make bench ARGS="--workloads short --turns 3"
    make bench ARGS="--before ../older"          # a checkout of an earlier commit takes turns, too

Both sides are processes that hold their model throughout. They work in turn, one rollout batch and its four optimiser
steps at a time, so that whatever else the machine does falls on both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import load
from benchmarks.peer.workloads import MINI_BATCHES, WORKLOADS, Workload, write_model

ROOT = Path(__file__).parents[2]
_ON_CPU = [
    name for name, work in WORKLOADS.items() if not work.gpu and (work.model is None or (ROOT / work.model).exists())
]
_ENDS_BY_CHANCE = 0.01  # where only one token in 151,936 ends a response
_TOKENS_MAY_DIFFER = 0.10  # both sides draw the lengths of their responses, from the same distribution


@dataclass(kw_only=True)
class Side:
    """One process and what its turns took."""

    name: str
    process: subprocess.Popen[str]
    turns: list[dict[str, float]] = field(default_factory=list)

    def turn(self, *, count: bool) -> None:
        """Let it work once."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        answer = self.answer()
        if count:
            self.turns.append(answer)

    def answer(self) -> dict[str, float]:
        """The next line the process writes."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended: see its messages above (exit {self.process.wait()})")
        found: dict[str, float] = json.loads(line)
        return found

    def median(self, name: str) -> float:
        """Of the turns; a turn that has none of it counts 0."""
        return statistics.median(turn.get(name, 0.0) for turn in self.turns)

    def total(self, name: str) -> float:
        """Over the turns."""
        return sum(turn.get(name, 0.0) for turn in self.turns)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the workloads and print their table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default=".venv-trl/bin/python", help="the interpreter that has TRL")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=_ON_CPU)
    parser.add_argument(
        "--turns", type=int, help="of each side, after one that is not counted; default: 9, vocabulary 2"
    )
    parser.add_argument("--old-logprobs", nargs="+", default=["recompute", "engine"])
    parser.add_argument("--threads", type=int, default=0, help="of both sides; default: what each chooses by itself")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit: what a change has gained or cost")
    options = parser.parse_args(arguments)
    print(f"before: {load()}\n")
    head = ["workload", "side", "s / optimiser step", "rollout", "old log π", "update", "tokens/s", "peak MiB"]
    head += ["a step / TRL's (min–max)", "goal", "a token / TRL's", "memory / TRL's", "goal"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name in options.workloads:
        with tempfile.TemporaryDirectory() as folder:
            sides = _run(WORKLOADS[name], Path(folder), options)
        _check_same_work(WORKLOADS[name], sides)
        print("\n".join(_rows(WORKLOADS[name], sides)), flush=True)
    print(f"\nafter: {load()}")


def _run(work: Workload, folder: Path, options: argparse.Namespace) -> list[Side]:
    write_model(work, folder / "model")
    threads = ["--threads", str(options.threads)] if options.threads else []
    trl = [options.trl_python, "-m", "benchmarks.peer.trl_side", work.name, str(folder), *threads]
    sides = [_start("TRL", trl, ROOT)]
    trees = {"gspo": ROOT} | ({"gspo before": options.before.resolve()} if options.before else {})
    for name, tree in trees.items():
        own = folder / name  # a run never overwrites another
        own.mkdir()
        (own / "model").symlink_to(folder / "model")
        for kind in options.old_logprobs:
            command = [sys.executable, "-m", "benchmarks.peer.gspo_side", work.name, str(own), *threads]
            sides.append(_start(f"{name}, {kind}", [*command, "--old-logprobs", kind], tree))
    for number in range((options.turns or work.turns) + 1):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:  # nobody always follows the same one
            side.turn(count=number > 0)
    for side in sides:
        side.process.kill()
        side.process.wait()
    return sides


def _start(name: str, command: list[str], tree: Path) -> Side:
    """Start a side with the code of a tree and wait until it is ready: one loads while the others are idle."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tree, env=environment, **pipes)
    side = Side(name=name, process=process)
    side.answer()
    return side


def _check_same_work(work: Workload, sides: list[Side]) -> None:
    """Same sequences and optimiser steps; same tokens, within what drawing their number explains."""
    peer = sides[0]
    for side in sides[1:]:
        for name in ("sequences", "optimizer_steps"):
            if side.total(name) != peer.total(name):
                sys.exit(f"{work.name}: {side.name} did {side.total(name)} {name}, {peer.name} {peer.total(name)}")
        difference = abs(side.total("tokens") / peer.total("tokens") - 1)
        if difference > (_TOKENS_MAY_DIFFER if work.may_end else _ENDS_BY_CHANCE):
            sys.exit(f"{work.name}: {side.name} and {peer.name} differ by {difference:.1%} in tokens: take more turns")


def _rows(work: Workload, sides: list[Side]) -> list[str]:
    peer = sides[0]
    found = []
    for side in sides:
        cells: list[Any] = [work.name, side.name, f"{side.median('seconds') / MINI_BATCHES:.3f}"]
        split = [side.median(stage) for stage in ("rollout", "old", "update")]
        if side is peer:
            split[2] = statistics.median(turn["training_step"] - turn["batch"] for turn in side.turns)
        cells += [f"{value / MINI_BATCHES:.3f}" for value in split]
        cells += [f"{side.total('tokens') / side.total('seconds'):,.0f}"]
        cells += [f"{max(turn['peak_bytes'] for turn in side.turns) / 2**20:,.0f}"]
        if side is not peer:
            steps = [ours["seconds"] / theirs["seconds"] for ours, theirs in zip(side.turns, peer.turns, strict=True)]
            tokens = [side.total("seconds") / side.total("tokens"), peer.total("seconds") / peer.total("tokens")]
            memory = [max(turn["peak_bytes"] for turn in one.turns) for one in (side, peer)]
            cells += [f"{statistics.median(steps):.2f} ({min(steps):.2f}–{max(steps):.2f})", f"{work.goal:.2f}"]
            cells += [f"{tokens[0] / tokens[1]:.2f}", f"{memory[0] / memory[1]:.2f}", work.memory_goal or ""]
        else:
            cells += [""] * 5
        found.append("| " + " | ".join(map(str, cells)) + " |")
    return found


if __name__ == "__main__":
    main()
