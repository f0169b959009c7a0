"""What a run contains is text on its page, whatever it looks like: none of it is run, no tag of it becomes one."""

from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import begun, ended, made_run, metrics_line, recipe, sample, write_run
from tests.report.page.shown_samples import choose, options

SCRIPTS = (
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    '"><svg onload=window.hacked=1>',
    "'><svg onload=window.hacked=1>",
    "<a href='javascript:window.hacked=1'>a link</a>",
    "]]><!--<script>",
    "{{figures}}{{script}}",
    "${window.hacked=1}`%{y}&lt;b&gt;&amp;",
    "\\u003cscript>\u2028\u2029</textarea></title></style>",
)
ALL = " ".join(SCRIPTS)
WINDOWS_OF_EVIL = "return [window.hacked, document.querySelectorAll('svg[onload], img, a[href^=javascript]').length]"
QUERIES = ("__proto__", "constructor", ALL)


def _samples() -> list[dict[str, Any]]:
    beside: dict[str, Any] = {"columns": {ALL: ALL}, "rewards": {ALL: 0.5, "__proto__": 1.0}}
    trained: dict[str, Any] = {"token_log_ratios": [0.01, -0.02], "failure": ALL, "reward": None}
    return [
        sample(query, f"prompt {ALL}", words=(f"response {ALL}",), **beside, **(trained if number else {}))
        for query in QUERIES
        for number in range(2)
    ]


def _settings(name: str) -> dict[str, Any]:
    return recipe(name, model={"path": ALL}, reward=[{"function": ALL}], queries={"path": ALL}, hostile={ALL: ALL})


def _lines() -> list[dict[str, Any]]:
    names = ("__proto__", "constructor", "toString", f"reward/{ALL}/mean", f"evaluation/{ALL}/pass_at_1")
    own = {name: 0.5 + place / 10 for place, name in enumerate((*names, f"evaluation/{ALL}/standard_error"))}
    return [{**metrics_line(step), **own, ALL: [0.1, 0.2]} for step in (1, 2, 3)]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile")
    history = [
        begun(introduction=ALL, environment={ALL: ALL}, working_directory=ALL, time=ALL),
        ended("failed", ALL),
    ]
    path = directory / "a <b>&'\"{{overview}}"
    return write_run(path, settings=_settings(ALL), lines=_lines(), samples={1: _samples()}, history=history)


@pytest.fixture
def shown(tab: Tab, hostile: Path) -> Tab:
    tab.show(hostile)
    return tab


def assert_harmless(tab: Tab) -> None:
    tab.settle()
    assert tab.run(WINDOWS_OF_EVIL) == [None, 0]
    assert tab.run("return Object.keys(Object.prototype)") == []
    assert tab.messages() == []
    assert tab.requests() == []


def test_nothing_of_it_is_run(tab: Tab, hostile: Path) -> None:
    tab.open(hostile)
    assert tab.run("return Number(document.documentElement.dataset.ready)") > 0
    assert_harmless(tab)
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert_harmless(tab)


def test_the_overview_and_the_recipe_have_it_as_text(shown: Tab) -> None:
    shown.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert shown.run("return document.title") == f"{ALL} – gspo"
    for place in ("h1", "#overview .state", "#overview", "#recipe h3", "#recipe table"):
        assert ALL in shown.run("return document.querySelector(arguments[0]).textContent", place), place
    assert "onerror=window.hacked=1" in shown.find("#recipe pre:last-child").text
    assert shown.run("return document.querySelectorAll('#overview a, #overview svg, #recipe a, #recipe b').length") == 0


@pytest.mark.parametrize("query", QUERIES)
def test_a_card_has_it_as_text(query: str, shown: Tab) -> None:
    assert options(shown, "query") == list(QUERIES)
    for scope in ("group", "query", "step"):
        choose(shown, query=query, scope=scope)
        found = shown.run("return [...document.querySelectorAll('#cards .completion')].map((one) => one.textContent)")
        assert found == [f"response {ALL}"] * (6 if scope == "step" else 2)
        assert shown.find("#cards .prompt").get_property("textContent") == f"prompt {ALL}"
        assert shown.find("#cards .columns").get_property("textContent") == f"{ALL}: {ALL}"
        rewards = f"({ALL} 0.500, __proto__ 1.00)"
        assert rewards in str(shown.find("#cards .facts").get_property("textContent"))
        assert shown.find("#cards .failure").get_property("textContent") == ALL
        assert query in str(shown.find("#cards").get_property("textContent"))
    tags = shown.run("return [...new Set([...document.querySelectorAll('#cards *')].map((one) => one.localName))]")
    assert set(tags) <= {"div", "h3", "pre", "article", "dl", "dt", "dd", "button", "p", "span"}
    choose(shown, query=query, scope="run", text="WINDOW.hacked", order="reward")
    assert len(shown.find_all("#cards article")) == 6
    choose(shown, order="", text="", scope="group")
    assert_harmless(shown)


@pytest.mark.parametrize("name", ["__proto__", "constructor", "toString", f"reward/{ALL}/mean", ALL])
def test_any_other_number_may_have_any_name(name: str, shown: Tab) -> None:
    shown.set("#other", name)
    drawn = "return document.getElementById('other-plot').data?.[0].legendgroup.startsWith(arguments[0])"
    shown.wait(drawn, name)
    (y, *_) = shown.run("return document.getElementById('other-plot').data.map((one) => one.y)")
    assert len(set(y)) == 1
    assert_harmless(shown)


def test_the_legend_and_the_hover_label_have_it_as_text(shown: Tab) -> None:
    plain = "".join(ALL.split())
    legend = shown.run("return document.querySelector('#chart-0 .legend').textContent")
    assert plain in "".join(legend.split())
    area = shown.find("#chart-0 .nsewdrag")
    shown.run("arguments[0].scrollIntoView({block: 'center'})", area)
    shown.actions().move_to_element(area).move_by_offset(3, 3).perform()
    hover = shown.wait("return document.querySelector('#chart-0 .hoverlayer')?.textContent")
    assert plain in "".join(hover.split())
    assert shown.run("return document.querySelectorAll('.plot a').length") == 0
    assert_harmless(shown)


def test_several_runs_of_such_names(tab: Tab, hostile: Path, tmp_path: Path) -> None:
    other = made_run(tmp_path / "b", name="</option><script>window.hacked=1</script>", steps=2, hostile=ALL)
    tab.open(hostile, other)
    names = tab.run("return [...document.querySelector('[name=run]').options].map((one) => one.textContent)")
    assert names == [ALL, "</option><script>window.hacked=1</script>"]
    differing = tab.run("return document.querySelector('#differences').textContent")
    assert ALL in differing and "</option><script>" in differing
    choose(tab, run=1)
    assert_harmless(tab)
