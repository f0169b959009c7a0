"""The charts: there exactly when their numbers are, of the right numbers, in words too, and such as plotly takes."""

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from tests.report.page.lines import arms_with, run_of, seeds_of, steps_of
from tests.report.page.made_runs import QUANTILES, STAGES, metrics_line, number

from gspo.report.page import charts as charts_module
from gspo.report.page.arms import Arm, arms_of
from gspo.report.page.charts import Chart, charts_of, every_metric
from gspo.report.page.html import asset
from gspo.report.page.traces import COLOURS

PASS = "evaluation/held_out/pass_at_1"
ERROR = "evaluation/held_out/standard_error"
LAYERS = "moe/expert_change_fraction_by_layer"
ALONE = {  # the chart that a metric makes by itself, beside a run that has no other
    "reward/mean": "Reward and pass@1",
    PASS: "Reward and pass@1",
    "response/mean_tokens": "Response length, tokens",
    "response/truncated_fraction": "Responses cut off",
    "clip/sequence_fraction": "Clipped, by sequence and by token",
    "clip/token_fraction": "Clipped, by sequence and by token",
    "group/zero_variance_fraction": "Groups of equal reward",
    "policy/entropy": "Entropy, nats a token",
    "policy/grad_norm": "Gradient norm",
    "critic/grad_norm": "Gradient norm",
    "reference/kl": "KL from the reference, nats a token",
    "critic/explained_variance": "Variance of the returns that the value model explains",
    "moe/expert_change_fraction": "Experts that an update changes",
    "time/rollout_seconds": "Seconds a step, by stage",
    "time/appraisal_seconds": "Seconds a step, by stage",
    "throughput/generated_tokens_per_second": "Tokens a second",
    "throughput/trained_tokens_per_second": "Tokens a second",
    "memory/peak_bytes": "Peak memory, MiB",
}
OF_LISTS = {
    "ratio/sequence_quantiles": "Sequence ratio s: 1–99, 5–95 and 25–75 % of the sequences, and the middle",
    LAYERS: "Experts that an update changes, by layer",
}


def whole(seed: int = 0) -> list[dict[str, Any]]:
    return [metrics_line(step, seed) for step in range(7)]


def titled(arms: Sequence[Arm], title: str) -> Chart:
    (found,) = [chart for chart in charts_of(arms) if chart.title == title]
    return found


def named(chart: Chart, name: str) -> dict[str, Any]:
    """The curve of this name, not its band."""
    (found,) = [trace for trace in chart.traces if trace.get("name") == name and "fill" not in trace]
    return found


@pytest.mark.parametrize("metric", ALONE)
def test_a_metric_alone_makes_its_chart_and_no_other(metric: str) -> None:
    (chart,) = charts_of([seeds_of(steps_of(metric, [0.25, 0.5]))])
    assert (chart.title, list(chart.metrics)) == (ALONE[metric], [metric])
    assert len(chart.captions) == 1


@pytest.mark.parametrize("metric", OF_LISTS)
def test_a_list_alone_makes_its_chart_and_no_other(metric: str) -> None:
    (chart,) = charts_of([seeds_of(steps_of(metric, [[0.1] * 7, [0.2] * 7]))])
    assert (chart.title, list(chart.metrics)) == (OF_LISTS[metric], [metric])


@pytest.mark.parametrize("metric", [*ALONE, *OF_LISTS, "other/number"])
@pytest.mark.parametrize("value", [None, math.inf, [], [None, None]])
def test_without_a_number_there_is_no_chart(metric: str, value: Any) -> None:
    arms = [seeds_of(steps_of(metric, [value, value]))]
    assert charts_of(arms) == [] and every_metric(arms) == {}


def test_a_run_with_everything_has_every_chart_in_the_order_of_reading() -> None:
    log = whole()
    for line in log[1:]:
        line |= {"reference/kl": 0.1, "critic/explained_variance": 0.5, "time/appraisal_seconds": 1.0}
    titles = [chart.title for chart in charts_of([seeds_of(log)])]
    order = list(dict.fromkeys([*list(ALONE.values())[:6], OF_LISTS["ratio/sequence_quantiles"], *ALONE.values()]))
    order.insert(order.index("Experts that an update changes") + 1, OF_LISTS[LAYERS])
    assert titles == order


