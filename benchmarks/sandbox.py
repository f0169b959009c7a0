"""Tests a second through the sandbox, beside a subprocess for each and LiveCodeBench's way, taking turns.

    python -m benchmarks.sandbox [--rounds 7] [--tests 200]

LiveCodeBench's way, written anew from memory of its `testing_util` and `compute_code_generation_metrics`: a
`multiprocessing.Process` and a Manager's list for each problem, the source by `exec` under `signal.alarm` with
standard input and output replaced. It isolates nothing. Prints tables for docs/sandbox.md.
"""

import argparse
import io
import itertools
import multiprocessing
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from unittest.mock import patch

from benchmarks.machine import load, peak_memory, reset_peak_memory
from gspo.sandbox.sandbox import Limits, Sandbox

PROGRAM = "n = int(input())\nprint(sum(int(x) for x in input().split()[:n]))\n"
INPUT, EXPECTED = "3\n1 2 3\n", "6"
PRINTER = "import os\nwhile True: os.write(1, bytes(2**20))"
PLACES = 2


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tests", type=int, default=200, help="in a round, for each of the two places")
    options = parser.parse_args()
    print(f"{load()}; {PLACES} at a time")
    number = itertools.count()
    with Sandbox(packages=()) as one, Sandbox(packages=()) as other:
        ways: dict[str, Callable[[int], bool]] = {
            "sandbox": lambda place: sandboxed((one, other)[place]),
            "sandbox, each a new program": lambda place: sandboxed((one, other)[place], f"# {next(number)}\n{PROGRAM}"),
            "subprocess": lambda _: plain_subprocess(),
            "LiveCodeBench's": lambda _: multiprocessed(),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        alone: list[float] = []
        for turn in range(options.rounds + 1):
            for name, way in ways.items():
                elapsed = timed(way, options.tests)
                if turn:  # the first warms up
                    seconds[name].append(elapsed)
            if turn:
                alone.append(one_at_a_time(one, options.tests))
    print_table(seconds, options.tests)
    middle = statistics.median(alone) * 1e3
    print(f"\nA test by itself, one at a time: {middle:.1f} ms ({min(alone) * 1e3:.1f}–{max(alone) * 1e3:.1f})")
    print_memory()


def timed(way: Callable[[int], bool], num_tests: int) -> float:
    """Seconds of so many tests in each of the places."""

    def work(place: int) -> None:
        for _ in range(num_tests):
            assert way(place)

    started = time.perf_counter()
    with ThreadPoolExecutor(PLACES) as pool:
        list(pool.map(work, range(PLACES)))
    return time.perf_counter() - started


def one_at_a_time(sandbox: Sandbox, num_tests: int) -> float:
    """Seconds of an empty program, the mean of several: it is all overhead."""
    sandbox.run("")
    started = time.perf_counter()
    for _ in range(num_tests):
        sandbox.run("")
    return (time.perf_counter() - started) / num_tests


def sandboxed(sandbox: Sandbox, program: str = PROGRAM) -> bool:
    """Whether the program passes its test in the sandbox."""
    return sandbox.run(program, INPUT.encode()).output.decode().strip() == EXPECTED


def plain_subprocess() -> bool:
    """Whether it passes in an interpreter of its own, with no isolation."""
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, check=True, input=INPUT, capture_output=True, text=True, timeout=6)
    return ran.stdout.strip() == EXPECTED


def multiprocessed() -> bool:
    """Whether it passes in a fork that writes its verdict to a Manager's list, with no isolation."""
    with multiprocessing.get_context("fork").Manager() as manager:
        results = manager.list()
        process = multiprocessing.get_context("fork").Process(target=_judge, args=(results,))
        process.start()
        process.join(timeout=7)
        return bool(results and results[0])


def _judge(results: list[bool]) -> None:
    signal.alarm(6)
    output = io.StringIO()
    with patch("sys.stdin", io.StringIO(INPUT)), redirect_stdout(output):
        exec(PROGRAM, {"__name__": "__main__"})
    signal.alarm(0)
    results.append(output.getvalue().strip() == EXPECTED)


def print_table(seconds: dict[str, list[float]], num_tests: int) -> None:
    """Print each way's tests a second, and how many times the sandbox's those are."""
    print("| way | tests a second (median, range) | sandbox, times as many (median, range) |\n|---|---|---|")
    total = PLACES * num_tests
    for name, times in seconds.items():
        ratios = [one / own for one, own in zip(times, seconds["sandbox"], strict=True)]
        rate = f"{total / statistics.median(times):.0f} ({total / max(times):.0f}–{total / min(times):.0f})"
        print(f"| {name} | {rate} | {statistics.median(ratios):.1f} ({min(ratios):.1f}–{max(ratios):.1f}) |")


def print_memory() -> None:
    """Print how much more memory this process held while programs printed more than any of it could be kept."""
    with Sandbox(packages=()) as sandbox:
        sandbox.run("")
        before = reset_peak_memory()
        for _ in range(16):
            assert sandbox.run(PRINTER).ending == "output"
    grown, kept = (peak_memory() - before) / 2**20, Limits().output_bytes / 2**20
    print(
        f"\nWhile programs print without end, this process grows by {grown:.0f} MiB; it keeps {kept:.0f} MiB of output"
    )


if __name__ == "__main__":
    main()
