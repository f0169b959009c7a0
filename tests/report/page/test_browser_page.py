"""The page in a real browser: what the charts draw, how they are zoomed and read off; on a phone, on paper."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Keys, Tab
from tests.report.page.made_runs import (
    CLIP,
    MIB,
    QUANTILES,
    STAGES,
    begun,
    ended,
    made_run,
    metrics_line,
    number,
    write_run,
)

from gspo.report.view import Server

pytestmark = pytest.mark.browser

CHART = "const chart = [...document.querySelectorAll('figure')].find((one) => one.textContent.startsWith(arguments[0]))"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
FAMILIES = "[...document.querySelectorAll('#charts details')]"
PLOT = f"{CHART}.querySelector('.plot');"
NAMES = ["Learning", "Ratio and clipping", "Policy", "Experts", "Speed and memory"]


@pytest.fixture
def page(tab: Tab, run: Path) -> Iterator[Tab]:
    """The page of the made run, loaded once for all tests; each leaves it as it was."""
    tab.show(run)
    yield tab
    tab.run("document.querySelector('#view').reset()")
    assert tab.messages() == [] and tab.requests() == []


def shown(tab: Tab, title: str) -> dict[str, Any]:
    """A chart that has come into view: its columns, axes, ranges, and what stands below it."""
    tab.run(
        f"{CHART}; {FAMILIES}.forEach((one) => {{ one.open = true; }}); chart.scrollIntoView()",
        title,
    )
    tab.wait(f"{PLOT} return chart.chart && chart.chart.scales.x.min !== null", title)
    tab.settle()
    found = tab.run(
        f"{PLOT} const {{data, axes, scales, series}} = chart.chart;"
        "return {columns: data.map((one) => [...one].map((value) => value ?? null)), "
        "axes: axes.map((one) => one.label),"
        "x: [scales.x.min, scales.x.max], y: [scales.y.min, scales.y.max], distr: scales.y.distr,"
        "stroke: String(series[1].stroke()),"
        "key: [...chart.querySelectorAll('.u-series')].filter((one) => one.offsetHeight)"
        ".map(({cells}) => [...cells].map((one) => one.textContent).join(' '))}",
        title,
    )
    assert isinstance(found, dict)
    return found


def metric(name: str, steps: range = range(1, 7)) -> list[Any]:
    return [metrics_line(step)[name] for step in steps]


def test_all_of_the_page_is_there_and_nothing_was_asked_for(page: Tab) -> None:
    assert page.run("return performance.getEntriesByType('resource').map((one) => one.name)") == []
    facts = page.run("return document.documentElement.dataset.firstChart && document.body.innerText")
    for text in (
        "finished: 6 of 6 steps",
        "pass@1 (held_out)",
        "0.25 ± 0.02 → 0.31 ± 0.08",
        "0.22 → 0.25",  # as the summary of the terminal has it
        "reward, means of the first → last few steps",
        "made: Qwen3MoeForCausalLM",
        "None.",
    ):
        assert text in facts
    assert page.run("return [...document.querySelectorAll('#charts summary')].map((one) => one.innerText)") == NAMES
    recipes = page.run("return document.querySelector('#recipe').textContent")
    assert "importance_sampling_level: sequence" in recipes and "gspo0.1.0" in recipes


def test_a_chart_draws_the_numbers_of_its_metrics_under_titles_with_units(page: Tab) -> None:
    length = shown(page, "Response length")
    assert length["columns"] == [[0, *range(1, 7)], [None, *metric("response/mean_tokens")]]
    assert length["axes"] == ["step", "tokens"] and length["y"][0] == 0
    assert length["key"] == ["step 6", "mean length 30.06"]
    entropy = shown(page, "Entropy")
    assert entropy["columns"][1][4] is None  # a gap
    memory = shown(page, "Peak memory")
    assert (
        memory["columns"][1][1:] == pytest.approx([value / MIB for value in metric("memory/peak_bytes")], rel=1e-4)
        and memory["axes"][1] == "MiB"
    )
    assert shown(page, "Clipped: ")["key"][1:] == ["of the sequences 46 %", "of the tokens 21 %"]
    cold = shown(page, "Loss of the cold start")
    assert cold["columns"][0] == [*range(1, 11)] and cold["axes"] == ["step of the cold start", "nats a token"]


def test_an_evaluation_is_points_with_error_bars_at_its_steps(page: Tab) -> None:
    reward = shown(page, "Reward, and score")
    steps, training, held_out = reward["columns"][:3]
    assert training[1:] == metric("reward/mean")
    assert [step for step, value in zip(steps, held_out, strict=True) if value is not None] == [0, 3, 6]
    assert reward["key"] == ["step 6", "mean reward in training 0.26", "pass@1 (held_out) 0.31 ± 0.08"]
    assert reward["y"][1] > number(0.25, 6) + number(0.02, 6)  # the bar is in view


def test_each_of_several_evaluated_sets_has_a_chart_of_its_own_and_its_pass_rate_beside_the_reward(
    tab: Tab, tmp_path: Path
) -> None:
    def scores(step: int) -> dict[str, float]:
        sums = {"pass_at_1": 0.1 * step, "standard_error": 0.01, "reward_mean": 0.2 * step, "pass_at_4": 0.15 * step}
        codes = {"pass_at_1": 0.5, "reward_mean": 0.5}
        return {
            f"evaluation/{home}/{name}": value
            for home, own in (("sums", sums), ("a/codes", codes))
            for name, value in own.items()
        }

    lines = [{**metrics_line(step), **scores(step)} for step in (1, 2)]
    tab.open(
        write_run(tmp_path / "run", lines=[{key: line[key] for key in line if "held_out" not in key} for line in lines])
    )
    assert shown(tab, "Reward, and score")["key"][2:] == ["pass@1 (sums) 0.2 ± 0.01", "pass@1 (a/codes) 0.5"]
    assert shown(tab, "Score on sums")["key"][1:] == ["pass@1 (sums) 0.2 ± 0.01", "reward (sums) 0.4", "pass@4 0.3"]
    assert shown(tab, "Score on a/codes")["key"][1:] == ["pass@1 (a/codes) 0.5"]
    assert tab.messages() == []


def test_the_ratio_chart_has_bands_and_the_lines_of_the_clip_range(page: Tab) -> None:
    ratio = shown(page, "Sequence ratio")
    columns = [[round(value, 6) for value in column if value is not None] for column in ratio["columns"][1:]]
    rows = [[number(base, step) for step in range(1, 7)] for base in QUANTILES]
    assert columns[:7] == [rows[6], rows[0], rows[5], rows[1], rows[4], rows[2], rows[3]]
    assert columns[7:] == [[1 + CLIP[1]] * 6, [1 - CLIP[0]] * 6]
    words = " ".join(ratio["key"])
    for text in (
        "1–99 % of the sequences 0.97 … 1.11",
        "25–75 % of",
        "middle (50 %)",
        "upper limit: 1 + clip high 1.04",
        "lower limit: 1 − clip low 0.97",
    ):
        assert text in words


def test_the_time_of_a_step_is_a_stack_of_its_stages(page: Tab) -> None:
    time = shown(page, "Where the time of a step goes")
    assert [text.split()[0] for text in time["key"][1:]] == list(STAGES)
    tops = time["columns"][1::2]  # each stage has an upper and a lower edge
    assert tops[-1][1:] == pytest.approx([metrics_line(step)["time/total_seconds"] for step in range(1, 7)])
    assert time["y"][0] == 0


def test_the_bubble_has_the_seconds_in_which_each_side_works(page: Tab) -> None:
    bubble = shown(page, "The bubble")
    assert [text.rpartition(" ")[0] for text in bubble["key"][1:]] == ["trainer works", "engine samples", "whole step"]
    total = [metrics_line(step)["time/total_seconds"] for step in range(1, 7)]
    for column, share in zip(bubble["columns"][1:], (0.5, 0.5, 1.0), strict=True):  # to the end of the step at most
        assert column[1:] == pytest.approx([share * seconds for seconds in total], rel=1e-4)
    assert bubble["y"][1] >= max(total)
    ages = shown(page, "Tokens by age")
    assert [text.rpartition(" ")[0] for text in ages["key"][1:]] == ["age 0", "age 1"]
    assert ages["columns"][3][1:] == [100.0 + 50.0 * step for step in range(1, 7)]  # the upper edge of the second


def test_a_drag_zooms_all_charts_of_steps_and_a_double_click_shows_all_again(page: Tab) -> None:
    for title in ("Entropy", "Loss of the cold start", "Response length"):
        shown(page, title)
    area = page.run(f"{PLOT} return chart.querySelector('.u-over')", "Response length")
    width = area.size["width"]
    page.actions().move_to_element(area).move_by_offset(-width // 4, 0).click_and_hold().move_by_offset(
        width // 2, 3
    ).release().perform()
    page.wait("return document.querySelector('#view [name=from]').value")
    length, entropy = (shown(page, title) for title in ("Response length", "Entropy"))
    assert length["x"] == entropy["x"] == pytest.approx([1.5, 4.5], abs=0.3)
    assert shown(page, "Loss of the cold start")["x"] == [1, 10]
    form = page.run("return ['from', 'to'].map((name) => Number(document.querySelector(`#view [name=${name}]`).value))")
    assert form == pytest.approx(length["x"])
    page.run(f"{PLOT} chart.scrollIntoView({{block: 'center'}})", "Response length")
    page.actions().double_click(area).perform()
    assert shown(page, "Entropy")["x"] == shown(page, "Response length")["x"] == [0, 6]


def test_a_range_can_be_typed(page: Tab) -> None:
    page.set("#view [name=from]", 2)
    page.set("#view [name=to]", 99)
    assert shown(page, "Entropy")["x"] == [2, 6]
    page.click("#view [type=reset]")
    assert (
        shown(page, "Entropy")["x"] == [0, 6]
        and page.run("return document.querySelector('#view [name=from]').value") == ""
    )


def test_the_x_axis_can_be_tokens_or_time(page: Tab) -> None:
    page.set("#view [name=axis]", "minutes")
    entropy = shown(page, "Entropy")
    assert entropy["axes"][0] == "time, minutes" and entropy["columns"][0] == [*range(7)] and entropy["x"] == [0, 6]
    page.set("#view [name=axis]", "tokens")
    entropy, length = shown(page, "Entropy"), shown(page, "Response length")
    line = metrics_line(1)
    first = line["throughput/generated_tokens_per_second"] * line["time/rollout_seconds"]
    assert entropy["axes"][0] == "generated tokens" and entropy["columns"][0][:2] == pytest.approx([0, first], rel=1e-3)
    assert entropy["x"] == length["x"] and shown(page, "Loss of the cold start")["columns"][0] == [*range(1, 11)]
    page.set("#view [name=axis]", "steps")


def test_curves_can_be_smoothed_and_drawn_on_a_log_scale(page: Tab) -> None:
    page.set("#view [name=smoothing]", 5)
    _, faint, smooth = shown(page, "Response length")["columns"]
    values = metric("response/mean_tokens")
    assert (
        faint[1:] == values
        and smooth[6] == pytest.approx(sum(values[1:]) / 5)
        and smooth[2] == pytest.approx(sum(values[:2]) / 2)
    )
    page.set("#view [name=smoothing]", 1)
    page.click("#view [name=log]")
    assert shown(page, "Gradient norm")["distr"] == 3 and shown(page, "Sequence ratio")["distr"] == 1
    page.click("#view [name=log]")
    assert shown(page, "Gradient norm")["distr"] == 1


def test_the_keys_read_off_the_numbers_of_a_chart(page: Tab) -> None:
    shown(page, "Response length")
    page.run(f"{PLOT} chart.focus()", "Response length")
    said = []
    for key in (Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.END, Keys.ARROW_LEFT):
        page.press(key)
        page.settle()
        said.append(page.run("return document.querySelector('#status').textContent"))
    numbers = {step: f"step {step}; mean length {30 + step / 100:.4g}" for step in range(1, 7)}
    assert said == ["step 0; mean length –", numbers[1], numbers[2], numbers[6], numbers[5]]
    focus = page.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert focus == "solid"
    reached = page.run(
        "const all = [...document.querySelectorAll('a[href], button, select, input, summary, .plot')];"
        "return all.every((one) => one.tabIndex >= 0)"
    )
    assert reached


def test_the_cursor_is_in_all_charts_at_once(page: Tab) -> None:
    for title in ("Responses cut off", "Response length"):
        shown(page, title)
    area = page.run(f"{PLOT} return chart.querySelector('.u-over')", "Response length")
    page.actions().move_to_element(area).perform()
    page.settle()
    where = f"{CHART}; return chart.querySelector('.u-series td').innerText"
    assert [page.run(where, title) for title in ("Response length", "Responses cut off")] == ["3", "3"]


def test_any_other_number_can_be_drawn_with_its_definition(page: Tab) -> None:
    page.set("#other", "reward/std")
    assert shown(page, "reward/std")["columns"][1][1:] == metric("reward/std")
    assert "Standard deviation of the rewards" in page.find("#other-definition").text
    page.set("#other", "ratio/sequence_quantiles")
    assert len(shown(page, "ratio/sequence_quantiles")["columns"]) == 8
    page.set("#other", "")
    assert page.run("return document.querySelector('#other-chart').hidden")


def test_a_title_leads_to_the_definition_of_its_metric(page: Tab) -> None:
    page.run(f"{CHART}.querySelector('h4 a').click()", "Entropy")
    place = page.wait(
        "const target = document.querySelector('dt:target');"
        "return target?.offsetHeight && target.nextSibling.textContent"
    )
    assert "entropy" in place.lower()


def test_the_colours_are_those_of_the_theme_and_on_paper_light(page: Tab) -> None:
    with page.media(prefers_color_scheme="dark"):
        page.wait(f"return {BACKGROUND} === 'rgb(21, 24, 28)'")
        assert shown(page, "Entropy")["stroke"] == "#56b4e9"
        page.run(f"{FAMILIES}.forEach((one) => {{ one.open = false; }}); dispatchEvent(new Event('beforeprint'))")
        drawn = page.run(
            "return [...document.querySelectorAll('#charts .plot')].map((one) => one.chart &&"
            "[String(one.chart.series[1].stroke?.()), one.chart.width, one.offsetHeight > 0])"
        )
        assert len(drawn) > 12 and all(one and one[1:] == [640, True] for one in drawn)
        assert "#0072b2" in [one[0] for one in drawn] and "#56b4e9" not in [one[0] for one in drawn]
        page.run("dispatchEvent(new Event('afterprint'))")
        assert page.run("return document.querySelector('#charts details').open") is False
        assert shown(page, "Entropy")["stroke"] == "#56b4e9"
    page.wait(f"return {BACKGROUND} === 'rgb(255, 255, 255)'")


def test_on_paper_what_is_operated_is_hidden_and_what_is_read_is_whole(page: Tab) -> None:
    shown_of = "return document.querySelector(arguments[0]).checkVisibility()"
    hidden = ("body > nav", "#view", "#which", "#choice", "#filter", "#metrics", "#other")
    with page.media("print"):
        assert [selector for selector in hidden if page.run(shown_of, selector)] == []
        assert (
            page.run(shown_of, "#samples article") and page.run(shown_of, "#overview") and page.run(shown_of, "#charts")
        )
        height = "return getComputedStyle(document.querySelector(arguments[0])).maxHeight"
        assert page.run(height, ".completion") == page.run(height, "#queries .wide") == "none"
        assert page.run("return getComputedStyle(document.querySelector('.card')).breakInside") == "avoid"
    with page.media("print", prefers_color_scheme="dark"):
        assert page.run(f"return {BACKGROUND}") == "rgb(255, 255, 255)"
    assert all(page.run(shown_of, selector) for selector in hidden)


def test_whatever_is_operated_has_a_name_and_is_reached_by_tab(page: Tab) -> None:
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    roles = ("button", "combobox", "spinbutton", "searchbox", "checkbox", "link", "DisclosureTriangle")
    operated = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    assert {node["role"]["value"] for node in operated} == set(roles)
    assert [node for node in operated if not node.get("name", {}).get("value")] == []
    page.run("document.querySelectorAll('details').forEach((one) => { one.open = false; })")
    page.run("document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(150):
        page.press(Keys.TAB)
        reached.add(page.run("return document.activeElement.name || document.activeElement.id"))
        if "recipe" in page.run("return document.activeElement.closest('section')?.id ?? ''"):
            break
    assert {"axis", "from", "to", "log", "other", "text", "least", "scope", "step", "query"} <= reached
    page.run("document.querySelectorAll('#charts details').forEach((one) => { one.open = true; })")


def test_on_a_phone_nothing_overflows_and_fingers_find_what_they_want(tab: Tab, run: Path) -> None:
    phone: dict[str, Any] = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    with tab.emulated(
        "Emulation.setDeviceMetricsOverride",
        {"width": 0, "height": 0, "deviceScaleFactor": 0, "mobile": False},
        **phone,
    ):
        tab.open(run)
        assert tab.run("return document.documentElement.scrollWidth") == 390
        opened = tab.run("return [...document.querySelectorAll('#charts details')].map((one) => one.open)")
        assert opened == [True, False, False, False, False]
        high = tab.run(
            "return document.querySelector('#queries').offsetTop - document.querySelector('#curves').offsetTop"
        )
        assert high < 3000
        assert tab.run("return getComputedStyle(document.querySelector('body > nav')).position") == "sticky"
        small = tab.run(
            "const targets = ':is(#curves, #recipe) :is(select, button, summary, h4 a), body > nav a';"
            "return [...document.querySelectorAll(targets)]"
            ".filter((one) => one.offsetHeight && one.getBoundingClientRect().height < 40).map((one) => one.outerHTML)"
        )
        assert small == []


def test_a_finger_that_scrolls_over_a_chart_does_not_zoom(tab: Tab, run: Path) -> None:
    with tab.emulated("Emulation.setTouchEmulationEnabled", {"enabled": False}, enabled=True, maxTouchPoints=1):
        tab.open(run)
        assert tab.run("return matchMedia('(pointer: coarse)').matches")
        shown(tab, "Response length")
        assert tab.run(f"{PLOT} return chart.chart.cursor.drag.x", "Response length") is False


def test_seeds_are_one_line_with_a_band_and_arms_have_colours(tab: Tab, tmp_path: Path) -> None:
    runs = [made_run(tmp_path / f"a-{seed}", name=f"a-{seed}", seed=seed) for seed in (0, 1, 2)]
    runs.append(made_run(tmp_path / "b", name="b", steps=3, actor={"clip_low": 0.5}))
    tab.open(*runs)
    length = shown(tab, "Response length")
    _, high, low, mean, other = length["columns"]
    values = [[number(30.0, step, seed) for seed in (0, 1, 2)] for step in range(1, 7)]
    means = [sum(row) / 3 for row in values]
    spread = [
        (sum((value - middle) ** 2 for value in row) / 2) ** 0.5 for row, middle in zip(values, means, strict=True)
    ]
    assert mean[1:] == pytest.approx(means, rel=1e-4)
    assert [top - bottom for top, bottom in zip(high[1:], low[1:], strict=True)] == pytest.approx(
        [2 * one for one in spread], abs=2e-3
    )
    assert [value for value in other if value is not None] == [30.01, 30.02, 30.03]
    assert length["key"] == ["step 6", "a (3 seeds) 30.06 ± 0.0021", "b 30.03"]
    text = tab.run("return document.querySelector('#overview').innerText")
    for part in (
        "0, 1, 2",
        "finished: 6 of 6 steps",
        "finished: 3 of 6 steps",
        "actor.clip_low",
        "0.003",
        "0.5",
        "Where the recipes differ",
    ):
        assert part in text
    assert tab.run("return document.documentElement.scrollWidth <= innerWidth") and tab.messages() == []


def test_a_run_before_its_first_step_and_of_one_step_are_shown(tab: Tab, tmp_path: Path) -> None:
    tab.open(write_run(tmp_path / "none", history=[begun()]))
    assert "no step is done" in tab.find("#charts").text and "still running: 0 of 6 steps" in tab.find("#overview").text
    assert tab.messages() == []
    history = [begun(), ended("stopped"), begun(event="resumed", step=1), ended()]
    tab.open(write_run(tmp_path / "one", lines=[metrics_line(1), {"step": 2, "reward/mean": None}], history=history))
    assert shown(tab, "Response length")["key"] == ["step (┊ resumed) 2", "mean length 30.01"]
    assert tab.messages() == []


def test_the_charts_of_a_served_page_go_on_with_the_run(tab: Tab, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", lines=[metrics_line(step) for step in range(4)], history=[begun()])
    server = Server([path], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    quick = "const later = setTimeout; setTimeout = (action, wait) => later(action, Math.min(wait, 10));"
    hasty = tab.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": quick})
    try:
        tab.driver.get(server.url)
        tab.wait_until_ready()
        shown(tab, "Entropy")
        tab.set("#view [name=from]", 1)
        tab.set("#other", "reward/std")
        tab.find("#which [name=text]").send_keys("half a wo")
        tab.run(
            "window.same = true;"
            "document.querySelectorAll('#overview details, #recipe details').forEach((one) => { one.open = true; });"
            "document.querySelector('#view [name=to]').value = '9';"
            "document.querySelector('#overview summary').focus();"
            "getSelection().selectAllChildren(document.querySelector('#metrics dd'))"
        )
        later = write_run(tmp_path / "b", lines=[metrics_line(step) for step in range(7)], history=[begun(), ended()])
        for name in ("metrics.jsonl", "history.jsonl"):  # at once: the page would follow a file that is half written
            (later / name).replace(path / name)
        tab.wait(f"{PLOT} return chart.chart?.data[0].length === 7", "Entropy")
        assert shown(tab, "Entropy")["x"] == [1, 6] and tab.run("return window.same")
        assert "finished: 6 of 6 steps" in tab.find("#overview").text
        kept = tab.run(
            "const value = (selector) => document.querySelector(selector).value;"
            "return [value('#which [name=text]'), value('#view [name=to]'), value('#other'),"
            "String(getSelection()).length > 9,"
            "document.querySelectorAll('#overview [open], #recipe [open]').length,"
            "document.activeElement === document.querySelector('#overview summary')]"
        )
        assert kept == ["half a wo", "9", "reward/std", True, 3, True]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        tab.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", hasty)
    tab.open(path)
