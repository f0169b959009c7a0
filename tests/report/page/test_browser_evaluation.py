"""The page of evaluations in a real browser: tables, filters, responses; hostile texts; on a phone, in the dark."""

from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_evaluations import response, responses, suite, write_evaluation
from tests.report.page.test_browser_hostile import ALL, assert_harmless

from gspo.report.evaluation import write_evaluation_page

pytestmark = pytest.mark.browser

FIRST: dict[str, list[bool | None]] = {"a": [True, False], "b": [False, False], "c": [True, True], "d": [None, None]}
SECOND: dict[str, list[bool | None]] = {"a": [True, True], "b": [False, False], "c": [False, True], "d": [True, False]}
NUMBERS: dict[str, Any] = {"error_over_questions": 0.125, "error_over_samples": 0.0625, "num_questions": 4}
ROUND = {"name": "Round 9", "rank": 12.5, "num_humans": 99, "rating": None, "solved": {"A": 2}}
RATING = {
    "rating": 1234.4,
    "low": 1100,
    "high": 1390,
    "confidence": 0.95,
    "note": "",
    "contests": [ROUND],
    "left_out": {"7": "no ranks"},
}
QUESTIONS = "return [...document.querySelectorAll('.queries tbody tr')].map((row) => row.cells[0].textContent)"
CARDS = """
const textsOf = (card) => [".verdict", ".completion"].map((one) => card.querySelector(one).textContent);
const sides = [...document.querySelectorAll("#samples .side")];
return sides.map((side) => [...side.querySelectorAll("article")].map(textsOf))
"""
ROWS = """
const rows = [...document.querySelectorAll(`${arguments[0]} tbody tr`)];
return rows.map((row) => [...row.cells].map((one) => one.innerText))
"""


