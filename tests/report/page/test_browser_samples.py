"""Queries and samples in a real browser: what is shown of them, chosen, compared and read off; on a phone."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import By, Keys, Tab
from tests.report.page.made_runs import Line, begun, ended, metrics_line, recipe, sample, write_run

from gspo.errors import UserError
from gspo.report.page import write
from gspo.report.samples import SampleSet
from gspo.report.view import Server

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)></script>\x1b[2J\u202e\u2028"
CARDS = """
const text = (card, selector) => card.querySelector(selector)?.textContent ?? null;
return [...document.querySelectorAll("#samples article")].map((card) => ({
  verdict: text(card, ".verdict"), edge: getComputedStyle(card).borderLeftColor,
  notes: [...card.querySelectorAll(".note")].map((one) => one.textContent), text: text(card, ".completion"),
  facts: Object.fromEntries([...card.querySelectorAll(".facts div")].map((one) => [text(one, "dt"), text(one, "dd")])),
}))"""


def trained(query: str, word: str, reward: float | None, ratio: float, **changes: Any) -> Line:
    ratios = [ratio, 0.0000017, -ratio]
    numbers = {"token_log_ratios": ratios, "sequence_ratio": 1 + ratio, "advantage": (reward or 0) - 0.5}
    return sample(query, f"Say {query}.", words=[word, " it"], reward=reward, **{**numbers, **changes})


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two queries, and an evaluation before and after."""
    steps = {
        1: [
            *(trained("q:1", "right", 1.0, 0.0002 * place, mini_batch=place) for place in range(3)),
            trained("q:1", "wrong", 0.0, -0.6, clipped=1.0),
            trained("q:1", "long", 1.0, 0.02, clipped=0.25, finish_reason="length", tokens=900),
            trained("q:2", "<b>never</b>", 0.0, 0.0, clipped=None, sequence_ratio=None, mini_batch=None),
            trained("q:2", "<b>never</b>", 0.25, 0.0),
            trained("q:2", HOSTILE, None, 0.0, failure=f"reward function reasoning_gym: {HOSTILE}"),
        ],
        2: [trained("q:1", "late", 1.0, 0.3, columns={"answer": "yes"}), trained("q:3", "other", 1.0, 0.01)],
    }
    lines = [metrics_line(step) for step in (0, 1, 2)]
    history = [begun(), ended(step=2)]
    path = tmp_path_factory.mktemp("sampled") / "run"
    write_run(path, settings=recipe(), lines=lines, samples=steps, history=history)
    (path / "evaluation").mkdir()
    for step, reward in ((0, 0.0), (2, 1.0)):
        line = {"set": "held_out", **sample("held:1", "Held out?", words=[f"after {step}"], reward=reward)}
        (path / "evaluation" / f"step_{step:06d}.jsonl").write_text(json.dumps(line) + "\n")
    return path


@pytest.fixture
def page(tab: Tab, sampled: Path) -> Iterator[Tab]:
    """The page, loaded once for all tests; each begins with the group of step 1 and q:1."""
    tab.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    tab.show(sampled)
    choose(tab, set=0, scope="group", step=1, query="q:1", beside="", colour="ratio")
    yield tab
    tab.run("document.querySelectorAll('#filter, #which').forEach((one) => one.reset())")
    tab.click("#samples details summary") if tab.run("return document.querySelector('.filters').open") else None
    assert tab.messages() == [] and tab.requests() == []


def choose(tab: Tab, **fields: object) -> list[dict[str, Any]]:
    """Set fields of the form, one after another, and return the cards that are shown then."""
    for name, value in fields.items():
        tab.set(f"#samples [name={name}]", value)
    return cards(tab)


def cards(tab: Tab) -> list[dict[str, Any]]:
    """What is shown once the page has drawn it."""
    tab.wait("return !document.querySelector('#samples [aria-busy]')")
    return list(tab.run(CARDS))


def texts(tab: Tab, **fields: object) -> list[str]:
    return [card["text"].split(" ")[0] for card in choose(tab, **fields)]


