"""Zooming one chart zooms all; a chart's title leads to what its number means."""

import re
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from tests.report.page.browser import Tab

LAST = 6
CHARTS = "[...document.querySelectorAll('.plot')].filter((one) => one.data)"
RANGES = f"{CHARTS}.map((one) => one._fullLayout.xaxis.range)"
AUTOMATIC = f"{CHARTS}.map((one) => one._fullLayout.xaxis.autorange)"
ARE_ALL = f"return {RANGES}.every((one) => one.every((end, place) => Math.abs(end - arguments[place]) < 1e-9))"


@pytest.fixture
def shown(tab: Tab, run: Path) -> Tab:
    """The run's page, of all steps, with a chart of another number."""
    tab.show(run)
    tab.run(f"for (const one of {CHARTS}) Plotly.relayout(one, {{'xaxis.autorange': true}})")
    if tab.run("return document.getElementById('other').value") != "reward/std":
        tab.set("#other", "reward/std")
    tab.wait("return document.getElementById('other-plot').data?.[0].name === 'reward/std'")
    tab.wait(f"return {AUTOMATIC}.every(Boolean)")
    return tab


def drag(tab: Tab, chart: str, start: float, end: float) -> None:
    """With the mouse, between two places of a chart's width (0 to 1), at half its height."""
    area = tab.find(f"{chart} .nsewdrag")
    tab.run("arguments[0].scrollIntoView({block: 'center'})", area)
    width = area.rect["width"]
    first, last = round((start - 0.5) * width), round((end - 0.5) * width)
    actions = tab.actions().move_to_element_with_offset(area, first, 0).click_and_hold()
    actions.move_by_offset((last - first) // 2, 0).move_by_offset(
        last - first - (last - first) // 2, 0
    ).release().perform()


def double_click(tab: Tab, chart: str) -> None:
    """Again where the page was too busy to take two clicks for a double one."""
    area = tab.find(f"{chart} .nsewdrag")
    tab.run("arguments[0].scrollIntoView({block: 'center'})", area)
    tab.settle()
    before = tab.run(f"return {RANGES}")
    for _ in range(5):
        tab.actions().double_click(area).perform()
        tab.settle()
        if tab.run(f"return {RANGES}") != before:
            return


def range_of(tab: Tab, chart: str) -> list[float]:
    return list(tab.run("return document.querySelector(arguments[0])._fullLayout.xaxis.range", f"{chart} .plot"))


def typed(tab: Tab) -> list[str]:
    return [str(tab.find(f"#range [name={name}]").get_property("value")) for name in ("from", "to")]


def assert_all_steps(tab: Tab) -> None:
    tab.wait(f"return {AUTOMATIC}.every(Boolean)")
    assert typed(tab) == ["", ""]
    assert range_of(tab, "#chart-1") == [1, LAST]


@pytest.mark.parametrize("chart", ["#chart-1", "#chart-9", "figure:has(#other-plot)"])  # a curve, the map, the chosen
def test_a_drag_over_one_chart_zooms_all_and_a_double_click_shows_all_steps(chart: str, shown: Tab) -> None:
    before = range_of(shown, chart)
    drag(shown, chart, 0.27, 0.63)
    shown.wait(f"return !{AUTOMATIC}.some(Boolean)")
    low, high = range_of(shown, chart)
    width = before[1] - before[0]
    assert [low, high] == pytest.approx([before[0] + 0.27 * width, before[0] + 0.63 * width], abs=0.02 * width)
    shown.wait(ARE_ALL, low, high)
    assert typed(shown) == ["3", "4"]
    double_click(shown, "#chart-3")
    assert_all_steps(shown)


def test_zooming_by_script_zooms_all_and_the_button_shows_all_steps(shown: Tab) -> None:
    shown.run("Plotly.relayout(document.querySelector('#chart-2 .plot'), {'xaxis.range[0]': 2, 'xaxis.range[1]': 5})")
    shown.wait(ARE_ALL, 2, 5)
    assert typed(shown) == ["2", "5"]
    shown.run("Plotly.relayout(document.querySelector('#chart-0 .plot'), {'xaxis.range': [3, 4]})")
    shown.wait(ARE_ALL, 3, 4)
    shown.click("#range [type=reset]")
    assert_all_steps(shown)


def test_a_zoom_leaves_the_other_axis_as_it_is(shown: Tab) -> None:
    shown.run("Plotly.relayout(document.querySelector('#chart-2 .plot'), {'xaxis.range': [2, 5]})")
    shown.wait(ARE_ALL, 2, 5)
    assert shown.run("return document.querySelector('#chart-9 .plot')._fullLayout.yaxis.range") == [-0.5, 2.5]
    assert shown.run("return document.querySelector('#chart-9 .plot')._fullLayout.yaxis.type") == "category"
    shown.run("Plotly.relayout(document.querySelector('#chart-3 .plot'), {'yaxis.range': [0, 9]})")  # not the steps'
    assert shown.run(ARE_ALL, 2, 5)
    shown.click("#chart-4 .modebar-btn:last-child")
    assert_all_steps(shown)