def test_a_run_without_lines_has_no_chart() -> None:
    assert charts_of([seeds_of([])]) == [] and every_metric([seeds_of([])]) == {}


def test_the_curve_is_the_runs_and_the_gap_a_gap() -> None:
    entropy = named(titled([seeds_of(whole())], "Entropy, nats a token"), "policy/entropy")
    assert entropy["x"] == [1, 2, 3, 4, 5, 6]
    assert entropy["y"] == [1.51, 1.52, 1.53, None, 1.55, 1.56]
    assert "connectgaps" not in entropy and entropy["mode"] == "lines"


def test_a_single_step_is_a_point() -> None:
    (trace,) = charts_of([seeds_of(steps_of("policy/entropy", [1.5]))])[0].traces
    assert (trace["x"], trace["y"], trace["mode"]) == ([1], [1.5], "lines+markers")


@pytest.mark.parametrize("metric", ["policy/entropy", "time/rollout_seconds"])
def test_fewer_than_three_steps_are_seen_by_their_markers(metric: str) -> None:
    for count in (1, 2, 3, 4):
        (trace,) = charts_of([seeds_of(steps_of(metric, [1.5] * count))])[0].traces
        assert trace["mode"] == ("lines+markers" if count < 3 else "lines")


@pytest.mark.parametrize("metric", ALONE)
def test_fractions_are_percentages_of_an_axis_that_begins_at_0(metric: str) -> None:
    (chart,) = charts_of([seeds_of(steps_of(metric, [0.25, 0.5]))])
    if metric.endswith("_fraction"):
        assert chart.axis["tickformat"] == ".2~%" and chart.axis["rangemode"] == "tozero"
        assert chart.axis["autorangeoptions"] == {"minallowed": 0, "include": 0.01}
    else:
        assert "tickformat" not in chart.axis


def test_pass_at_1_has_its_errors_and_goes_from_evaluation_to_evaluation() -> None:
    trace = named(titled([seeds_of(whole())], "Reward and pass@1"), PASS)
    assert (trace["x"], trace["y"]) == ([0, 3, 6], [0.25, 0.28, 0.31])
    assert trace["error_y"]["array"] == [0.02, 0.05, 0.08]


def test_pass_at_1_of_seeds_has_their_spread_in_place_of_its_errors() -> None:
    chart, deviation = titled([seeds_of(whole(0), whole(1))], "Reward and pass@1"), 0.001 / math.sqrt(2)
    spread, trace = (one for one in chart.traces if one["name"] == PASS)
    assert (trace["x"], trace["y"][:2]) == ([0, 3, 6], [0.2505, 0.2805])
    assert trace["customdata"][0] == pytest.approx(deviation, rel=1e-5) and "error_y" not in trace
    assert spread["x"] == [0, 3, 6, 6, 3, 0]  # one area, though the steps between have no evaluation
    assert spread["y"][0] == pytest.approx(0.2505 - deviation) and spread["y"][-1] == pytest.approx(0.2505 + deviation)


def test_each_evaluated_set_has_its_curve_with_its_own_errors() -> None:
    sets = ("evaluation/pass_at_1/pass_at_1", "evaluation/b/pass_at_1")
    log: list[dict[str, Any]] = [{"step": 0, **dict.fromkeys(sets, 0.5), "evaluation/pass_at_1/standard_error": 0.125}]
    (chart,) = charts_of([seeds_of(log)])
    assert list(chart.metrics) == list(sets)
    assert [trace["error_y"]["array"] for trace in chart.traces] == [[0.125], [None]]


def test_the_held_out_reward_has_a_curve_where_it_is_another_number_than_pass_at_1() -> None:
    reward, error = "evaluation/held_out/reward_mean", "evaluation/held_out/reward_standard_error"
    log = [{"step": step, PASS: 0.0, reward: 6.0 + step, error: 0.5} for step in (0, 3)]
    trace = named(titled([seeds_of(log)], "Reward and pass@1"), reward)
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == ([0, 3], [6.0, 9.0], [0.5, 0.5])
    same = titled([seeds_of([{**line, reward: line[PASS]} for line in log])], "Reward and pass@1")
    assert list(same.metrics) == [PASS]