def test_right_and_wrong_tell_apart_by_sign_word_and_edge_and_clipped_is_neither(page: Tab) -> None:
    right, wrong, long = cards(page)
    assert [card["verdict"] for card in (right, wrong, long)] == ["✓ right", "✗ wrong", "✓ right"]
    assert right["edge"] == long["edge"] != wrong["edge"]  # whether it was clipped or not
    assert wrong["notes"] == ["clipped: no gradient from it"]
    assert long["notes"] == ["clipped: no gradient from 25 % of its tokens"]
    assert (long["facts"]["ended"], long["facts"]["sampled after"]) == ("cut off at the limit", "2 updates")
    untrained, other, unscored = choose(page, query="q:2")  # one text with two rewards is two cards
    assert untrained["notes"] == ["not trained: advantage 0"] and other["facts"]["reward"] == "0.250"
    assert unscored["verdict"] == "✗ wrong"
    assert choose(page, set=1)[0]["notes"] == []  # an evaluation trains nothing


def test_equal_responses_are_one_card_with_their_count_and_the_numbers_of_all(page: Tab) -> None:
    first, *others = cards(page)
    assert len(others) == 2 and first["notes"] == ["× 3 equal responses"]
    assert first["facts"]["mini-batch"] == "0, 1, 2"
    assert first["facts"]["sequence ratio s"] == "1.00000, 1.00020, 1.00040"
    page.run("document.querySelector('.filters').open = true")
    page.click("#samples [name=folded]")
    assert [card["notes"] for card in cards(page)][:3] == [[], [], []] and len(cards(page)) == 5
    page.click("#samples [name=folded]")


def test_tokens_are_coloured_on_one_scale_and_keys_or_a_tap_show_their_numbers(page: Tab) -> None:
    levels = "return [...document.querySelectorAll('#samples article')].map((card) => "
    levels += "[...card.querySelectorAll('.token')].map((one) => one.className.replace('token', '').trim()))"
    assert page.run(levels) == [
        ["", "", ""],  # noise has no colour, whatever else is shown
        ["less level-4", "", "more level-4"],
        ["more level-2", "", "less level-2"],
    ]
    text = page.find_all("#samples .completion")[1]
    page.run("arguments[0].focus()", text)
    page.press(Keys.ARROW_RIGHT)
    numbers = page.find_all("#samples .token-numbers")[1]
    assert numbers.text == "token 1 of 3, “wrong”: log ratio −0.6, ratio 0.54881; advantage −0.5"
    page.press(Keys.END)
    assert numbers.text.startswith("token 3 of 3, “end of the text”: log ratio +0.6")
    page.run("arguments[0].scrollIntoView({block: 'center'})", text)
    text.find_elements(By.CSS_SELECTOR, ".token")[1].click()
    assert numbers.text.startswith("token 2 of 3, “ it”: log ratio +0.0000017, ratio 1.0000")
    assert page.find("#samples .legend").text.startswith("log ratio of a token: less likely than before the step −0.5")
    choose(page, colour="advantage")
    assert page.run(levels)[1] == ["less level-2"] * 3


FILTERED: list[tuple[dict[str, Any], list[str]]] = [
    ({"reward_low": 0.5}, ["right", "long", "late", "other"]),
    ({"reward_high": 0.5}, ["wrong", "<b>never</b>", "<b>never</b>"]),
    ({"answer": "wrong", "clipped": "yes"}, ["wrong"]),
    ({"clipped": "untrained"}, ["<b>never</b>"]),
    ({"truncated": "yes"}, ["long"]),
    ({"text": "LATE"}, ["late"]),
    ({"text": "say q:3"}, ["other"]),
]


def test_a_filter_leaves_what_it_says(page: Tab) -> None:
    choose(page, scope="run")
    for fields, expected in FILTERED:
        assert texts(page, **fields) == expected, fields
        assert page.find(".filters summary").text.endswith(")")
        page.run("document.querySelector('#samples [type=reset]').click()")
    assert len(cards(page)) == 8 and page.find("#samples .count").text == "10 of 10 samples"


