"""Samples: what is chosen is what is shown; a filter lets through exactly what it says; a query can be followed."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from tests.report.page import shown_samples
from tests.report.page.browser import Tab
from tests.report.page.made_runs import made_run, metrics_line, sample, write_run
from tests.report.page.shown_samples import cards, choose, click_through, options, samples_of, texts, value

Sample = dict[str, Any]
Test = Callable[[Sample], bool]

FILTERS: dict[str, tuple[dict[str, object], Test]] = {
    "reward from": ({"reward_low": 0.25}, lambda one: one["reward"] is not None and one["reward"] >= 0.25),
    "reward to": ({"reward_high": 0.25}, lambda one: one["reward"] is not None and one["reward"] <= 0.25),
    "scored": ({"scored": "yes"}, lambda one: one["reward"] is not None),
    "not scored": ({"scored": "no"}, lambda one: one["reward"] is None),
    "clipped": ({"clipped": "yes"}, lambda one: one["clipped"] is not None and one["clipped"] > 0),
    "not clipped": ({"clipped": "no"}, lambda one: one["clipped"] == 0),
    "untrained": ({"clipped": "untrained"}, lambda one: one["clipped"] is None),
    "cut off": ({"truncated": "yes"}, lambda one: one["finish_reason"] == "length"),
    "not cut off": ({"truncated": "no"}, lambda one: one["finish_reason"] != "length"),
    "tokens from": ({"tokens_low": 9}, lambda one: one["tokens"] >= 9),
    "tokens to": ({"tokens_high": 9}, lambda one: one["tokens"] <= 9),
    "in the prompt": ({"text": "SUM:2, please"}, lambda one: "sum:2, please" in one["prompt"].lower()),
    "in the response": ({"text": "5-2"}, lambda one: "5-2" in one["completion"]),
    "anywhere": ({"text": "3"}, lambda one: "3" in one["prompt"] + one["completion"]),
    "no such text": ({"text": "<nothing has this>"}, lambda one: False),
}


@pytest.fixture
def shown(tab: Tab, run: Path) -> Tab:
    tab.show(run)
    shown_samples.start_again(tab)
    return tab


@pytest.fixture(scope="module")
def samples(run: Path) -> list[tuple[int, Sample]]:
    return list(samples_of(run))


def _facts(sample: Sample) -> dict[str, str]:
    """As a card has them."""
    advantage, clipped = sample["advantage"], sample["clipped"]
    told = {None: "–", 0.0: "no", 1.0: "yes"}
    return {
        "reward": "none" if sample["reward"] is None else f"{sample['reward']:#.3g}",
        "advantage": "–" if sample["reward"] is None else f"{'−' if advantage < 0 else '+'}{abs(advantage):#.3g}",
        "s": "not trained" if sample["sequence_ratio"] is None else f"{sample['sequence_ratio']:.5f}",
        "clipped": told[clipped] if clipped in told else f"{round(100 * clipped)} % of tokens",
        "tokens": str(sample["tokens"]),
        "finish": "cut off" if sample["finish_reason"] == "length" else "stop",
        "mini-batch": "–" if sample["mini_batch"] is None else str(sample["mini_batch"]),
        "policy": str(sample["policy_version"]),
    }


def _texts(
    samples: list[tuple[int, Sample]], *tests: Test, step: int | None = None, query: str | None = None
) -> list[str]:
    """Those that pass, in the order in which they were sampled."""
    return [
        one["completion"]
        for number, one in samples
        if step in (None, number) and query in (None, one["query"]) and all(test(one) for test in tests)
    ]


def test_a_step_and_a_query_show_exactly_their_group(shown: Tab, samples: list[tuple[int, Sample]]) -> None:
    for step, query in ((1, "sum:1"), (4, "sum:2"), (4, "even:3"), (6, "sum:2")):
        choose(shown, step=step, query=query)
        group = [one for number, one in samples if (number, one["query"]) == (step, query)]
        found = cards(shown)
        assert [card["text"] for card in found] == [one["completion"] for one in group]
        assert [card["facts"] for card in found] == [_facts(one) for one in group]
        assert [card["failure"] for card in found] == [one["failure"] for one in group]
        assert [card["clipped"] for card in found] == [bool(one["clipped"]) for one in group]
        assert shown.find("#cards .group .prompt").text == group[0]["prompt"]
        rewards = [one["reward"] for one in group if one["reward"] is not None]
        mean = f"{sum(rewards) / len(rewards):.2f}"
        assert shown.find("#cards .group h3").text == f"step {step}, query {query}: reward {mean}"
        assert shown.find("#found").text == "4 of 4 samples"


def test_the_selects_have_every_step_and_the_steps_queries(shown: Tab) -> None:
    assert options(shown, "step") == ["1", "2", "3", "4", "5", "6"]
    choose(shown, step=3)
    assert options(shown, "query") == ["sum:1", "sum:2"]
    choose(shown, step=4)
    assert options(shown, "query") == ["sum:1", "sum:2", "even:3"]
    assert "sum:1 (reward 0.33)" in shown.find("#samples-form [name=query]").text


def test_the_page_begins_with_the_last_step_and_what_has_moved_most(tab: Tab, run: Path) -> None:
    tab.open(run)
    assert (value(tab, "step"), value(tab, "query"), value(tab, "scope")) == ("6", "sum:1", "group")
    assert "All samples of all 6 steps" in tab.find("#samples").text


def test_one_step_back_and_forward(shown: Tab) -> None:
    choose(shown, step=4, query="sum:2")
    click_through(shown, "[name=after]")
    assert (value(shown, "step"), value(shown, "query")) == ("5", "sum:2")
    assert [text[-9:] for text in texts(shown)] == [f"sum:2-5-{place}" for place in range(4)]
    for step in (4, 3, 2, 1):
        click_through(shown, "[name=before]")
        assert value(shown, "step") == str(step)
    shown.click("[name=before]")  # there is none before
    assert value(shown, "step") == "1"
    assert [text[-9:] for text in texts(shown)] == [f"sum:2-1-{place}" for place in range(4)]


@pytest.mark.parametrize("scope", ["group", "query", "step", "run"])
def test_each_filter_lets_through_exactly_what_it_says(
    scope: str, shown: Tab, samples: list[tuple[int, Sample]]
) -> None:
    choose(shown, step=4, query="sum:2", scope=scope)
    place = {
        "step": 4 if scope in ("group", "step") else None,
        "query": "sum:2" if scope in ("group", "query") else None,
    }
    whole = _texts(samples, **place)  # type: ignore[arg-type]
    assert texts(shown) == whole
    for name, (fields, test) in FILTERS.items():
        choose(shown, **fields)
        expected = _texts(samples, test, **place)  # type: ignore[arg-type]
        assert texts(shown) == expected, name
        assert shown.find("#found").text == f"{len(expected)} of {len(whole)} samples"
        choose(shown, **dict.fromkeys(fields, ""))
    assert texts(shown) == whole


def test_filters_add_up(shown: Tab, samples: list[tuple[int, Sample]]) -> None:
    choose(shown, scope="run")
    known = [FILTERS[name] for name in ("reward from", "clipped", "not cut off", "tokens from", "in the prompt")]
    for (first, is_first), (second, is_second) in itertools.combinations(known, 2):
        choose(shown, **first, **second)
        assert texts(shown) == _texts(samples, is_first, is_second)
        click_through(shown, "#samples-form [type=reset]")
    fields = {name: value for chosen, _ in known for name, value in chosen.items()}
    choose(shown, **fields)
    expected = _texts(samples, *(test for _, test in known))
    assert texts(shown) == expected != []
    click_through(shown, "#samples-form [type=reset]")
    assert value(shown, "scope") == "run"  # which is no filter
    assert texts(shown) == _texts(samples)


def test_the_filters_hear_the_keyboard(shown: Tab, samples: list[tuple[int, Sample]]) -> None:
    choose(shown, scope="run")
    shown.click("#samples-form [name=text]")
    shown.press("answer-SUM:2-5")
    expected = _texts(samples, lambda one: "Answer-sum:2-5" in one["completion"])
    shown.wait("return document.getElementById('found').textContent === arguments[0]", f"4 of {len(samples)} samples")
    assert texts(shown) == expected
    shown.press(Keys.ENTER)  # sends no form: the page stays
    assert value(shown, "text") == "answer-SUM:2-5"


def test_sorting(shown: Tab, samples: list[tuple[int, Sample]]) -> None:
    choose(shown, step=4, scope="step", order="tokens")
    here = [one for step, one in samples if step == 4]
    assert [int(card["facts"]["tokens"]) for card in cards(shown)] == sorted(
        (one["tokens"] for one in here), reverse=True
    )
    choose(shown, order="reward")
    rewards = [card["facts"]["reward"] for card in cards(shown)]
    assert rewards == ["0.750"] * 2 + ["0.500"] * 4 + ["0.250"] * 2 + ["0.00"] * 2 + ["none"] * 2
    choose(shown, order="lowest")
    assert [card["facts"]["reward"] for card in cards(shown)] == [*reversed(rewards[:-2]), "none", "none"]
    choose(shown, order="ratio")
    moved = [card["facts"]["s"] for card in cards(shown)]
    sizes = [abs(float(s) - 1) for s in moved if s != "not trained"]
    assert moved[8:] == ["not trained"] * 4
    assert len(sizes) == 8 and sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    found = cards(shown)[0]  # a card that stands alone says where it is from
    assert found["where"].startswith("step 4, query sum:") and found["prompt"].startswith("Add sum:")


def test_a_query_is_followed_through_the_steps(shown: Tab, samples: list[tuple[int, Sample]]) -> None:
    choose(shown, step=4, query="even:3")
    buttons = shown.find_all("#elsewhere button")
    assert [button.text for button in buttons] == ["2", "4", "6"]
    assert [button.get_dom_attribute("aria-current") for button in buttons] == [None, "step", None]
    click_through(shown, "#elsewhere button:last-child")
    assert (value(shown, "step"), value(shown, "query")) == ("6", "even:3")
    assert texts(shown) == _texts(samples, step=6, query="even:3")
    choose(shown, scope="query")
    assert [one.text for one in shown.find_all("#cards h3")] == [
        f"step {s}, query even:3: reward 0.50" for s in (2, 4, 6)
    ]
    assert not shown.find(".step-choice").is_displayed()
    assert shown.find_all("#elsewhere button") == []


@pytest.fixture
def long_run(tab: Tab, tmp_path: Path) -> Tab:
    """One query in 40 steps, 2 to 80; another in the first and the last of them."""
    samples = {step: [sample("q:1", words=(f"in {step}",))] for step in range(2, 82, 2)}
    for step in (2, 80):
        samples[step].append(sample("q:2", words=("other",)))
    tab.open(write_run(tmp_path / "run", lines=[metrics_line(1)], samples=samples))
    return tab


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (40, [2, *range(26, 56, 2), 80]),
        (2, [*range(2, 18, 2), 80]),
        (80, [2, *range(66, 82, 2)]),
        (18, [*range(2, 34, 2), 80]),
    ],
)
def test_of_many_steps_of_a_query_the_nearest_are_named(step: int, named: list[int], long_run: Tab) -> None:
    choose(long_run, step=step, query="q:1")
    assert long_run.find("#elsewhere").text.startswith("This query in steps (the nearest of 40): ")
    buttons = long_run.find_all("#elsewhere button")
    assert [button.text for button in buttons] == [str(one) for one in named]
    marked = [button.text for button in buttons if button.get_dom_attribute("aria-current") == "step"]
    assert marked == [str(step)]
    click_through(long_run, f"#elsewhere button:nth-child({len(named) - 1})")
    assert (value(long_run, "step"), texts(long_run)) == (str(named[-2]), [f"in {named[-2]}"])


def test_of_few_steps_of_a_query_all_are_named(long_run: Tab) -> None:
    choose(long_run, step=80, query="q:2")
    assert "nearest" not in long_run.find("#elsewhere").text
    assert [button.text for button in long_run.find_all("#elsewhere button")] == ["2", "80"]


def test_the_rewards_of_several_functions_and_the_datas_columns_are_shown(tab: Tab, tmp_path: Path) -> None:
    beside: dict[str, Any] = {"columns": {"answer": 42, "source": "a <b>", "none": None}}
    samples = [
        sample(words=("first",), reward=1.08, rewards={"starts_with": 1.0, "short": 0.83}, **beside),
        sample(words=("second",), reward=None, rewards={"starts_with": None, "short": 0.5}, advantage=0.0, **beside),
        sample("q:2", words=("third",), reward=2.0, rewards={"short": 1.0}, columns={}),
    ]
    tab.open(write_run(tmp_path / "run", lines=[metrics_line(1)], samples={1: samples}))
    choose(tab, query="sum:1")
    told = ["1.08 (starts_with 1.00, short 0.830)", "none (starts_with none, short 0.500)"]
    assert [card["facts"]["reward"] for card in cards(tab)] == told
    assert [card["facts"]["advantage"] for card in cards(tab)] == ["+0.00", "–"]
    assert [card["columns"] for card in cards(tab)] == [None, None]  # their head has them, once
    columns = "answer: 42; source: a <b>; none: null"
    assert tab.run("return document.querySelector('#cards .group .prompt + .columns').textContent") == columns
    choose(tab, order="lowest", scope="run")
    assert texts(tab) == ["first", "third", "second"]
    assert [card["columns"] for card in cards(tab)] == [columns, None, columns]
    assert [card["facts"]["reward"] for card in cards(tab)] == [told[0], "2.00", told[1]]


def test_samples_that_lack_what_others_have_are_shown(tab: Tab, tmp_path: Path) -> None:
    bare = [{"query": "q:1", "prompt": "1 + 1 =", "completion": f"bare {place}"} for place in range(2)]
    whole = sample("q:1", "1 + 1 =", words=("whole",), token_log_ratios=[0.01, 0.02])
    tab.open(write_run(tmp_path / "run", lines=[metrics_line(1)], samples={1: [*bare, whole]}))
    assert tab.run("return document.querySelector('p.broken')?.textContent") is None
    assert texts(tab) == ["bare 0", "bare 1", "whole"]
    for card in cards(tab)[:2]:
        facts = {name: card["facts"][name] for name in ("reward", "advantage", "s", "clipped", "mini-batch", "policy")}
        assert facts == {
            "reward": "none", "advantage": "–", "s": "not trained", "clipped": "–", "mini-batch": "–", "policy": "–"
        }  # fmt: skip
        assert card["facts"]["finish"] == "unknown" and card["failure"] is None
        assert not {"null", "undefined", "NaN"} & set(card["facts"].values())
    assert tab.find("#cards h3").text == "step 1, query q:1: reward 0.50"
    for order in ("reward", "lowest", "ratio"):
        choose(tab, order=order)
        assert texts(tab)[0] == "whole"  # what has no number comes last
    for fields, shown in (({"scored": "no"}, 2), ({"clipped": "untrained"}, 2), ({"truncated": "no"}, 3)):
        choose(tab, **fields)
        assert len(texts(tab)) == shown
        choose(tab, **dict.fromkeys(fields, ""))
    assert tab.messages() == []


def test_steps_that_are_unpacked_in_another_order_than_chosen_do_not_mix(tab: Tab, run: Path) -> None:
    tab.open(run)
    script = """
        const text = Response.prototype.text, waiting = [];
        Response.prototype.text = function () {
          return new Promise((resolve) => waiting.push(() => text.call(this).then(resolve)));
        };
        const form = document.getElementById("samples-form").elements;
        form.before.click(); form.before.click();
        Response.prototype.text = text;
        const release = async () => {
          for (const one of waiting.reverse()) { one(); await new Promise((go) => setTimeout(go, 20)); }
          document.body.dataset.released = waiting.length;
        };
        release();"""
    tab.run(script)
    assert tab.wait("return document.body.dataset.released") == "2"
    tab.wait("return document.querySelector('#cards h3').textContent.startsWith('step 4, query sum:1')")
    assert value(tab, "step") == "4"
    assert options(tab, "query") == ["sum:1", "sum:2", "even:3"]  # not those of step 5


def test_many_are_shown_a_part_at_a_time(tab: Tab, tmp_path: Path) -> None:
    many = [sample(words=("number ", str(place)), tokens=1000) for place in range(50)]
    tab.open(write_run(tmp_path / "run", lines=[metrics_line(1)], samples={1: many}))
    expected = [f"number {place}" for place in range(50)]
    assert texts(tab) == expected[:20]
    assert tab.find("#found").text == "50 of 50 samples, the first 20 shown"
    click_through(tab, "#more")
    assert texts(tab) == expected[:40]
    click_through(tab, "#more")
    assert texts(tab) == expected
    assert not tab.find("#more").is_displayed()
    assert tab.find("#found").text == "50 of 50 samples"


def test_of_several_runs_one_is_chosen(tab: Tab, tmp_path: Path) -> None:
    other = [sample("other:1", words=("of the other",))]
    tab.open(
        made_run(tmp_path / "a", name="a", steps=3),
        write_run(tmp_path / "b", lines=[metrics_line(2)], samples={2: other}),
    )
    assert tab.find("#run-label").is_displayed()
    choose(tab, step=2, query="sum:2")
    choose(tab, run=1)
    assert (options(tab, "step"), options(tab, "query")) == (["2"], ["other:1"])
    assert texts(tab) == ["of the other"]
    choose(tab, run=0)
    assert (value(tab, "step"), len(texts(tab))) == ("2", 4)
