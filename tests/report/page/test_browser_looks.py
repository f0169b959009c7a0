"""Light, dark, on paper and on a phone: everything can be read and stays where it is."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab

# Of each visible text: its colour's contrast with what is behind it, as WCAG 2 has it. Lines of charts alike.
CONTRASTS = """
const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
const over = (top, below) => {
  const [red, green, blue, opacity = 1] = parts(top);
  return [red, green, blue].map((one, place) => one * opacity + below[place] * (1 - opacity));
};
const background = (element) => {
  const below = element.parentElement ? background(element.parentElement) : [255, 255, 255];
  return over(getComputedStyle(element).backgroundColor, below);
};
const light = (colour) => colour.map((one) => one / 255)
  .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
  .reduce((sum, one, place) => sum + one * [0.2126, 0.7152, 0.0722][place], 0);
const contrast = (colour, element) => {
  const below = background(element);
  const [less, more] = [over(colour, below), below].map(light).sort((one, two) => one - two);
  return (more + 0.05) / (less + 0.05);
};
const hasText = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
const seen = (one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled
  && !one.closest("noscript, script, title, option, .skip");
const told = (one) => `${one.localName}.${one.getAttribute("class")}: ${one.textContent.trim().slice(0, 40)}`;
const texts = [...document.body.querySelectorAll("*")].filter((one) => hasText(one) && seen(one))
  .map((one) => [told(one), contrast(getComputedStyle(one)[one.closest("svg") ? "fill" : "color"], one)]);
const lines = [...document.querySelectorAll(".js-line, .yerror")]
  .filter((one) => parseFloat(getComputedStyle(one).strokeWidth))
  .map((one) => [told(one), contrast(getComputedStyle(one).stroke, one)]);
return [texts, lines];"""
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(21, 24, 28)"


@pytest.fixture
def shown(tab: Tab, run: Path) -> Iterator[Tab]:
    """The page with every piece of text open, and a chart of seven colours; the theme is put back."""
    tab.show(run)
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    tab.set("#other", "ratio/sequence_quantiles")
    tab.wait("return document.querySelectorAll('#other-plot .scatterlayer .js-line').length === 7")
    yield tab
    tab.set("#theme", "auto")
    tab.set("#other", "reward/std")
    tab.wait("return document.querySelectorAll('#other-plot .scatterlayer .js-line').length === 1")
    tab.run("for (const one of document.querySelectorAll('details')) one.open = false")


def _paper(tab: Tab) -> str:
    return str(tab.run("return getComputedStyle(document.body).backgroundColor"))


def _line_colour(tab: Tab) -> str:
    return str(tab.run("return getComputedStyle(document.querySelector('#chart-1 .js-line')).stroke"))


def assert_legible(tab: Tab) -> None:
    tab.settle()
    texts, lines = tab.run(CONTRASTS)
    assert len(texts) > 300 and len(lines) > 20
    assert [one for one in texts if one[1] < 4.5] == []
    assert [one for one in lines if one[1] < 3] == []


@pytest.mark.parametrize(("scheme", "paper"), [("light", LIGHT), ("dark", DARK)])
def test_the_page_is_legible_as_the_system_has_it(scheme: str, paper: str, shown: Tab) -> None:
    with shown.media(prefers_color_scheme=scheme):
        shown.wait("return document.documentElement.dataset.theme === arguments[0]", scheme)
        assert _paper(shown) == paper
        assert_legible(shown)


def test_the_theme_is_chosen_and_kept(shown: Tab) -> None:
    light = _line_colour(shown)
    shown.set("#theme", "dark")
    shown.wait("return getComputedStyle(document.querySelector('#chart-1 .js-line')).stroke !== arguments[0]", light)
    assert (_paper(shown), light, _line_colour(shown)) == (DARK, "rgb(0, 114, 178)", "rgb(86, 180, 233)")
    assert_legible(shown)
    with shown.media(prefers_color_scheme="light"):
        assert _paper(shown) == DARK
    with shown.media(prefers_color_scheme="dark"):
        shown.set("#theme", "light")
        assert _paper(shown) == LIGHT
        assert_legible(shown)


def test_another_theme_keeps_the_zoom_and_the_curves(shown: Tab) -> None:
    read = "return [...document.querySelectorAll('.charts .plot')].map((one) => one._fullLayout.xaxis.range)"
    numbers = "return [...document.querySelectorAll('.charts .plot')].map((one) => one.data.map((trace) => trace.y))"
    before = shown.run(numbers)
    shown.run("Plotly.relayout(document.querySelector('#chart-2 .plot'), {'xaxis.range': [2, 5]})")
    shown.wait(f"{read}.every((one) => one[0] === 2 && one[1] === 5)")
    shown.set("#theme", "dark")
    shown.wait("return getComputedStyle(document.querySelector('#chart-12 .js-line')).stroke === 'rgb(86, 180, 233)'")
    shown.settle()
    assert shown.run(read) == [[2, 5]] * 13
    assert shown.run(numbers) == before
    shown.click("#range [type=reset]")
    shown.wait(f"{read}.every((one) => one[0] !== 2)")


def test_on_paper_it_is_light_without_what_cannot_be_pressed(shown: Tab) -> None:
    shown.set("#theme", "dark")
    with shown.media("print"):
        shown.run("dispatchEvent(new Event('beforeprint'))")
        shown.wait(
            "return getComputedStyle(document.querySelector('#chart-12 .js-line')).stroke === 'rgb(0, 114, 178)'"
        )
        assert _paper(shown) == LIGHT
        assert_legible(shown)
        hidden = ("nav", "#samples-form", "#range", ".modebar", "#more", ".copy", "#theme", "#other")
        assert [one for one in hidden if shown.find(one).is_displayed()] == []
        kept = ("h1", "#overview", "#chart-0", "#cards article", "#recipe pre", "#found")
        assert [one for one in kept if not shown.find(one).is_displayed()] == []
    shown.run("dispatchEvent(new Event('afterprint'))")
    shown.wait("return document.documentElement.dataset.theme === 'dark'")


# Of each plot: how wide it is, and how wide the figure that it stands in.
WIDTHS = """return [...document.querySelectorAll(".plot")].filter((one) => one.data).map((one) => [
  one.querySelector(".main-svg").getBoundingClientRect().width,
  one.closest("figure").getBoundingClientRect().width, one.closest("figure").getBoundingClientRect().left])"""
PAPERS = {"A4": (8.27, 11.69), "US letter": (8.5, 11.0)}  # inches
MARGIN = 0.4  # Chromium's own, in inches


@pytest.mark.parametrize("paper", PAPERS)
def test_on_paper_no_plot_is_wider_than_its_figure(paper: str, shown: Tab) -> None:
    before = shown.run(WIDTHS)
    width, height = (round(96 * (size - 2 * MARGIN)) for size in PAPERS[paper])
    size: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    with shown.media("print"):
        shown.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        shown.run("dispatchEvent(new Event('beforeprint'))")
        shown.wait(f"return (() => {{{WIDTHS}}})().every((one) => one[0] === 640)")
        assert [one for one in shown.run(WIDTHS) if one[0] > one[1]] == []
        assert len({one[2] for one in shown.run(WIDTHS)}) == 1  # in one column
        assert shown.run("return document.documentElement.scrollWidth <= innerWidth")
    shown.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    shown.run("dispatchEvent(new Event('afterprint'))")
    shown.wait(f"const now = (() => {{{WIDTHS}}})();"
               "return now.every((one, place) => Math.abs(one[0] - arguments[0][place][0]) < 1)", before)  # fmt: skip
    assert shown.run(WIDTHS) == before


def test_a_print_has_the_plots_as_wide_as_paper(shown: Tab) -> None:
    before = shown.run(WIDTHS)
    assert all(plot <= figure for plot, figure, _ in before) and {plot for plot, *_ in before} != {640}
    shown.run("matchMedia('print').addEventListener('change', (event) => {"
              f"if (event.matches) window.printed = (() => {{{WIDTHS}}})(); }}, {{once: true}})")  # fmt: skip
    pdf = shown.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert len(pdf["data"]) > 50_000
    printed = shown.wait("return window.printed")
    assert {plot for plot, *_ in printed} == {640} and len(printed) == len(before)
    shown.wait(f"const now = (() => {{{WIDTHS}}})();"
               "return now.every((one, place) => Math.abs(one[0] - arguments[0][place][0]) < 1)", before)  # fmt: skip


@pytest.fixture(scope="module")
def phone(tab: Tab, run: Path) -> Iterator[Tab]:
    """390 points wide, pointed at with a finger, until the last of these tests."""
    size: dict[str, Any] = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    tab.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    tab.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    tab.open(run)
    yield tab
    tab.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    tab.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_a_phone_shows_everything_within_its_width(phone: Tab) -> None:
    assert phone.run("return innerWidth") == 390
    for query in ("sum:1", "sum:2"):
        phone.set("#samples-form [name=query]", query)
        phone.settle()
        phone.run("for (const one of document.querySelectorAll('details')) one.open = true")
        assert phone.run("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    boxes = phone.run("return [...document.querySelectorAll('.plot .main-svg, .card, fieldset, select, input, button')]"
                      ".map((one) => one.getBoundingClientRect()).map((box) => [box.left, box.right])")  # fmt: skip
    assert [box for box in boxes if box[0] < 0 or box[1] > 390] == []


def test_a_finger_that_scrolls_does_not_zoom(phone: Tab) -> None:
    assert phone.run("return matchMedia('(pointer: coarse)').matches") is True
    assert set(
        phone.run("return [...document.querySelectorAll('.charts .plot')].map((one) => one._fullLayout.dragmode)")
    ) == {False}
    area = phone.find("#chart-1 .nsewdrag")
    phone.run("arguments[0].scrollIntoView({block: 'center'})", area)
    phone.actions().move_to_element_with_offset(area, -60, 0).click_and_hold().move_by_offset(
        120, 0
    ).release().perform()
    phone.settle()
    assert phone.run("return document.querySelector('#chart-1 .plot')._fullLayout.xaxis.range") == [1, 6]