def test_a_chart_drawn_later_shows_the_same_steps(shown: Tab) -> None:
    shown.run("Plotly.relayout(document.querySelector('#chart-2 .plot'), {'xaxis.range': [2, 4]})")
    shown.wait(ARE_ALL, 2, 4)
    shown.set("#other", "policy/grad_norm")
    shown.wait("return document.getElementById('other-plot').data[0].name === 'policy/grad_norm'")
    shown.wait(ARE_ALL, 2, 4)
    drag(shown, "figure:has(#other-plot)", 0.1, 0.9)  # within what it was drawn with
    shown.wait("return document.getElementById('other-plot')._fullLayout.xaxis.range[0] > 2")
    double_click(shown, "figure:has(#other-plot)")  # shows all steps, not those that it was drawn with
    assert_all_steps(shown)


def test_steps_are_typed(shown: Tab) -> None:
    shown.click("#range [name=from]")
    shown.press("3", Keys.TAB, "5", Keys.ENTER)
    shown.wait(ARE_ALL, 3, 5)
    shown.click("#range [name=from]")
    shown.press(Keys.BACKSPACE, Keys.TAB)  # without a first step
    shown.wait(ARE_ALL, 0, 5)
    shown.click("#range [name=to]")
    shown.press(Keys.BACKSPACE, Keys.TAB)  # without a last step
    shown.wait(ARE_ALL, 0, LAST)
    for before in (5, LAST):
        shown.set("#range [name=to]", before)
        shown.wait(ARE_ALL, 0, before)
        shown.click("#range [name=to]")
        shown.press(Keys.END, Keys.BACKSPACE, "99", Keys.TAB)  # beyond the last step
        shown.wait("return document.querySelector('#range [name=to]').value === '6'")
        assert shown.run(ARE_ALL, 0, LAST) and typed(shown) == ["0", "6"]
    shown.click("#range [name=from]")
    shown.press("9", Keys.TAB, *[Keys.BACKSPACE] * 2, "2", Keys.TAB)  # the wrong way round: as it was
    assert shown.run(ARE_ALL, 0, LAST)
    shown.press(Keys.ENTER)  # "all steps" has the focus
    assert_all_steps(shown)


def test_no_steps_typed_are_all(shown: Tab) -> None:
    shown.set("#range [name=from]", 3)
    shown.wait(ARE_ALL, 3, LAST)
    shown.run("document.querySelector('#range [name=to]').value = ''")
    shown.set("#range [name=from]", "")
    assert_all_steps(shown)


def test_after_the_page_was_loaded_zoomed_a_double_click_shows_all_steps(tab: Tab, run: Path) -> None:
    tab.open(run)
    drag(tab, "#chart-1", 0.2, 0.8)
    tab.wait(f"return !{AUTOMATIC}.some(Boolean)")
    zoomed = range_of(tab, "#chart-1")
    tab.reload()
    tab.wait(ARE_ALL, *zoomed)
    drag(tab, "#chart-2", 0.2, 0.8)
    tab.wait("return document.querySelector('#chart-1 .plot')._fullLayout.xaxis.range[0] > arguments[0]", zoomed[0])
    double_click(tab, "#chart-2")
    assert_all_steps(tab)


def test_every_title_and_name_leads_to_a_definition_which_opens(shown: Tab) -> None:
    links: list[Any] = shown.find_all("figure.chart[id] h3 a")
    assert len(links) == 13
    names = shown.run(
        "return [...document.querySelectorAll('figure.chart[id] a')].map((one) => one.getAttribute('href'))"
    )
    assert all(shown.run("return document.getElementById(arguments[0])?.tagName", name[1:]) == "DT" for name in names)
    for link in links:
        shown.run("document.querySelector('#glossary details').open = false; location.hash = ''")
        target = str(link.get_dom_attribute("href"))
        shown.run("arguments[0].scrollIntoView({block: 'center'})", link)
        link.click()
        shown.wait("return document.querySelector('#glossary details').open")
        shown.wait("const box = document.querySelector(arguments[0]).getBoundingClientRect();"
                   "return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight", target)  # fmt: skip
        assert re.sub(r"[^a-z_]+", "-", shown.find(f"{target} code").text) in target.replace("evaluation-set", "")


def test_a_link_to_a_definition_opens_it_when_the_page_is_loaded(tab: Tab, run: Path) -> None:
    page = tab.open(run)
    tab.driver.get("about:blank")
    tab.driver.get(page.as_uri() + "#metric-policy-entropy")
    tab.wait_until_ready()
    assert tab.find("#metric-policy-entropy").is_displayed()