def rows(tab: Tab, selector: str) -> list[list[str]]:
    """The texts of a table's cells."""
    shown: list[list[str]] = tab.run(ROWS, selector)
    return shown


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of two models on two suites, of which only the first model has a rating."""
    path = tmp_path_factory.mktemp("evaluations")
    rates: dict[str, Any] = {"pass_at_1": 0.5, "pass_at_k": {"1": 0.5, "2": 0.75}}
    solved: dict[str, Any] = {"codes": suite(responses({"x": [True]}), rating=RATING)}
    extra = response("c", False, number=5, completion="late", finish_reason="length", extra={"test": "3 of 4"})
    first = write_evaluation(path / "a", sums=suite(responses(FIRST), **rates, **NUMBERS), **solved)
    second = write_evaluation(path / "b", name="large", sums=suite([*responses(SECOND), extra], **rates))
    return write_evaluation_page([first, second], path / "page.html")


@pytest.fixture
def page(tab: Tab, two: Path) -> Tab:
    tab.open_file(two)
    return tab


def test_the_overview_has_a_row_for_each_suite_and_model_and_the_paired_difference(page: Tab) -> None:
    overview, differences = "#overview .numbers:not(.differences)", "#overview .differences"
    small, large, codes = rows(page, overview)
    assert small[:5] == ["sums", "small", "0.500 ± 0.125", "0.063", "0.750 (k = 2)"]
    assert large[:5] == ["sums", "large", "0.500", "–", "0.750 (k = 2)"]
    assert codes[0] == "codes" and "1,234 (95 %: 1,100 to 1,390)" in codes
    tables = page.run("return [...document.querySelectorAll('#suites details td')].map((one) => one.textContent)")
    assert tables == ["Round 9", "12.5", "99", "–", "A at try 2", "7", "no ranks"]
    ((suite_name, model, difference, *_, won, lost, p),) = rows(page, differences)
    assert (suite_name, model, won, lost, p) == ("sums", "large", "1", "1", "1")
    assert difference == "−0.056 ± 0.338"  # of 0.5, 0 and −2/3: mean −1/18, standard deviation 0.5853 / √3
    assert page.messages() == [] and page.requests() == []


def test_a_curve_and_bars_are_drawn_of_each_model_in_the_theme_s_colours(page: Tab) -> None:
    page.wait("return document.querySelector('#suites .plot').chart")
    model = page.run("return document.querySelector('#suites .plot').chart.data.map((one) => [...one])")
    assert model == [[1, 2], [0.5, 0.75], [0.5, 0.75]]
    texts = rows(page, "#suites article:first-child .bars")
    assert texts == [[label, "25 % (1)\n25 % (1)"] for label in ("0 %", "100 %")][:1] + texts[1:]
    assert [row[0] for row in texts] == ["0 %", "to 50 %", "100 %", "not judged"]
    colours = "return [...document.querySelectorAll('.model')].map((one) => getComputedStyle(one).borderLeftColor)"
    light = page.run(colours)
    assert len(set(light)) == 2
    with page.media(prefers_color_scheme="dark"):
        page.wait(f"return !(() => {{ {colours} }})().some((one) => arguments[0].includes(one))", light)


def test_questions_are_filtered_and_sorted_by_what_a_model_got(page: Tab) -> None:
    page.set("#which [name=set]", 1)  # of the second model, with the rate of the first beside
    page.click(".queries th:nth-child(1) button")
    cells = [cell.strip() for cell in rows(page, ".queries")[0]]  # the browser may count a model's mark as a space
    assert cells == ["a", "You are asked: what is a?", "100 %", "50 %", "1", "2"]
    for least, most, shown in (("", 0, ["b"]), (1, 99, ["c", "d"]), (100, "", ["a"])):
        page.set("#which [name=least]", least)
        page.set("#which [name=most]", most)
        assert page.run(QUESTIONS) == shown
    page.run("document.querySelector('#which').reset()")
    page.set("#which [name=text]", "C?")
    assert page.run(QUESTIONS) == ["c"]


def test_a_click_on_the_questions_lost_lists_them_and_one_on_a_question_shows_each_models_responses(page: Tab) -> None:
    page.click("#overview .differences tbody td:nth-child(7) button")
    assert page.run(QUESTIONS) == ["c"]
    page.click(".queries tbody button")
    page.wait("return document.querySelector('#samples .where').textContent.startsWith('query c:')")
    right, wrong = "✓ right", "✗ wrong"
    large, small = page.run(CARDS)
    assert small == [[right, "It is 0."], [right, "It is 1."]]
    assert large == [[wrong, "It is 0."], [right, "It is 1."], [wrong, "late"]]
    text = page.find("#samples").text
    assert "You are asked: what is c?" in text and "answer: 42" in text and "test: 3 of 4" in text
    page.set("#filter [name=truncated]", "yes")
    page.wait("return document.querySelectorAll('#samples article').length === 1")
    assert page.run(CARDS) == [[[wrong, "late"]], []]


def test_everything_of_an_evaluation_is_text(tab: Tab, tmp_path: Path) -> None:
    contest = {**RATING, "note": ALL, "contests": [{**ROUND, "name": ALL, "solved": {ALL: 2}}], "left_out": {ALL: ALL}}
    texts: dict[str, Any] = {**dict.fromkeys(("prompt", "completion", "failure", "finish_reason"), ALL)}
    texts |= {
        "columns": {ALL: ALL},
        "extra": {ALL: {ALL: ALL}, "__proto__": 1},
        "rewards": {ALL: 1.0, "__proto__": 0.0},
    }
    lines = [response(query, True, **texts) for query in (ALL, "__proto__", "constructor")]
    made = {ALL: suite(lines, settings={ALL: ALL}, rating=contest), "__proto__": suite(lines)}
    paths = [write_evaluation(tmp_path / name, name=ALL, **made) for name in ("a", "b<b>")]
    tab.open_file(write_evaluation_page(paths, tmp_path / "page.html"))
    tab.run("for (const one of document.querySelectorAll('details')) one.open = true")
    assert_harmless(tab)
    shown = (
        "#overview td",
        "#suites h3",
        "#suites td",
        "#queries td",
        "#samples .completion",
        "#samples .columns",
        "#recipe code",
    )
    for place in shown:
        assert "window.hacked=1" in tab.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent).join()", place
        ), place


def test_on_a_phone_nothing_overflows_and_fingers_find_what_they_want(tab: Tab, two: Path) -> None:
    phone: dict[str, Any] = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    undo = {"width": 0, "height": 0, "deviceScaleFactor": 0, "mobile": False}
    with tab.emulated("Emulation.setDeviceMetricsOverride", undo, **phone):
        tab.open_file(two)
        assert tab.run("return document.documentElement.scrollWidth") == 390
        small = tab.run(
            "return [...document.querySelectorAll('main :is(select, button, summary), body > nav a')]"
            ".filter((one) => one.offsetHeight && one.getBoundingClientRect().height < 40).map((one) => one.outerHTML)"
        )
        assert small == []
        columns = tab.run("return getComputedStyle(document.querySelector('#samples .sides')).gridTemplateColumns")
        assert len(columns.split()) == 1