def test_the_stack_has_every_stage_but_never_the_total() -> None:
    chart = titled([seeds_of(whole())], "Seconds a step, by stage")
    assert [trace["name"] for trace in chart.traces] == [f"time/{stage}_seconds" for stage in STAGES]
    assert all(trace["stackgroup"] == "all" for trace in chart.traces)
    assert chart.metrics[-1] == "time/total_seconds" and chart.captions[-1].startswith("time/total_seconds: 15.05 →")
    top = [sum(layer) for layer in zip(*(trace["y"] for trace in chart.traces), strict=True)]
    assert top == pytest.approx([line["time/total_seconds"] for line in whole()[1:]])


def test_several_arms_are_compared_by_their_totals() -> None:
    chart = titled(arms_with(steps=7), "Seconds a step")
    assert list(chart.metrics) == ["time/total_seconds"]
    assert "Seconds a step, by stage" not in [chart.title for chart in charts_of(arms_with(steps=7))]


def test_memory_is_told_in_mib_with_its_spread() -> None:
    chart = titled([seeds_of(whole(0), whole(1))], "Peak memory, MiB")
    trace = named(chart, "memory/peak_bytes")
    assert trace["y"] == [106.0, 107.0, 108.0, 109.0, 110.0, 111.0]
    assert trace["customdata"] == [pytest.approx(10 / math.sqrt(2), rel=1e-5)] * 6
    assert chart.captions == ["memory/peak_bytes: 106 → 111 ± 7.1 (from 106 to 111, median 108.5)"]


def test_the_band_of_the_seeds_is_a_deviation_up_and_down() -> None:
    log = [steps_of("policy/entropy", values) for values in ([1.0, 2.0, None, 1.0], [3.0, 2.0, None, None])]
    *bands, line = charts_of([seeds_of(*log)])[0].traces
    assert line["y"] == [2.0, 2.0, None, 1.0] and line["customdata"] == [pytest.approx(1.41421), 0.0, None, None]
    assert [band["x"] for band in bands] == [[1, 2, 2, 1], [4, 4]]
    assert bands[0]["y"] == pytest.approx([2 - 2**0.5, 2, 2, 2 + 2**0.5], rel=1e-5) and bands[1]["y"] == [1.0, 1.0]
    assert all(band["fill"] == "toself" and band["showlegend"] is False for band in bands)


def test_the_quantiles_are_three_bands_around_the_middle() -> None:
    *bands, middle = titled([seeds_of(whole())], OF_LISTS["ratio/sequence_quantiles"]).traces
    at_first = [(band["y"][0], band["y"][-1]) for band in bands]
    expected = [(low, high) for low, high in zip(QUANTILES, reversed(QUANTILES), strict=True) if low < high]
    assert at_first == [(number(low, 1), number(high, 1)) for low, high in expected]
    assert middle["y"] == [number(QUANTILES[3], step) for step in range(1, 7)]


def test_the_middle_says_every_quantile_of_its_step() -> None:
    for arms, label in (([seeds_of(whole())], "middle (50 %)"), (arms_with(steps=7), "base (2 seeds)")):
        (chart,) = [one for one in charts_of(arms) if one.title.startswith("Sequence ratio s")]
        middle, few = named(chart, label), 0.0 if len(arms) == 1 else 0.0005
        for step, told in zip(middle["x"], middle["customdata"], strict=True):
            assert list(told) == pytest.approx([number(base, step) + few for base in QUANTILES], abs=1e-6)
        shown = ((0, "1 %"), (1, "5 %"), (2, "25 %"), (4, "75 %"), (5, "95 %"), (6, "99 %"))
        told = ", ".join(f"{share}: %{{customdata[{place}]:.4g}}" for place, share in shown)
        assert middle["hovertemplate"] == f"%{{y:.4g}} ({told})"


def test_the_quantiles_of_several_arms_are_one_band_each() -> None:
    chart = titled(arms_with(steps=7), "Sequence ratio s: 5–95 % of the sequences, and the middle")
    assert [trace["meta"]["colour"] for trace in chart.traces] == [0, 0, 1, 1]
    assert chart.captions[1].startswith("base (2 seeds), 5 %: 0.9405 → 0.9905 ± ")
    assert chart.captions[12].startswith("other (2 seeds), 95 %: 1.03")