def test_a_query_is_followed_through_its_steps(page: Tab) -> None:
    assert texts(page, scope="query") == ["right", "wrong", "long", "late"]
    page.run("document.querySelector('#samples .curve').scrollIntoView()")
    page.wait("return document.querySelector('#samples .curve').chart")
    chart = page.run("return document.querySelector('#samples .curve').chart.data.map((one) => [...one])")
    assert chart == [[1, 2], [0.8, 1], [0.8, 1]]
    choose(page, scope="group")
    assert texts(page, step=2) == ["late"] and page.find("#samples .columns").text == "answer: yes"
    assert texts(page, step=1) == ["right", "wrong", "long"]


def test_two_steps_or_sets_are_shown_side_by_side(page: Tab) -> None:
    choose(page, set=1, step=0, beside=1, beside_step=2)
    sides = [side.text for side in page.find_all("#samples .side")]
    assert len(sides) == 2 and [card["verdict"] for card in cards(page)] == ["✗ wrong", "✓ right"]
    assert "step 0, query held:1: 0 of 1 right" in sides[0] and "step 2, query held:1: 1 of 1 right" in sides[1]
    choose(page, set=0, step=1, query="q:1", beside=1)
    assert "no such sample of this query" in page.find_all("#samples .side")[1].text


def test_the_table_of_queries_is_sorted_filtered_and_leads_to_the_samples(page: Tab) -> None:
    def ids() -> list[str]:
        return [row.text for row in page.find_all(".queries td:first-child")]

    assert ids() == ["q:2", "q:1", "q:3"]  # the least right first
    row = [cell.text for cell in page.find_all(".queries tbody tr:nth-child(2) td")]
    assert row == ["q:1", "Say q:1.", "83 %", "0.833", "6", "2", "2"]
    page.click(".queries th:nth-child(5) button")
    page.click(".queries th:nth-child(5) button")
    assert ids() == ["q:1", "q:2", "q:3"]
    assert page.find(".queries th:nth-child(5)").get_attribute("aria-sort") == "descending"
    filtered: list[tuple[dict[str, Any], list[str]]] = [
        ({"most": 0}, ["q:2"]),
        ({"least": 50, "most": 90}, ["q:1"]),
        ({"text": "Q:3"}, ["q:3"]),
    ]
    for fields, expected in filtered:
        page.run("document.querySelector('#queries form').reset()")
        for name, value in fields.items():
            page.set(f"#queries [name={name}]", value)
        assert ids() == expected
    page.click(".queries td button")
    assert texts(page) == ["other"] and page.find("#samples [name=query]").get_property("value") == "q:3"
    shares = page.run("return document.querySelector('#queries figure').chart.model.series.map((one) => one.label)")
    assert shares == ["reward 0", "reward 0.25", "reward 1", "reward none"]


def test_what_others_wrote_is_text_and_its_hidden_letters_are_seen(page: Tab) -> None:
    choose(page, query="q:2")
    shown = page.find("#samples article:last-child .completion").text
    assert shown.startswith("<img src=x onerror=alert(1)></script>␛[2J\\u202e\\u2028")
    assert page.find_all("#samples article :is(img, b)") == []


def test_where_no_token_is_coloured_a_line_says_why(page: Tab) -> None:
    def reasons() -> list[str]:
        return [one.text for one in page.find_all("#samples article .about")]

    assert reasons() == ["No token is coloured: no log ratio reaches ±0.001."]
    choose(page, query="q:2")
    assert len(reasons()) == 3
    choose(page, colour="")
    assert reasons() == []


def refused(*_: object) -> None:
    raise UserError("no longer there")


