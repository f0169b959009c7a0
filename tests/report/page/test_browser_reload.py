"""A run that is watched: the page loads itself again with what there is then, and stays where its reader is."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import begun, metrics_line, recipe, rollouts, write_run
from tests.report.page.shown_samples import choose, options, texts, value
from tests.report.page.test_browser_zoom import ARE_ALL, drag, typed

SECONDS = 17
# The page's clock is the test's; a reload is noted, and let through only when asked for.
OWN_CLOCK = """
window.clocks = []; window.reloads = 0; window.isHeld = true;
window.setInterval = (tick, milliseconds) => { window.clocks.push([tick, milliseconds]); };
navigation.addEventListener("navigate", (event) => {
  if (event.navigationType !== "reload") return;
  window.reloads++;
  if (window.isHeld) event.preventDefault();
});"""


@pytest.fixture
def clock(tab: Tab) -> Iterator[None]:
    added = tab.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": OWN_CLOCK})
    yield
    tab.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def _running(path: Path, steps: int) -> Path:
    return write_run(
        path,
        settings=recipe(steps=9),
        lines=[metrics_line(step) for step in range(steps + 1)],
        samples={step: rollouts(step) for step in range(1, steps + 1)},
        history=[begun()],
    )


def _tick(tab: Tab) -> int:
    """Let the time pass; how many reloads there have been."""
    return int(tab.run("for (const [tick] of window.clocks) tick(); return window.reloads"))


def test_what_is_looked_at_stays(clock: None, tab: Tab, tmp_path: Path) -> None:
    run = _running(tmp_path / "run", 6)
    page = tab.open(run, reload_seconds=SECONDS)
    assert tab.run("return window.clocks.map((one) => one[1])") == [1000 * SECONDS]
    choose(tab, step=3, query="sum:2", clipped="yes", text="answer", colour="advantage")
    tab.set("#other", "policy/entropy")
    tab.wait("return document.querySelector('#other-plot .js-line')")
    drag(tab, "#chart-1", 0.27, 0.63)
    tab.wait("return document.querySelector('#range [name=from]').value === '3'")
    zoomed = tab.run("return document.querySelector('#chart-1 .plot')._fullLayout.xaxis.range")
    before = texts(tab)
    assert len(before) == 2
    tab.write(page, _running(run, 8), reload_seconds=SECONDS)
    tab.run("window.isOld = true; window.isHeld = false; document.activeElement.blur(); window.clocks[0][0]()")
    tab.wait("return !window.isOld && document.documentElement.dataset.ready")
    assert options(tab, "step")[-1] == "8"  # what is new is there
    assert "8 of 9 steps" in tab.find("#overview .state").text
    assert (value(tab, "step"), value(tab, "query"), value(tab, "clipped")) == ("3", "sum:2", "yes")
    assert (value(tab, "text"), value(tab, "colour")) == ("answer", "advantage")
    assert texts(tab) == before
    tab.wait(ARE_ALL, *zoomed)
    assert tab.run("return document.getElementById('other').value") == "policy/entropy"
    assert tab.run("return document.querySelector('#other-plot').data[0].name") == "policy/entropy"


def test_the_steps_typed_stay(clock: None, tab: Tab, tmp_path: Path) -> None:
    tab.open(_running(tmp_path / "run", 6), reload_seconds=SECONDS)
    tab.set("#range [name=from]", 2)
    tab.set("#range [name=to]", 5)
    tab.set("#theme", "dark")
    tab.run("window.isHeld = false")
    tab.reload()
    tab.wait(ARE_ALL, 2, 5)
    assert typed(tab) == ["2", "5"]
    assert tab.run("return document.documentElement.dataset.theme") == "dark"


def test_nobody_is_disturbed(clock: None, tab: Tab, tmp_path: Path) -> None:
    tab.open(_running(tmp_path / "run", 2), reload_seconds=SECONDS)
    tab.find("#samples-form [name=text]").send_keys("a")
    assert _tick(tab) == 0  # while somebody types
    tab.run("document.activeElement.blur(); getSelection().selectAllChildren(document.querySelector('h1'))")
    assert _tick(tab) == 0  # or has chosen a text to be copied
    tab.run("getSelection().removeAllRanges()")
    tab.run("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    assert _tick(tab) == 0  # or looks at something else
    tab.run("delete document.hidden")
    assert _tick(tab) == 1


def test_a_finished_run_is_not_loaded_again(clock: None, tab: Tab, run: Path) -> None:
    tab.open(run)
    assert tab.run("return window.clocks") == []


def test_pages_do_not_share_what_they_remember(tab: Tab, run: Path) -> None:
    tab.open(run)
    choose(tab, step=2)
    tab.set("#range [name=from]", 3)
    tab.open(run)  # under another name
    assert value(tab, "step") == "6"
    assert typed(tab) == ["", ""]


OPENED = "return [...document.querySelectorAll('details')].map((one) => one.open)"


def _walk_down(tab: Tab) -> int:
    """Open one of the charts' details, the last of the recipe's, and stand at the samples."""
    tab.run("const all = [...document.querySelectorAll('details')];"
            "for (const one of [all[2], [...document.querySelectorAll('#recipe details')].at(-1)]) one.open = true;"
            "scrollTo(0, document.getElementById('samples').offsetTop + 100)")  # fmt: skip
    place = int(tab.run("return scrollY"))
    assert place > 1000 and sum(tab.run(OPENED)) == 2
    return place


def test_a_page_that_is_loaded_again_stands_where_it_stood(tab: Tab, tmp_path: Path) -> None:
    run = _running(tmp_path / "run", 6)
    page = tab.open(run)
    place, opened = _walk_down(tab), tab.run(OPENED)
    tab.reload()
    assert (tab.run("return scrollY"), tab.run(OPENED)) == (place, opened)
    tab.run("for (const one of document.querySelectorAll('details')) one.open = false; scrollTo(0, 0)")
    tab.reload()
    assert tab.run("return scrollY") == 0 and not any(tab.run(OPENED))
    _walk_down(tab)
    tab.driver.get("about:blank")
    tab.driver.get(page.as_uri())  # a new visit begins at the top
    tab.wait_until_ready()
    assert tab.run("return scrollY") == 0 and not any(tab.run(OPENED))


def test_a_page_that_loads_itself_again_stands_where_it_stood(clock: None, tab: Tab, tmp_path: Path) -> None:
    run = _running(tmp_path / "run", 6)
    page = tab.open(run, reload_seconds=SECONDS)
    place, opened = _walk_down(tab), tab.run(OPENED)
    tab.write(page, _running(run, 8), reload_seconds=SECONDS)
    tab.run("window.isOld = true; window.isHeld = false; window.clocks[0][0]()")
    tab.wait("return !window.isOld && document.documentElement.dataset.ready")
    assert options(tab, "step")[-1] == "8"
    assert (tab.run("return scrollY"), tab.run(OPENED)) == (place, opened)


def test_a_definition_in_the_address_gives_way_to_where_the_page_stood(tab: Tab, run: Path) -> None:
    tab.open(run)
    tab.run("location.hash = '#metric-policy-entropy'")
    tab.wait("return document.querySelector('#glossary details').open")
    tab.run("scrollTo(0, 500)")
    tab.reload()
    assert tab.run("return [scrollY, document.querySelector('#glossary details').open]") == [500, True]