def test_the_layers_are_a_map_with_a_row_each() -> None:
    chart = titled([seeds_of(whole())], OF_LISTS[LAYERS])
    (trace,) = chart.traces
    assert (trace["y"], trace["x"]) == (["layer 0", "layer 1", "layer 2"], [1, 2, 3, 4, 5, 6])
    assert [row[0] for row in trace["z"]] == [0.11, 0.21, 0.31] and trace["z"][2][5] == 0.36
    assert chart.captions[1] == "layer 1: 0.21 → 0.26 (from 0.21 to 0.26, median 0.235)"
    titles = [chart.title for chart in charts_of(arms_with(steps=7)) if "by layer" in chart.title]
    assert titles == [f"Experts that an update changes, by layer: {label} (2 seeds)" for label in ("base", "other")]


def test_the_maps_of_several_arms_have_the_same_colours() -> None:
    logs = [steps_of(LAYERS, [[0.1, size], None, [0.05, None]]) for size in (0.25, 0.75, 0.5)]
    arms = arms_of([run_of(log, name=str(steps), settings={"steps": steps}) for steps, log in enumerate(logs)])
    maps = [chart.traces[0] for chart in charts_of(arms)]
    assert [max(row[0] for row in one["z"]) for one in maps] == [0.25, 0.75, 0.5]
    assert [(one["zmin"], one["zmax"]) for one in maps] == [(0.0, 0.75)] * 3


@pytest.mark.parametrize(
    ("most", "steps"), [(18, [1, 2, 3, 4, 5, 6]), (17, [1, 3, 5]), (9, [1, 3, 5]), (8, [1, 4]), (1, [1])]
)
def test_a_map_of_too_many_cells_has_fewer_steps(most: int, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts_module, "_MOST_CELLS", most)
    chart = titled([seeds_of(whole())], OF_LISTS[LAYERS])
    (trace,) = chart.traces
    assert trace["x"] == steps and trace["z"][1] == [number(0.2, step) for step in steps]
    assert chart.captions[1] == "layer 1: 0.21 → 0.26 (from 0.21 to 0.26, median 0.235)"  # of all steps


def test_a_map_has_at_most_a_hundred_thousand_cells() -> None:
    (trace,) = titled([seeds_of(steps_of(LAYERS, [[0.5] * 100] * 1500))], OF_LISTS[LAYERS]).traces
    assert len(trace["y"]) == 100 and len(trace["x"]) == 750


@pytest.mark.parametrize(("length", "places"), [(32, range(32)), (33, range(0, 33, 2)), (97, range(0, 97, 4))])
def test_of_a_long_list_evenly_spread_numbers_are_drawn(length: int, places: range) -> None:
    (chart,) = every_metric([seeds_of(steps_of("x", [[float(place) for place in range(length)]] * 3))]).values()
    assert [trace["name"] for trace in chart.traces] == [f"x/{place}" for place in places]
    assert [trace["y"][0] for trace in chart.traces] == list(places) and len(chart.traces) <= 32


def test_a_caption_has_the_first_the_last_the_extremes_and_the_median() -> None:
    (chart,) = charts_of([seeds_of(steps_of("reward/mean", [None, 0.5, -1.0, 12345.678, None, 2.0, 0.25, ...]))])
    assert chart.captions == ["reward/mean: 0.5 → 0.25 (from -1 to 1.235e+04, median 0.5)"]


def test_a_caption_of_seeds_is_of_their_mean_and_one_of_arms_names_the_arm() -> None:
    chart = titled(arms_with(steps=7), "Clipped, by sequence and by token")
    assert [caption.split(" →")[0] for caption in chart.captions] == [
        *("base (2 seeds): clip/sequence_fraction: 0.4105", "base (2 seeds): clip/token_fraction: 0.1605"),
        *("other (2 seeds): clip/sequence_fraction: 0.4105", "other (2 seeds): clip/token_fraction: 0.1605"),
    ]


def test_every_number_of_the_file_can_be_chosen() -> None:
    log = whole()
    log[2] |= {"x/by_mini_batch": [[1.0, 2.0], [3.0, 4.0]], "reward/my fn/mean": 1, "words": "none", "off": None}
    found = every_metric([seeds_of(log)])
    keys = {name for line in log for name in line} - {"step", "words", "off"}
    assert found.keys() == keys
    assert all(list(chart.metrics) == [name] and chart.title == name for name, chart in found.items())
    assert [trace["name"] for trace in found["x/by_mini_batch"].traces] == [
        f"x/by_mini_batch/{one}/{two}" for one in (0, 1) for two in (0, 1)
    ]
    assert [trace["y"][1] for trace in found["x/by_mini_batch"].traces] == [1.0, 2.0, 3.0, 4.0]
    assert [trace["name"] for trace in found[LAYERS].traces] == [f"{LAYERS}/{layer}" for layer in range(3)]