def test_a_served_page_takes_in_new_steps_without_being_loaded_again(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", settings=recipe(), lines=[])
    quick = "const later = setTimeout; setTimeout = (action, wait) => later(action, Math.min(wait, 10));"
    hasty = tab.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": quick})
    with served(run) as server:
        tab.driver.get(server.url)
        tab.wait_until_ready()
        assert "There are no samples yet" in tab.find("#samples").text
        tab.run("window.same = true")
        add_step(run, 1, [trained("q:1", "first", 1.0, 0.1)])
        tab.wait("return document.querySelector('#samples .completion')?.textContent.startsWith('first')")
        tab.wait("return document.querySelector('.queries td')?.textContent === 'q:1'")
        add_step(run, 2, [trained("q:1", "second", 0.0, 0.1)])
        tab.wait("return document.querySelectorAll('#samples [name=step] option').length === 2")
        assert texts(tab) == ["first"]  # the reader is not led away
        add_step(run, 0, [trained("q:0", "other", 1.0, 0.1)])  # a query that comes before those that are there
        tab.wait("return document.querySelectorAll('#samples [name=step] option').length === 3")
        assert tab.run("return document.querySelector('#samples [name=query]').value") == "q:1"
        assert texts(tab, colour="ratio") == ["first"]
        assert tab.run("return document.querySelectorAll('.queries td:first-child').length") == 2
        choose(tab, step=2)
        tab.wait("return document.querySelector('#samples .completion').textContent.startsWith('second')")
        monkeypatch.setattr(SampleSet, "group", refused)  # the file is removed between two looks at it
        tab.set("#samples [name=step]", 1)
        tab.wait("return document.querySelector('#samples .failure')")
        assert tab.find("#samples .failure").text == "These samples could not be read: no longer there"
        assert tab.run("return window.same")
    tab.wait("return document.querySelector('#written').textContent.endsWith('the server has ended.')")
    tab.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", hasty)
    monkeypatch.undo()
    tab.open(run)


@contextmanager
def served(run: Path) -> Iterator[Any]:
    server = Server([run], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def add_step(run: Path, step: int, samples: list[Line]) -> None:
    (run / "rollouts").mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in samples)
    (run / "rollouts" / f"step_{step:06d}.jsonl").write_text(text, encoding="utf-8")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_line(step)) + "\n")


