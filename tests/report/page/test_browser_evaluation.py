"""The page of evaluations in a real browser: tables, filters, responses; hostile texts; on a phone, in the dark."""

from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_evaluations import response, responses, suite, write_evaluation
from tests.report.page.test_browser_hostile import ALL, assert_harmless

from gspo.report.evaluation.write import write_evaluation_page

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
const sides = [...document.querySelectorAll("#responses .side")];
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


def test_a_curve_and_bars_are_drawn_of_each_model(page: Tab) -> None:
    points = page.run("return [...document.querySelectorAll('polyline')].map((one) => one.getAttribute('points'))")
    assert points == ["46,102 386,58", "46,102 386,58"]  # k = 1 and 2 at 0.5 and 0.75 of the height of 176
    texts = rows(page, "#suites article:first-child .bars")
    assert texts[0] == ["0 %", "25 % (1)\n25 % (1)"] and texts[-1][0] == "8–15"
    colours = "return [...document.querySelectorAll('.curve-of-rates circle')].map((one) => getComputedStyle(one).fill)"
    light = page.run(colours)
    assert light[0] == light[1] != light[2] == light[3]
    with page.media(prefers_color_scheme="dark"):
        page.wait(
            f"const now = (() => {{ {colours} }})(); return now.every((one, place) => one !== arguments[0][place])",
            light,
        )


def test_questions_are_filtered_by_what_a_model_got_and_sorted(page: Tab) -> None:
    assert page.run(QUESTIONS) == ["a", "b", "c", "d"]
    for model, solved, shown in (
        ("0", "none", ["b"]),
        ("1", "some", ["c", "d"]),
        ("1", "all", ["a"]),
        ("0", "unjudged", ["d"]),
    ):
        page.set("#asked [name=model]", model)
        page.set("#asked [name=solved]", solved)
        assert page.run(QUESTIONS) == shown
    page.set("#asked [name=solved]", "")
    page.set("#asked [name=text]", "C?")
    assert page.run(QUESTIONS) == ["c"]
    page.set("#asked [name=text]", "")
    page.click(".queries th:nth-child(4) button")  # the rate of the second model
    assert page.run(QUESTIONS) == ["b", "c", "d", "a"]
    page.click(".queries th:nth-child(4) button")
    assert page.run(QUESTIONS) == ["a", "d", "c", "b"]


def test_a_click_on_the_questions_lost_lists_them_and_one_on_a_question_shows_each_models_responses(page: Tab) -> None:
    page.click("#overview .differences tbody td:nth-child(7) button")
    assert page.run(QUESTIONS) == ["c"]
    page.click(".queries tbody button")
    page.wait("return document.querySelector('#responses .where').textContent === 'c'")
    right, wrong = "✓ right", "✗ wrong"
    small, large = page.run(CARDS)
    assert small == [[right, "It is 0."], [right, "It is 1."]]
    assert large == [[wrong, "It is 0."], [right, "It is 1."], [wrong, "late"]]
    text = page.find("#responses").text
    assert "You are asked: what is c?" in text and "answer: 42" in text
    assert page.run("return document.querySelector('#responses details pre').textContent") == "test: 3 of 4"
    page.set("#answers [name=verdict]", "cut")
    page.wait("return document.querySelectorAll('#responses article').length === 1")
    assert page.run(CARDS) == [[], [[wrong, "late"]]]


def test_the_next_question_is_the_next_of_the_list(page: Tab) -> None:
    where = "return document.querySelector('#responses .where').textContent === arguments[0]"
    page.wait(where, "a")
    assert not page.find("#answers [name=previous]").is_enabled()
    page.click("#answers [name=next]")
    page.wait(where, "b")
    page.click("#answers [name=previous]")
    page.wait(where, "a")
    page.set("#asked [name=text]", "b")  # the list no longer has the question that is shown
    assert [page.find(f"#answers [name={name}]").is_enabled() for name in ("previous", "next")] == [False, False]


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
        "#questions td",
        "#responses .completion",
        "#responses .columns",
        "#settings code",
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
        columns = tab.run("return getComputedStyle(document.querySelector('#responses .sides')).gridTemplateColumns")
        assert len(columns.split()) == 1
