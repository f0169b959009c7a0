"""The charts of a run: which there are, and that what is drawn is what metrics.jsonl says."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import MIB, NUM_LAYERS, NUM_STEPS, STAGES, metrics_line, write_run

Figures = dict[str, list[dict[str, Any]]]

TITLES = [
    "Reward and pass@1",
    "Response length, tokens",
    "Responses cut off",
    "Clipped, by sequence and by token",
    "Sequence ratio s: 1–99, 5–95 and 25–75 % of the sequences, and the middle",
    "Groups of equal reward",
    "Entropy, nats a token",
    "Gradient norm",
    "Experts that an update changes",
    "Experts that an update changes, by layer",
    "Seconds a step, by stage",
    "Tokens a second",
    "Peak memory, MiB",
]
STEPS = list(range(1, NUM_STEPS + 1))
READ_FIGURES = """
return Object.fromEntries([...document.querySelectorAll("figure.chart[id]")].map((figure) => [
  figure.querySelector("h3").textContent,
  figure.querySelector(".plot").data.map((trace) => JSON.parse(JSON.stringify(trace))),
]))"""


@pytest.fixture(scope="module")
def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def figures(tab: Tab, run: Path) -> Figures:
    tab.show(run)
    return dict(tab.run(READ_FIGURES))


def _values(lines: list[dict[str, Any]], name: str, scale: float = 1.0) -> list[Any]:
    """Of the steps after the evaluation before training, as exactly as the page has them."""
    found = [line[name] for line in lines if line["step"] > 0]
    return [None if value is None else pytest.approx(value * scale, rel=1e-5) for value in found]


def _curve(traces: list[dict[str, Any]], name: str) -> tuple[list[int], list[float | None]]:
    (trace,) = [trace for trace in traces if trace["name"] == name]
    return trace["x"], trace["y"]


def test_every_chart_is_there_and_drawn(figures: Figures, tab: Tab) -> None:
    assert (
        tab.run("return [...document.querySelectorAll('figure.chart[id] h3')].map((one) => one.textContent)") == TITLES
    )
    assert set(figures) == set(TITLES)
    shapes = "one.querySelectorAll('.js-line, .js-fill, .heatmaplayer image').length"
    assert all(tab.run(f"return [...document.querySelectorAll('.charts .plot')].map((one) => {shapes})"))


@pytest.mark.parametrize(
    ("title", "metrics"),
    [
        ("Reward and pass@1", ["reward/mean"]),
        ("Response length, tokens", ["response/mean_tokens"]),
        ("Responses cut off", ["response/truncated_fraction"]),
        ("Clipped, by sequence and by token", ["clip/sequence_fraction", "clip/token_fraction"]),
        ("Groups of equal reward", ["group/zero_variance_fraction"]),
        ("Entropy, nats a token", ["policy/entropy"]),
        ("Gradient norm", ["policy/grad_norm"]),
        ("Experts that an update changes", ["moe/expert_change_fraction"]),
        ("Tokens a second", ["throughput/generated_tokens_per_second", "throughput/trained_tokens_per_second"]),
    ],
)
def test_a_curve_is_the_metric_step_by_step(
    title: str, metrics: list[str], figures: Figures, lines: list[dict[str, Any]]
) -> None:
    for metric in metrics:
        assert _curve(figures[title], metric) == (STEPS, _values(lines, metric))
    others = {trace["name"] for trace in figures[title]} - set(metrics)
    assert others == ({"evaluation/held_out/pass_at_1"} if title == "Reward and pass@1" else set())


def test_a_null_is_a_gap(figures: Figures, tab: Tab) -> None:
    (trace,) = figures["Entropy, nats a token"]
    assert [step for step, value in zip(trace["x"], trace["y"], strict=True) if value is None] == [4]
    assert not trace.get("connectgaps", False)
    assert len(tab.find_all("#chart-6 .xy .scatterlayer .js-line")) == 2  # pieces


def test_pass_at_1_has_its_standard_error_as_bars(figures: Figures, lines: list[dict[str, Any]], tab: Tab) -> None:
    (trace,) = [one for one in figures["Reward and pass@1"] if one["name"] == "evaluation/held_out/pass_at_1"]
    evaluated = {line["step"]: line for line in lines if "evaluation/held_out/pass_at_1" in line}
    assert list(evaluated) == [0, 3, 6]
    found = {
        step: (mean, error)
        for step, mean, error in zip(trace["x"], trace["y"], trace["error_y"]["array"], strict=True)
        if mean is not None
    }
    assert found == {
        step: tuple(pytest.approx(line[f"evaluation/held_out/{name}"]) for name in ("pass_at_1", "standard_error"))
        for step, line in evaluated.items()
    }
    assert trace["error_y"]["type"] == "data"
    assert trace["x"] == [0, 3, 6]  # of few steps, a line from one to the next
    assert len(tab.find_all("#chart-0 .errorbar .yerror")) == 3


def test_the_quantiles_are_three_bands_and_the_middle(figures: Figures, lines: list[dict[str, Any]], tab: Tab) -> None:
    *bands, middle = figures[TITLES[4]]
    rows = [line["ratio/sequence_quantiles"] for line in lines if line["step"] > 0]
    for band, (low, high) in zip(bands, ((0, 6), (1, 5), (2, 4)), strict=True):
        assert band["x"] == [*STEPS, *reversed(STEPS)]
        assert band["y"] == pytest.approx([row[low] for row in rows] + [row[high] for row in reversed(rows)])
        assert band["fill"] == "toself"
    assert (middle["x"], middle["y"]) == (STEPS, pytest.approx([row[3] for row in rows]))
    assert middle["customdata"] == [pytest.approx(row) for row in rows]
    shares = zip(("1 %", "5 %", "25 %", "75 %", "95 %", "99 %"), (0, 1, 2, 4, 5, 6), strict=True)
    label = ", ".join(f"{share}: {rows[2][place]:#.4g}" for share, place in shares)
    shown = tab.run("const plot = document.querySelector('#chart-4 .plot');"
                    "plot.scrollIntoView({block: 'center'});"
                    "Plotly.Fx.hover(plot, [{curveNumber: 3, pointNumber: 2}]);"
                    "const told = plot.querySelector('.hoverlayer').textContent; Plotly.Fx.unhover(plot);"
                    "return told")  # fmt: skip
    assert f"{rows[2][3]:#.4g} ({label})" in shown


def test_the_heat_map_is_layer_by_step(figures: Figures, lines: list[dict[str, Any]]) -> None:
    (trace,) = figures["Experts that an update changes, by layer"]
    assert trace["type"] == "heatmap"
    assert (trace["x"], trace["y"]) == (STEPS, [f"layer {layer}" for layer in range(NUM_LAYERS)])
    by_step = [line["moe/expert_change_fraction_by_layer"] for line in lines if line["step"] > 0]
    assert trace["z"] == [[pytest.approx(row[layer]) for row in by_step] for layer in range(NUM_LAYERS)]


def test_the_stages_are_a_stack_that_adds_up(figures: Figures, lines: list[dict[str, Any]]) -> None:
    layers = figures["Seconds a step, by stage"]
    assert [layer["name"] for layer in layers] == [f"time/{stage}_seconds" for stage in STAGES]
    assert len({layer["stackgroup"] for layer in layers}) == 1
    for layer in layers:
        assert (layer["x"], layer["y"]) == (STEPS, _values(lines, layer["name"]))
    sums = [sum(column) for column in zip(*(layer["y"] for layer in layers), strict=True)]
    assert sums == _values(lines, "time/total_seconds")


def test_memory_is_in_mebibytes(figures: Figures, lines: list[dict[str, Any]]) -> None:
    assert _curve(figures["Peak memory, MiB"], "memory/peak_bytes") == (
        STEPS,
        _values(lines, "memory/peak_bytes", 1 / MIB),
    )
    assert figures["Peak memory, MiB"][0]["y"][0] == 101.0


def test_what_the_charts_are_over_is_said_once(figures: Figures, tab: Tab) -> None:
    titles = "return [...document.querySelectorAll('.plot .xtitle')].map((one) => one.textContent.trim())"
    assert [title for title in tab.run(titles) if title] == []
    assert tab.find("#range .hint").text.startswith("Numbers over steps.")


def test_any_other_number_is_drawn_when_chosen(figures: Figures, lines: list[dict[str, Any]], tab: Tab) -> None:
    offered = tab.run("return [...document.getElementById('other').options].map((one) => one.value)")
    assert sorted(offered) == sorted({"", *(name for line in lines for name in line)} - {"step"})
    tab.set("#other", "reward/std")
    drawn = "const one = document.getElementById('other-plot').data; return one && one[0].name === arguments[0] && one"
    (trace,) = tab.wait(drawn, "reward/std")
    assert (trace["x"], trace["y"]) == (STEPS, _values(lines, "reward/std"))
    assert tab.find("#other-definition").get_dom_attribute("href") == "#metric-reward-std"
    tab.set("#other", "ratio/sequence_quantiles")  # a list
    traces = tab.wait(drawn, "ratio/sequence_quantiles/0")
    rows = [line["ratio/sequence_quantiles"] for line in lines if line["step"] > 0]
    assert [trace["y"] for trace in traces] == [pytest.approx([row[place] for row in rows]) for place in range(7)]


def test_the_numbers_are_in_words_too(figures: Figures, tab: Tab) -> None:
    captions = tab.run("return [...document.querySelectorAll('.charts .plot')].map((one) => one.ariaLabel)")
    assert captions[0].startswith("reward/mean: 0.21 → 0.26 (from 0.21 to 0.26, median 0.235)")
    assert all(captions) and len(captions) == len(TITLES)
    tab.click("#chart-0 summary")
    assert "reward/mean: 0.21 → 0.26" in tab.find("#chart-0 figcaption li").text


def test_where_the_run_was_taken_up_again_is_marked(tab: Tab, run: Path, tmp_path: Path) -> None:
    history = [{"event": event, "time": "2026-01-01T00:00:00+00:00", "step": step} for event, step in
               (("begun", 0), ("ended", 2), ("resumed", 2), ("ended", 4))]  # fmt: skip
    tab.open(write_run(tmp_path / "run", lines=[metrics_line(step) for step in range(5)], history=history))
    shapes = tab.run("return [...document.querySelectorAll('.charts .plot')].map((one) => one.layout.shapes)")
    assert [[(shape["x0"], shape["x1"]) for shape in chart] for chart in shapes] == [[(2, 2)]] * len(TITLES)
