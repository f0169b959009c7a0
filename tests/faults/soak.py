"""Hundreds of steps with kills at random times; the end must equal an unbroken run's, and nothing may grow.

    python -m tests.faults.soak [--steps 300] [--seed 0]

Prints a log; the exit status is 1 where anything differs or grows.
"""

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.faults.laboratory import Laboratory, Process, Server, differing

MAX_GROWTH_BYTES = 8 * 2**20  # of resident memory, over the second half of a run


@dataclass(frozen=True)
class Usage:
    """What a process holds."""

    descriptors: int
    threads: int
    children: int
    resident_bytes: int


def usage(pid: int) -> Usage | None:
    """What the process holds now; None where it has ended."""
    home = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (home / "status").read_text().splitlines() if ":" in line)
        children = sum(len(path.read_text().split()) for path in home.glob("task/*/children"))
        return Usage(
            descriptors=len(list((home / "fd").iterdir())),
            threads=int(status["Threads"]),
            children=children,
            resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
        )
    except (OSError, KeyError):
        return None


def watched(process: Process) -> list[Usage]:
    """What a run holds, ten times a second until it ends."""
    found = []
    while process.is_running():
        if (now := usage(process.pid)) is not None:
            found.append(now)
        time.sleep(0.1)
    return found


def growth(found: list[Usage]) -> list[str]:
    """What grew from the second quarter of a run to its last; the first is for what is made once."""
    quarter = len(found) // 4
    early, late = found[quarter : 2 * quarter], found[-quarter:]
    report = []
    # The fewest of what comes and goes with every save; a leak raises those too.
    for name, typical, allowed in (
        ("descriptors", min, 0),
        ("threads", min, 0),
        ("children", min, 0),
        ("resident_bytes", statistics.median, MAX_GROWTH_BYTES),
    ):
        before, after = (typical([getattr(one, name) for one in part]) for part in (early, late))
        print(f"  {name}: {before:,.0f} in the second quarter, {after:,.0f} in the last")
        if after - before > allowed:
            report.append(name)
    return report


def broken_run(laboratory: Laboratory, overrides: tuple[str, ...], rng: random.Random) -> int:
    """Train with a signal after a random time, again and again until the run ends by itself; how many there were."""
    process, signals = laboratory.start("train", "run.yaml", *overrides), 0
    while True:
        ends = time.monotonic() + rng.uniform(0.1, 1.2)
        while process.is_running() and time.monotonic() < ends:
            time.sleep(0.005)
        if process.is_running():
            number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
            process.send(number)
            signals += 1
        if (status := process.wait()) == 0:
            return signals
        assert status in (-9, -15, 143), laboratory.said
        names = laboratory.checkpoints()
        print(f"  {signals:3d} {number.name} {'then ' + names[-1] if names else 'before the first checkpoint'}")
        process = laboratory.start("train", "run.yaml", *overrides, "--resume")


def main() -> int:
    """Run the soak; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    overrides = (f"steps={options.steps}", "checkpoint.every=7", "checkpoint.seconds=0.3", "evaluation.every=50")
    home, server = Path(tempfile.mkdtemp()), Server()
    try:
        began = time.monotonic()
        whole, broken = Laboratory(server, home / "whole"), Laboratory(server, home / "broken")
        process = whole.start("train", "run.yaml", *overrides)
        found = watched(process)
        assert process.wait() == 0, whole.said
        print(f"unbroken: {options.steps} steps in {time.monotonic() - began:.1f} s")
        faults = growth(found)
        print("broken off at random times:")
        number = broken_run(broken, overrides, random.Random(options.seed))
        different = differing(broken.result(), whole.result())
        print(f"{number} times; {len(whole.result())} files and logs compared: {len(different)} differ {different}")
        print(f"{'grew: ' + ', '.join(faults) if faults else 'nothing grew'}; {time.monotonic() - began:.0f} s in all")
        return 1 if faults or different else 0
    finally:
        server.close()
        shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