def test_curves_of_one_chart_are_told_apart_by_name_and_by_colour_or_dash() -> None:
    one, two = [seeds_of(whole())], arms_with(steps=7)
    for chart in [*charts_of(one), *every_metric(one).values(), *charts_of(two)]:
        lines = [trace for trace in chart.traces if "fill" not in trace and trace["type"] == "scatter"]
        assert len({trace["name"] for trace in lines}) == len(lines), chart.title
        looks = {(trace["meta"]["colour"], trace["line"].get("dash")) for trace in lines}
        assert len(looks) == len(lines), chart.title


@pytest.mark.parametrize("seeds", [1, 2])
def test_more_arms_than_colours_are_told_apart_by_their_dashes_too(seeds: int) -> None:
    arms = arms_of(
        [
            run_of(whole(seed), name=f"{steps}-{seed}", settings={"steps": steps, "seed": seed})
            for steps in range(10, 19)
            for seed in range(seeds)
        ]
    )
    assert len(arms) == 9
    for chart in charts_of(arms):
        lines = [trace for trace in chart.traces if "fill" not in trace and trace["type"] == "scatter"]
        looks = {(trace["meta"]["colour"] % COLOURS, trace["line"]["dash"]) for trace in lines}
        assert len(looks) == len(lines), chart.title
    of_lists = [trace for trace in every_metric(arms)[LAYERS].traces if trace["name"].endswith("/0")]
    dashes = [trace["line"]["dash"] for trace in of_lists if "fill" not in trace]
    assert len(dashes) == 9 and dashes[0] != dashes[7] and dashes[1] != dashes[8]


def test_the_page_has_as_many_colours_as_the_charts_suppose() -> None:
    (palettes,) = re.findall(r"const PALETTES = \{(.*?)\};", asset("theme.js").decode(), flags=re.DOTALL)
    counts = [len(re.findall("#[0-9a-fA-F]{6}", palette)) for palette in re.findall(r"\[(.*?)\]", palettes, re.DOTALL)]
    assert counts == [COLOURS, COLOURS]


def test_arms_are_told_apart_by_colour() -> None:
    for chart in charts_of(arms_with(steps=7)):
        for trace in chart.traces:
            if trace["type"] == "scatter":
                assert trace["meta"]["colour"] == ("other" in trace["name"]), chart.title


def all_arms() -> list[Sequence[Arm]]:
    odd = [{"step": 3, "reward/mean": None, LAYERS: [None, 0.5], "ratio/sequence_quantiles": [1.0]}]
    seeds = [seeds_of(whole(0), whole(1), whole()[:3])]
    return [[seeds_of(whole())], seeds, arms_with(steps=7), [seeds_of(odd)], arms_of([run_of(whole()), run_of([])])]


@pytest.mark.parametrize("arms", all_arms())
def test_no_number_of_a_figure_is_one_that_json_does_not_know(arms: Sequence[Arm]) -> None:
    for chart in [*charts_of(arms), *every_metric(arms).values()]:
        json.dumps([chart.traces, chart.axis, chart.captions], allow_nan=False)
        for trace in chart.traces:
            rows = trace["z"] if trace["type"] == "heatmap" else [trace["y"]]
            assert all(len(row) == len(trace["x"]) for row in rows)


@pytest.mark.parametrize("arms", all_arms())
def test_the_figures_are_valid_for_plotly(arms: Sequence[Arm]) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for chart in [*charts_of(arms), *every_metric(arms).values()]:
        graph_objects.Figure(data=chart.traces, layout={"yaxis": chart.axis})


def test_numbers_are_rounded_to_what_can_be_read_off() -> None:
    (trace,) = charts_of([seeds_of(steps_of("reward/mean", [1 / 3, 123456.789, 1.23456789e-9]))])[0].traces
    assert trace["y"] == [0.333333, 123457.0, 1.23457e-9]
