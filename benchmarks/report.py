"""What a report of 200 steps × 512 rollouts costs: bytes, seconds to write, milliseconds until it can be used.

    python -m benchmarks.report runs/arithmetic [--steps 200] [--longer 1 5 25] [--loads 5]

Stretches a finished run: its steps over and over, each response as many times as long. Prints a row a length for
docs/guides/report.md, and first the size of a page of 60 steps without samples. Loading is measured in headless
Chromium (selenium, chromium and chromium-driver), from the disk.
"""

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.machine import load
from gspo.report.page.write import write_report

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--longer", type=int, nargs="+", default=[1, 5, 25])
    parser.add_argument("--loads", type=int, default=5)
    options = parser.parse_args()
    print(f"load {load()}")
    with tempfile.TemporaryDirectory() as home:
        stretch(options.run, Path(home) / "run", steps=60, longer=1)
        shutil.rmtree(Path(home) / "run" / "rollouts")
        page = write_report([Path(home) / "run"], note=lambda _: None)
        print(f"60 steps without samples: {page.stat().st_size / 1e3:.0f} kB")
    print("| mean tokens | rollouts/, MB | page, MB | written in, s | first chart, ms | all of it, ms | samples |")
    print("|---|---|---|---|---|---|---|")
    for longer in options.longer:
        with tempfile.TemporaryDirectory() as home:
            run = Path(home) / "run"
            tokens = stretch(options.run, run, steps=options.steps, longer=longer)
            print(_row(run, tokens, options.loads), flush=True)


def stretch(source: Path, target: Path, *, steps: int, longer: int) -> float:
    """Write a run of so many steps, made of another's, each response so many times as long; the mean tokens."""
    (target / "rollouts").mkdir(parents=True)
    for name in ("recipe.yaml", "history.jsonl", "cold_start.jsonl"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    first, *lines = [json.loads(line) for line in (source / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with (target / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step, line in zip(range(steps + 1), itertools.chain([first], itertools.cycle(lines)), strict=False):
            file.write(json.dumps({**line, "step": step}) + "\n")
    files, lengths = sorted((source / "rollouts").iterdir()), []
    for step, path in zip(range(1, steps + 1), itertools.cycle(files), strict=False):
        responses = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        samples = [_longer(responses, number, longer) for number in range(len(responses))]
        lengths += [sample["tokens"] for sample in samples]
        text = "".join(json.dumps(sample, separators=(",", ":")) + "\n" for sample in samples)
        (target / "rollouts" / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
    return statistics.fmean(lengths)


def _longer(samples: Sequence[dict[str, Any]], number: int, longer: int) -> dict[str, Any]:
    """A sample continued by those after it in the file: repeating its own text would compress to nothing."""
    parts = [samples[(number + offset) % len(samples)] for offset in range(longer)]
    ratios = [ratio for part in parts for ratio in part["token_log_ratios"] or [0.0] * part["tokens"]]
    return {
        **samples[number],
        "completion": "".join(part["completion"] for part in parts),
        "tokens": sum(part["tokens"] for part in parts),
        "token_characters": [length for part in parts for length in part["token_characters"]],
        "token_log_ratios": ratios,
    }


def _row(run: Path, tokens: float, loads: int) -> str:
    started = time.perf_counter()
    page = write_report([run], note=lambda _: None)
    written = time.perf_counter() - started
    with _browser() as browser:
        timings = [_load(browser, page) for _ in range(loads + 1)][1:]  # the first one fills caches
        carried = browser.execute_script("return document.querySelector('#samples .coverage').textContent")
    first, everything = (statistics.median(values) for values in zip(*timings, strict=True))
    size = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
    return (
        f"| {tokens:.0f} | {size / 1e6:.0f} | {page.stat().st_size / 1e6:.2f} | {written:.1f} | {first:.0f} "
        f"| {everything:.0f} | {carried} |"
    )


@contextmanager
def _browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for flag in (*_FLAGS, "--window-size=1280,900"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield browser
    finally:
        browser.quit()


def _load(browser: Any, page: Path) -> tuple[float, float]:
    """Milliseconds from the request to the first chart, and to everything, as the page's own clock has them."""
    browser.get(page.resolve().as_uri())
    ready = "return document.documentElement.dataset.ready"
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(ready))
    times = browser.execute_script("return {...document.documentElement.dataset}")
    return float(times["firstChart"]), float(times["ready"])


if __name__ == "__main__":
    main()
