"""The page opens from the disk, says nothing in the console and fetches nothing, whatever there is of a run."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import begun, made_run, metrics_line, rollouts, sample, write_run


def _untrained(path: Path) -> Path:
    samples = {step: [sample(words=("same",)) for _ in range(4)] for step in (1, 2)}
    return write_run(path, lines=[metrics_line(step) for step in (1, 2)], samples=samples)


def _in_mid_write(path: Path) -> Path:
    made_run(path)
    for name in ("metrics.jsonl", "rollouts/step_000006.jsonl", "history.jsonl"):
        content = (path / name).read_text(encoding="utf-8")
        (path / name).write_text(content[: -len(content.splitlines()[-1]) // 2], encoding="utf-8")
    return path


def _emoji(path: Path) -> Path:
    words = ("👩‍👩‍👧", "Ã©", "\u202e", "日本", "\U0001f600", "\u2028", "e\u0301", "\x00\x1b[31m", "\ufffd")
    samples = {1: [sample("q:😀", "日本\u202e?", words=words, token_log_ratios=[0.001] * 10) for _ in range(2)]}
    return write_run(path, lines=[metrics_line(1)], samples=samples)


def _all_null(path: Path) -> Path:
    line = json.loads(json.dumps(metrics_line(1)), parse_int=int, parse_float=lambda _: None)
    return write_run(path, lines=[line], samples={1: []})


RUNS: dict[str, Callable[[Path], list[Path]]] = {
    "whole": lambda path: [made_run(path)],
    "no step yet": lambda path: [write_run(path, history=[begun()])],
    "no history": lambda path: [write_run(path, lines=[metrics_line(1)], samples={1: rollouts(1)}, history=[])],
    "no rollouts": lambda path: [made_run(path, with_samples=False, report={"rollouts": False})],
    "untrained": lambda path: [_untrained(path)],
    "null": lambda path: [_all_null(path)],
    "several": lambda path: [made_run(path / "a"), made_run(path / "b", seed=1), made_run(path / "c", actor={})],
    "several of which one has nothing": lambda path: [made_run(path / "a"), write_run(path / "b")],
    "in mid-write": lambda path: [_in_mid_write(path)],
    "emoji": lambda path: [_emoji(path)],
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_report_opens_without_a_word_and_without_a_request(kind: str, tab: Tab, tmp_path: Path) -> None:
    tab.open(*RUNS[kind](tmp_path / "run"))
    assert tab.run("return Number(document.documentElement.dataset.ready)") > 0
    assert tab.run("return document.querySelector('p.broken')?.textContent") is None
    assert tab.messages() == []
    assert tab.requests() == []
    assert tab.run("return performance.getEntriesByType('resource').map((one) => one.name)") == []


def test_a_request_or_an_error_would_be_noticed(tab: Tab, run: Path) -> None:
    tab.open(run)
    tab.run("new Image().src = 'https://localhost:9/a.png'; console.warn('a warning')")
    tab.driver.execute_async_script("fetch('https://localhost:9/b').catch(() => 0).then(arguments[0])")
    messages = tab.messages()
    assert any("a warning" in message for message in messages)
    for address in ("https://localhost:9/a.png", "https://localhost:9/b"):  # the page's policy lets nothing through
        assert any(address in message and "Content Security Policy" in message for message in messages)
    assert "https://localhost:9/a.png" in tab.requests()


@contextmanager
def _first(tab: Tab, source: str) -> Iterator[None]:
    """With a script that the browser runs before those of the page."""
    added = tab.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": source})
    try:
        yield
    finally:
        tab.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_a_browser_that_is_too_old_is_told(tab: Tab, run: Path) -> None:
    with _first(tab, "Object.defineProperty(window, 'DecompressionStream', {value: undefined})"):
        tab.open(run)
    told = tab.find("p.broken").text
    assert "could not be shown" in told and told.endswith("It needs a browser of 2023 or later.")
    assert "held_out" in tab.find("#overview").text  # what is text is there without a script
    assert tab.messages()  # the error's own


def test_an_error_is_told_as_it_is_where_the_browser_is_not_to_blame(tab: Tab, run: Path) -> None:
    with _first(tab, "Response.prototype.text = async () => { throw new Error('no such luck'); }"):
        tab.open(run)
    assert tab.find("p.broken").text == "This page could not be shown: no such luck."
    assert tab.messages()
