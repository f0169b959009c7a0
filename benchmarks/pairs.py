"""Two ways of doing a thing, taking turns: the ratio of their times, as a row of a table."""

import statistics
import time
from collections.abc import Callable

HEADER = "| what | seconds without | ratio (median, range) |\n|---|---|---|"


def row(name: str, without: Callable[[], object], with_it: Callable[[], object], rounds: int) -> None:
    """Print the median of the ratios with over without, and their range; a first round warms up."""
    before, ratios = [], []
    for number in range(rounds + 1):
        one, two = _seconds(without), _seconds(with_it)
        if number:  # the first warms up
            before.append(one)
            ratios.append(two / one)
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"| {name} | {statistics.median(before):.3f} | {middle:.3f} ({low:.2f}–{high:.2f}) |")


def _seconds(compute: Callable[[], object]) -> float:
    started = time.perf_counter()
    compute()
    return time.perf_counter() - started
