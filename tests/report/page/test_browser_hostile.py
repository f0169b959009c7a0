"""What a run contains is text on its page, whatever it looks like: none of it is run, no tag of it becomes a tag."""

from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import begun, ended, made_run, metrics_line, recipe, sample, write_run

pytestmark = pytest.mark.browser

SCRIPTS = (
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    '"><svg onload=window.hacked=1>',
    "'><svg onload=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>a link</a>",
    "]]><!--<script>",
    "{{data}}{{script}}",
    "${window.hacked=1}`%{y}&lt;b&gt;&amp;",
    "\\u003cscript>\u2028\u2029</textarea></title></style>",
)
ALL = " ".join(SCRIPTS)
SEEN = ALL.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")  # what nobody could see is spelled out
QUERIES = ("__proto__", "constructor", ALL)
NAMES = ("__proto__", "constructor", "toString", f"reward/{ALL}/mean", ALL)


def _samples() -> list[dict[str, Any]]:
    beside: dict[str, Any] = {"columns": {ALL: ALL}, "rewards": {ALL: 0.5, "__proto__": 1.0}}
    trained: dict[str, Any] = {"token_log_ratios": [0.01, -0.02], "failure": ALL, "reward": None}
    return [
        sample(query, f"prompt {ALL}", words=(f"response {ALL}",), **beside, **(trained if number else {}))
        for query in QUERIES
        for number in range(2)
    ]


def _lines() -> list[dict[str, Any]]:
    own = {name: 0.5 + place / 10 for place, name in enumerate(NAMES)}
    scores = {f"evaluation/{ALL}/pass_at_1": 0.5, f"evaluation/{ALL}/standard_error": 0.1, f"{ALL}/list": [0.1, [0.2]]}
    return [{**metrics_line(step), **own, **scores} for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    history = [
        begun(introduction=ALL, environment={ALL: ALL, "__proto__": ALL}, working_directory=ALL, time=ALL),
        ended("failed", ALL),
    ]
    settings = recipe(ALL, model={"path": ALL}, reward=[{"function": ALL}], queries={"path": ALL}, hostile={ALL: ALL})
    path = tmp_path_factory.mktemp("hostile") / "a <b>&'\"{{samples}}"
    return write_run(path, settings=settings, lines=_lines(), samples={1: _samples()}, history=history)


def assert_harmless(tab: Tab) -> None:
    tab.settle()
    assert tab.run(
        "return [window.hacked, document.querySelectorAll('svg[onload], img, a[href^=javascript]').length,"
        "Object.keys(Object.prototype)]"
    ) == [None, 0, []]
    assert tab.messages() == [] and tab.requests() == []


def open_all(tab: Tab) -> None:
    """Unfold everything, and bring every chart into view."""
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    for place in range(len(tab.find_all("#charts .plot"))):
        tab.run("document.querySelectorAll('#charts .plot')[arguments[0]].scrollIntoView()", place)
        tab.wait("return document.querySelectorAll('#charts .plot')[arguments[0]].chart", place)
    assert_harmless(tab)


def test_everything_of_a_run_is_text_in_every_section(tab: Tab, hostile: Path) -> None:
    tab.open(hostile)
    assert tab.run("return document.title") == f"{ALL} – gspo"
    open_all(tab)
    places = (
        "h1",
        "#overview .state",
        "#overview",
        "#charts .u-legend",
        "#queries",
        "#samples",
        "#recipe h3",
        "#recipe table",
    )
    for place in places:
        text = tab.run("return document.querySelector(arguments[0]).textContent", place)
        assert SEEN in text or ALL in text, place
    for text in (f"prompt {SEEN}", f"response {SEEN}"):
        tab.wait("return document.querySelector('#samples').textContent.includes(arguments[0])", text)
    assert "onerror=window.hacked=1" in tab.run(
        "return document.querySelector('#recipe details:last-child pre').textContent"
    )
    tags = tab.run("return [...new Set([...document.querySelectorAll('main *')].map((one) => one.localName))]")
    assert not set(tags) & {"script", "svg", "img", "textarea", "style", "title", "iframe", "object"}


@pytest.mark.parametrize("name", [*NAMES, f"{ALL}/list"])
def test_any_other_number_may_have_any_name(name: str, tab: Tab, hostile: Path) -> None:
    tab.show(hostile)
    tab.set("#other", name)
    tab.run("document.querySelector('#other-chart').scrollIntoView()")
    title, numbers = tab.wait(
        "const figure = document.querySelector('#other-chart'), chart = figure.querySelector('.plot')?.chart;"
        "return chart && [figure.querySelector('h4').textContent, [...chart.data[1]].map((value) => value ?? null)]"
    )
    assert title == name.replace(ALL, SEEN) and len(set(numbers)) == 1
    assert_harmless(tab)


def test_several_runs_of_such_names(tab: Tab, hostile: Path, tmp_path: Path) -> None:
    evil = "</option><script>window.hacked=1</script>"
    seeds = [made_run(tmp_path / str(seed), name=f"{evil}{seed}", seed=seed, steps=2, hostile=ALL) for seed in (0, 1)]
    tab.open(hostile, *seeds)
    open_all(tab)
    overview = tab.run("return document.querySelector('#overview').textContent")
    assert SEEN in overview and f"{evil} (2 seeds)" in overview and "hostile" in overview
    assert evil in tab.run("return document.querySelector('#charts .u-legend').textContent")
    assert_harmless(tab)