def test_on_a_phone_a_response_is_on_the_first_screen_and_fingers_hit_what_they_aim_at(page: Tab) -> None:
    settings = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", settings)
    try:
        page.settle()
        top = "document.querySelector(arguments[0]).getBoundingClientRect().top"
        assert page.run(f"return {top}", "#samples article") - page.run(f"return {top}", "#samples") < 844
        assert page.run("return document.documentElement.scrollWidth") == 390
        assert page.find("#samples .count").text == "5 of 5 samples"
        places = "return ['step', 'query'].map((name) => document.querySelector(`#samples [name=${name}]`)"
        assert len(set(page.run(f"{places}.getBoundingClientRect().top)"))) == 1  # in one row
        over = page.run(
            "const wide = document.querySelector('.queries .wide'); return wide.scrollWidth - wide.clientWidth"
        )
        assert over == 0
        small = """const targets = ":is(#queries, #samples) :is(button, select, summary, input:not([type=checkbox]))";
            return [...document.querySelectorAll(targets)].filter((one) => one.offsetParent)
            .filter((one) => one.getBoundingClientRect().height < 40).map((one) => one.outerHTML)"""
        assert page.run(small) == []
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_samples_of_each_evaluated_set_are_chosen_by_it(tab: Tab, tmp_path: Path) -> None:
    line = {"step": 0, "evaluation/sums/pass_at_1": 0.5, "evaluation/codes/pass_at_1": 0.5}
    path = write_run(tmp_path / "run", lines=[line], samples={1: [sample("q:1")]})
    (path / "evaluation").mkdir()
    lines = [{"set": name, **sample(f"{name}:1", words=[f"of {name}"])} for name in ("sums", "codes")]
    (path / "evaluation" / "step_000000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tab.open(path)
    titles = tab.run("return [...document.querySelectorAll('#choice [name=set] option')].map((one) => one.text)")
    assert titles == ["made · training", "made · evaluation on sums", "made · evaluation on codes"]
    for place, name in ((1, "sums"), (2, "codes")):
        assert [one["text"] for one in choose(tab, set=place)] == [f"of {name}"]
        tab.set("#which [name=set]", place)
        assert tab.find(".queries tbody button").text == f"{name}:1"


def test_of_samples_that_the_page_does_not_have_it_says_how_many(
    tab: Tab, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "MAX_BYTES", 3_000)  # for the sets of training and of the evaluation: step 2 alone
    tab.open(sampled)
    assert choose(tab, step=1, query="q:1", beside="") == []
    assert tab.find("#samples .count").text == "0 of 0 samples; 5 are not in this page"
    assert texts(tab, step=2) == ["late"] and "gspo view" in tab.find("#samples .coverage").text
    assert tab.messages() == []


def turns_told(tab: Tab, tmp_path: Path, line: Any, shown: str) -> Any:
    """What the page has of each turn of a run's only sample."""
    write_run(tmp_path / "run", settings=recipe(), lines=[metrics_line(1)], samples={1: [line]}, history=[begun()])
    tab.show(tmp_path / "run")
    choose(tab, set=0, scope="step", step=1)
    return tab.run(f"return [...document.querySelectorAll('.turn')].map((turn) => [{shown}])")


def test_a_conversation_is_told_turn_by_turn_and_what_is_long_in_it_is_folded(tab: Tab, tmp_path: Path) -> None:
    words = ["call", "x" * 500, "so"]
    turns = [["assistant", "call", 1, -0.5], ["tool", words[1], 1], ["assistant", "so", 2]]
    ratios, advantages = [0.5, None, -0.25, 0.0], [2.0, None, -1.0, -1.0]
    line = sample("q:1", words=words, turns=turns, token_log_ratios=ratios, token_advantages=advantages)
    told = turns_told(
        tab,
        tmp_path,
        line,
        "turn.querySelector('summary').textContent, turn.open, turn.querySelector('pre').textContent",
    )
    assert told == [
        ["policy · 1 token · reward −0.5 · advantage +2 · mean log ratio +0.5", True, "call"],
        ["tool · 1 token", False, words[1]],
        ["policy · 2 tokens · advantage −1 · mean log ratio −0.125", True, "so"],
    ]
    text = tab.find("#samples .completion")
    tab.run("arguments[0].focus()", text)
    tab.press(Keys.END)
    numbers = tab.find("#samples .token-numbers")
    assert numbers.text == "token 4 of 4, “end of the text”: log ratio +0, ratio 1.0000; advantage −1"
    assert tab.messages() == []


def test_contexts_of_a_response_are_counted_and_set_apart(tab: Tab, tmp_path: Path) -> None:
    turns = [["user", "a", 1], ["assistant", "b", 1], ["user", "c", 1], ["assistant", "", 1]]
    line = sample("q:1", words=["a", "b", "c"], turns=turns, starts=[0, 2])
    shown = "turn.querySelector('summary').textContent.split(' · ')[0], turn.classList.contains('branch')"
    told = turns_told(tab, tmp_path, line, shown)
    assert told == [["context 1 of 2", False], ["policy", False], ["context 2 of 2", True], ["policy", False]]
    assert tab.messages() == []


def test_turns_whose_tokens_are_not_known_are_told_by_their_texts(tab: Tab, tmp_path: Path) -> None:
    turns = [["assistant", "a\nb", 3, 1.0], ["user", "c", 1]]
    line = sample("q:1", words=["a\nb", "c"], turns=turns, token_characters=None)
    write_run(tmp_path / "run", settings=recipe(), lines=[metrics_line(1)], samples={1: [line]}, history=[begun()])
    tab.show(tmp_path / "run")
    choose(tab, set=0, scope="step", step=1)
    told = tab.run(
        "return [...document.querySelectorAll('.turn')].map((turn) => [...turn.children].map((one) => one.innerText))"
    )
    assert told == [["policy · 3 tokens · reward +1", "a\nb"], ["user · 1 token", "c"]]
