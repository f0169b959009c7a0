"""Several runs on one page: seeds as mean and standard deviation, arms in the same charts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.report.page.browser import Tab
from tests.report.page.made_runs import NUM_LAYERS, made_run
from tests.report.page.test_browser_charts import READ_FIGURES, Figures

LENGTHS = {"a-0": 6, "a-1": 6, "a-2": 5, "b": 7}  # the steps of each run: only b has a seventh, a-2 no sixth
ARMS = {"a (3 seeds)": ["a-0", "a-1", "a-2"], "b": ["b"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two arms: three seeds of one, of the other a single run, which has no experts."""
    directory = tmp_path_factory.mktemp("arms")
    seeds = {
        name: made_run(directory / name, name=name, seed=number, steps=LENGTHS[name])
        for number, name in enumerate(ARMS["a (3 seeds)"])
    }
    other = made_run(directory / "b", name="b", seed=5, steps=LENGTHS["b"], experts=False, actor={"clip_low": 0.2})
    return {**seeds, "b": other}


@pytest.fixture
def figures(tab: Tab, runs: dict[str, Path]) -> Figures:
    tab.show(*runs.values())
    return dict(tab.run(READ_FIGURES))


def _table(runs: dict[str, Path], names: list[str], metric: str, place: int | None = None) -> dict[int, list[float]]:
    """A metric's numbers by step, of the runs that have one."""
    found: dict[int, list[float]] = {}
    for name in names:
        for text in (runs[name] / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            value = line.get(metric)
            if value is not None:
                found.setdefault(line["step"], []).append(value if place is None else value[place])
    return dict(sorted(found.items()))


def _drawn(traces: list[dict[str, Any]], label: str, *, bands: bool) -> list[dict[str, Any]]:
    return [one for one in traces if one["name"] == label and (one.get("fill") == "toself") is bands]


def _corners(table: dict[int, list[float]], skipped: tuple[int, ...] = ()) -> list[tuple[int, float]]:
    """Those of the band of mean ± standard deviation (n − 1), along below and back above."""
    rows = [(step, np.mean(row), np.std(row, ddof=1) if len(row) > 1 else 0.0) for step, row in table.items()]
    below = [(step, float(mean - spread)) for step, mean, spread in rows if step not in skipped]
    above = [(step, float(mean + spread)) for step, mean, spread in rows if step not in skipped]
    return below + above[::-1]


def _is_about(points: list[tuple[int, float]], expected: list[tuple[int, float]]) -> bool:
    """To the digits that a page has."""
    return np.asarray(points).shape == np.asarray(expected).shape and np.allclose(points, expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("title", "metric"),
    [("Response length, tokens", "response/mean_tokens"), ("Responses cut off", "response/truncated_fraction")],
)
def test_seeds_are_their_mean_within_a_standard_deviation(
    title: str, metric: str, figures: Figures, runs: dict[str, Path]
) -> None:
    for label, names in ARMS.items():
        table = _table(runs, names, metric)
        (curve,) = _drawn(figures[title], label, bands=False)
        means = [(step, float(np.mean(row))) for step, row in table.items()]
        assert _is_about(list(zip(curve["x"], curve["y"], strict=True)), means)
        bands = _drawn(figures[title], label, bands=True)
        assert len(bands) == (1 if len(names) > 1 else 0)
        for band in bands:
            assert _is_about(list(zip(band["x"], band["y"], strict=True)), _corners(table))


def test_pass_at_1_of_seeds_is_one_band_over_the_evaluated_steps(figures: Figures, runs: dict[str, Path]) -> None:
    label = "a (3 seeds): evaluation/held_out/pass_at_1"
    table = _table(runs, ARMS["a (3 seeds)"], "evaluation/held_out/pass_at_1")
    assert list(table) == [0, 3, 6]
    (curve,) = _drawn(figures["Reward and pass@1"], label, bands=False)
    (band,) = _drawn(figures["Reward and pass@1"], label, bands=True)
    means = [(step, float(np.mean(row))) for step, row in table.items()]
    assert _is_about(list(zip(curve["x"], curve["y"], strict=True)), means)
    assert _is_about(list(zip(band["x"], band["y"], strict=True)), _corners(table))


def test_the_arms_are_a_table_of_means_and_deviations(figures: Figures, runs: dict[str, Path], tab: Tab) -> None:
    cells = "(row) => [...row.cells].map((cell) => cell.textContent)"
    rows = tab.run(f"return [...document.querySelectorAll('#overview h3')].find((one) => one.textContent"
                   f".startsWith('Arms, mean ± sd')).nextElementSibling.querySelectorAll('tr').values()"
                   f".map({cells}).toArray()")  # fmt: skip
    metrics = ["evaluation/held_out/pass_at_1", "reward/mean", "response/mean_tokens"]
    assert rows[0] == ["arm", "seeds", *metrics]
    for row, (label, names), seeds in zip(rows[1:], ARMS.items(), ("0, 1, 2", "5"), strict=True):
        assert row[:2] == [label, seeds]
        for cell, metric in zip(row[2:], metrics, strict=True):
            known = list(_table(runs, names, metric).values())
            ends = [
                f"{np.mean(one):.4g}" + (f" ± {np.std(one, ddof=1):.2g}" if len(one) > 1 else "")
                for one in (known[0], known[-1])
            ]
            assert cell == " → ".join(ends)


def test_a_single_run_has_no_table_of_arms(tab: Tab, run: Path) -> None:
    tab.show(run)
    assert "Arms" not in str(tab.find("#overview").get_property("textContent"))


def test_arms_beyond_the_colours_differ_by_dash(tab: Tab, tmp_path: Path) -> None:
    names = [f"arm-{'abcdefghi'[number]}" for number in range(9)]
    tab.open(
        *(
            made_run(tmp_path / name, name=name, steps=3, with_samples=False, actor={"clip_low": 0.001 * place})
            for place, name in enumerate(names, start=1)
        )
    )
    drawn = tab.run(READ_FIGURES)
    title = "Sequence ratio s: 5–95 % of the sequences, and the middle"
    for traces in (drawn["Response length, tokens"], drawn["Reward and pass@1"], drawn[title]):
        lines = [one for one in traces if one.get("fill") != "toself"]
        looks = {one["name"]: (one["line"]["color"], one["line"]["dash"]) for one in lines}
        assert len(looks) == len(set(looks.values())) == len(lines) >= 9
        assert len({colour for colour, _ in looks.values()}) == 7


def test_the_shown_deviation_is_over_the_seeds_that_have_the_step(figures: Figures, runs: dict[str, Path]) -> None:
    table = _table(runs, ARMS["a (3 seeds)"], "response/mean_tokens")
    (curve,) = _drawn(figures["Response length, tokens"], "a (3 seeds)", bands=False)
    assert [len(row) for row in table.values()] == [3, 3, 3, 3, 3, 2]
    assert curve["customdata"] == pytest.approx([float(np.std(row, ddof=1)) for row in table.values()], rel=1e-5)


def test_a_gap_of_all_seeds_parts_the_band(figures: Figures, runs: dict[str, Path]) -> None:
    first, second = _drawn(figures["Entropy, nats a token"], "a (3 seeds)", bands=True)
    table = _table(runs, ARMS["a (3 seeds)"], "policy/entropy")
    assert 4 not in table
    assert _is_about(list(zip(first["x"], first["y"], strict=True)), _corners(table, skipped=(5, 6)))
    assert _is_about(list(zip(second["x"], second["y"], strict=True)), _corners(table, skipped=(1, 2, 3)))
    (curve,) = _drawn(figures["Entropy, nats a token"], "a (3 seeds)", bands=False)
    assert curve["y"][curve["x"].index(4)] is None


def test_a_step_that_only_one_seed_has_is_drawn_without_a_spread(tab: Tab, tmp_path: Path) -> None:
    tab.open(made_run(tmp_path / "s-0", name="s-0", steps=3), made_run(tmp_path / "s-1", name="s-1", seed=1, steps=5))
    traces = tab.run(READ_FIGURES)["Response length, tokens"]
    (curve,) = _drawn(traces, traces[-1]["name"], bands=False)
    assert curve["x"] == [1, 2, 3, 4, 5]
    assert curve["customdata"][3:] == [None, None]
    assert curve["y"][3:] == pytest.approx([30.041, 30.051])  # those of seed 1
    (band,) = _drawn(traces, traces[-1]["name"], bands=True)
    corners = dict(zip(band["x"], zip(band["y"], reversed(band["y"]), strict=True), strict=True))
    assert corners[5] == (pytest.approx(30.051), pytest.approx(30.051))


def test_the_quantiles_of_an_arm_are_its_5_to_95_percent(figures: Figures, runs: dict[str, Path]) -> None:
    traces = figures["Sequence ratio s: 5–95 % of the sequences, and the middle"]
    for label, names in ARMS.items():
        low, middle, high = (_table(runs, names, "ratio/sequence_quantiles", place) for place in (1, 3, 5))
        (band,) = _drawn(traces, label, bands=True)
        along = [(step, float(np.mean(row))) for step, row in low.items()]
        back = [(step, float(np.mean(row))) for step, row in high.items()]
        assert _is_about(list(zip(band["x"], band["y"], strict=True)), along + back[::-1])
        (curve,) = _drawn(traces, label, bands=False)
        assert curve["y"] == pytest.approx([float(np.mean(row)) for row in middle.values()], rel=1e-5)


def test_each_arm_with_experts_has_a_map_of_its_seeds_mean(figures: Figures, runs: dict[str, Path]) -> None:
    (title,) = [title for title in figures if title.startswith("Experts that an update changes, by layer")]
    assert title.endswith(": a (3 seeds)")
    (trace,) = figures[title]
    for layer in range(NUM_LAYERS):
        table = _table(runs, ARMS["a (3 seeds)"], "moe/expert_change_fraction_by_layer", layer)
        assert trace["z"][layer] == pytest.approx([float(np.mean(row)) for row in table.values()], rel=1e-5)


def test_arms_have_one_colour_each_and_the_chart_of_a_second_is_the_whole(
    figures: Figures, runs: dict[str, Path]
) -> None:
    traces = figures["Seconds a step"]
    for label, names in ARMS.items():
        table = _table(runs, names, "time/total_seconds")
        (curve,) = _drawn(traces, label, bands=False)
        assert curve["y"] == pytest.approx([float(np.mean(row)) for row in table.values()], rel=1e-5)
    lines = [
        one for traces in figures.values() for one in traces if one["type"] == "scatter" and "color" in one["line"]
    ]
    colours = {
        label: {one["line"]["color"] for one in lines if one["name"] in (label, f"{label}: reward/mean")}
        for label in ARMS
    }
    assert all(len(found) == 1 for found in colours.values())
    assert colours["b"] != colours["a (3 seeds)"]


def test_where_the_recipes_differ_is_told(figures: Figures, tab: Tab) -> None:
    cells = "(row) => [...row.cells].map((cell) => cell.textContent)"
    rows = tab.run(f"return [...document.querySelectorAll('#differences tr')].map({cells})")
    assert rows[0] == ["key", "a (3 seeds)", "b"]
    assert ["actor.clip_low", "0.003", "0.2"] in rows
    assert ["actor.clip_high", "0.004", "–"] in rows
    assert not any(row[0] in ("seed", "name") for row in rows)
