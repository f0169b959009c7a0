"""Each token's colour and number, and the copy of a sample."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import metrics_line, sample, write_run
from tests.report.page.shown_samples import choose, samples_of, start_again

# The second character of the family, and the two tokens that have none, are what an emoji cut into bytes leaves.
WORDS = ("👩", "", "\u200d👩\u200d👧", "日本", " \n", "\ufffd", "e\u0301", "", "<b>", "𝔘")
RATIOS = [0.01, -0.0004, 0.0, -0.04, 0.0123456, 0.001, -0.002, 0.003, -0.025, 0.03, 0.00001234]
OWN = [0.5, -0.25, 0.0, 1.5, -2.0, 0.125, 0.75, -0.75, 1.0, -1.0, 0.1]
NULLS: dict[str, Any] = {
    "token_log_ratios": [None, 0.001, None],
    "sequence_ratio": 1.0,
    "clipped": 0.0,
    "mini_batch": 0,
}
SAMPLES = [
    sample("q:1", words=WORDS, token_log_ratios=RATIOS, advantage=-0.5, reward=1.0),
    sample("q:1", words=WORDS, token_log_ratios=[-one / 2 for one in RATIOS], token_advantages=OWN, clipped=0.25),
    sample("q:1", words=("never ", "trained")),
    sample("q:1", words=("gap ", "here"), **NULLS),
    sample("q:1", words=("no ", "lengths"), token_log_ratios=[0.02, 0.01, 0.0], token_characters=None),
]
READ_TOKENS = """
return [...document.querySelectorAll("#cards .completion")].map((text) => [...text.childNodes].map((node) => ({
  text: node.textContent, name: node.className ?? null, title: node.title ?? null,
  heat: node.style ? Number(node.style.getPropertyValue("--heat")) : null,
  colour: node.style ? getComputedStyle(node).backgroundColor : null,
})))"""

Tokens = list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def coloured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("coloured")
    return write_run(directory / "run", lines=[metrics_line(1)], samples={1: SAMPLES})


@pytest.fixture
def shown(tab: Tab, coloured: Path) -> Tab:
    tab.show(coloured)
    start_again(tab)
    return tab


def _kept(number: float) -> float:
    """As a page has it: to three significant digits, which tell apart what is small, too."""
    return float(f"{number:.3g}")


def _tokens(tab: Tab) -> Tokens:
    return list(tab.run(READ_TOKENS))


def test_the_tokens_texts_join_to_the_completion_exactly(shown: Tab) -> None:
    found = _tokens(shown)
    assert ["".join(token["text"] for token in one) for one in found] == [one["completion"] for one in SAMPLES]
    assert [token["text"] for token in found[0]] == [*WORDS, ""]


def test_by_log_ratio(shown: Tab) -> None:
    first, second, *_ = _tokens(shown)
    for tokens, ratios in ((first, RATIOS), (second, [-one / 2 for one in RATIOS])):
        assert [token["name"] for token in tokens] == ["less" if ratio < 0 else "more" for ratio in ratios]
        heats = [math.sqrt(abs(_kept(ratio)) / 0.04) for ratio in ratios]  # the strongest of all that are shown is 1
        assert [token["heat"] for token in tokens] == pytest.approx(heats, abs=0.001)
    assert first[3]["heat"] == 1
    assert first[3]["title"] == "log ratio −0.0400, ratio 0.9608; advantage −0.500"
    assert first[4]["title"] == "log ratio +0.0123, ratio 1.0124; advantage −0.500"
    assert first[10]["title"] == "log ratio +0.0000123, ratio 1.0000; advantage −0.500"
    assert second[3]["title"] == "log ratio +0.0200, ratio 1.0202; advantage +1.50"
    assert "−0.0400 less likely than before" in shown.find("#legend").text
    assert "more likely +0.0400" in shown.find("#legend").text


def test_the_colours_are_seen(shown: Tab) -> None:
    first, *_ = _tokens(shown)
    assert first[3]["colour"] == "rgba(0, 114, 178, 0.6)"
    red, green, blue, opacity = (float(one) for one in first[9]["colour"][5:-1].split(","))
    assert (red, green, blue) == (213, 94, 0)
    assert opacity == pytest.approx(0.6 * math.sqrt(0.03 / 0.04), abs=0.005)
    assert first[2]["colour"] == "rgba(213, 94, 0, 0)"


def test_what_was_not_trained_or_has_no_number_is_plain_text(shown: Tab) -> None:
    _, _, untrained, gap, whole = _tokens(shown)
    assert all(token["name"] is None for token in [*untrained, *whole])
    assert [token["name"] for token in gap] == [None, "more", None]


def test_by_advantage(shown: Tab) -> None:
    choose(shown, colour="advantage")
    first, second, untrained, *_ = _tokens(shown)
    assert {(token["name"], token["heat"]) for token in first} == {("less", 0.5)}  # all −0.5, of at most 2
    assert [token["name"] for token in second] == ["less" if one < 0 else "more" for one in OWN]
    assert [token["heat"] for token in second] == pytest.approx([math.sqrt(abs(one) / 2) for one in OWN], abs=0.001)
    assert second[4]["title"] == "log ratio −0.00617, ratio 0.9938; advantage −2.00"
    assert untrained[0]["title"] == "not trained; advantage +0.00"
    assert "−2.00 worse than its group" in shown.find("#legend").text


def test_by_nothing(shown: Tab) -> None:
    choose(shown, colour="")
    assert all(token["name"] is None for tokens in _tokens(shown) for token in tokens)
    assert shown.find("#legend").text == ""


def test_the_scale_is_that_of_what_is_shown(shown: Tab) -> None:
    choose(shown, text="gap here")
    (gap,) = _tokens(shown)
    assert gap[1]["heat"] == 1
    assert "+0.00100" in shown.find("#legend").text
    choose(shown, text="never trained")
    assert shown.find("#legend").text.startswith("All log ratios shown are 0")


def test_the_noise_of_rounding_is_pale_and_the_legend_says_why(tab: Tab, tmp_path: Path) -> None:
    noise, real = sample("q:1", token_log_ratios=[1.7e-6, -1e-6, 0.0]), sample("q:2", token_log_ratios=[0.01, 0.0, 0.0])
    lines = [{**metrics_line(1), "clip/low": 0.0003, "clip/high": 0.0004}]
    tab.open(write_run(tmp_path / "run", lines=lines, samples={1: [noise, real]}))
    choose(tab, query="q:1")
    assert _tokens(tab)[0][0]["heat"] == pytest.approx(math.sqrt(1.7e-6 / 3e-4), abs=0.001)  # of an opacity of 0.6
    legend = tab.find("#legend").text
    assert (
        "more likely +0.000300" in legend and "clip range, for the largest shown is no more than 0.00000170" in legend
    )
    choose(tab, query="q:2")
    assert _tokens(tab)[0][0]["heat"] == 1 and "the scale's end is the largest shown" in tab.find("#legend").text


def test_a_copy_has_the_datas_columns(tab: Tab, tmp_path: Path) -> None:
    line = sample(columns={"answer": 42, "__proto__": "5"}, token_log_ratios=[0.001, 0.00001234, -0.5])
    path = write_run(tmp_path / "run", lines=[metrics_line(1)], samples={1: [line, sample("q:2", columns={})]})
    tab.open(path)
    tab.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    _copy_and_compare(tab, 0, line)
    choose(tab, query="q:2")
    _copy_and_compare(tab, 0, list(samples_of(path))[1][1])


@pytest.mark.parametrize("place", [0, 2, 3])
def test_a_copy_is_the_sample(place: int, shown: Tab, coloured: Path) -> None:
    shown.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    _, line = list(samples_of(coloured))[place]
    _copy_and_compare(shown, place, line)


def test_a_copy_without_a_clipboard_is_the_same(shown: Tab, coloured: Path) -> None:
    shown.run("navigator.clipboard.writeText = async () => { throw new Error('not here'); }")
    shown.run("addEventListener('copy', () => { window.copied = document.activeElement.value; }, {once: true})")
    _copy_and_compare(shown, 1, list(samples_of(coloured))[1][1])
    assert shown.find_all("body > textarea") == []
    assert shown.run("return document.activeElement.textContent").startswith("cop")  # where the keyboard was


def _copy_and_compare(tab: Tab, place: int, line: dict[str, Any]) -> None:
    tab.run("window.copied = null")
    button = tab.find_all("#cards .copy")[place]
    tab.run("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    ratios = line["token_log_ratios"]
    rounded = ratios and [None if one is None else _kept(one) for one in ratios]
    assert json.loads(tab.wait("return window.copied")) == {"step": 1, **line, "token_log_ratios": rounded}
    tab.wait("return arguments[0].textContent === 'copied'", button)
    tab.wait("return arguments[0].textContent === 'copy as JSON'", button)


def test_a_sample_is_told_apart_from_the_recipe(shown: Tab, coloured: Path) -> None:
    shown.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }; window.copied = null")
    shown.run("for (const one of document.querySelectorAll('#recipe details')) one.open = true")
    shown.click("#recipe article details:last-child .copy")
    assert shown.wait("return window.copied") == (coloured / "recipe.yaml").read_text(encoding="utf-8")
    shown.run("window.copied = null")
    shown.click("#recipe article > .copied .copy")
    assert shown.wait("return window.copied").startswith("cd 'a place/with spaces' && gspo train")
