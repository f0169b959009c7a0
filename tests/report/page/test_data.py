"""The JSON that the page draws: columns of numbers by step, rounded, thinned where there are very many, and words."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import run_of, seeds_of
from tests.report.page.made_runs import begun, ended, metrics_line

from gspo.metrics.definitions import families
from gspo.report.page.data import MOST_CURVES, rounded, run_data


def run_in(*runs: Any) -> dict[str, Any]:
    """The first run of the page's data, as a browser reads it."""
    shown: dict[str, Any] = json.loads(json.dumps(run_data(runs), allow_nan=False))["runs"][0]
    return shown


def test_each_metric_is_a_column_with_a_place_for_each_step() -> None:
    log = [metrics_line(step) for step in range(7)]
    run = run_in(run_of(log))
    assert run["steps"] == [*range(7)]
    assert run["columns"]["reward/mean"] == [None, *(line["reward/mean"] for line in log[1:])]
    assert run["columns"]["policy/entropy"][4] is None  # a gap
    assert [step for step, value in enumerate(run["columns"]["evaluation/held_out/pass_at_1"]) if value] == [0, 3, 6]
    assert all(len(column) == 7 for column in run["columns"].values())
    assert set(log[1]) - {"step"} <= set(run["columns"])


def test_a_list_is_a_row_of_its_numbers_and_those_of_lists_in_it() -> None:
    run = run_in(run_of([{"step": 1, "x": [1.5, None, 2.5], "y": [[1], [2, 3]]}, {"step": 2, "x": [3] * 100}]))
    assert run["columns"] == {"x": [[1.5, None, 2.5], [3] * MOST_CURVES], "y": [[1, 2, 3], None]}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123456789, 0.12346),
        (1.0003456789, 1.000346),  # a ratio: its clip range is in ten-thousandths
        (0.9996543, 0.999654),
        (-1234567.0, -1234600),
        (3, 3),
        (4.0, 4),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (1e300, None),
        (10**400, None),
        ("x", None),
    ],
)
def test_a_number_has_the_digits_that_a_curve_shows(value: Any, shown: Any) -> None:
    assert rounded(value) == shown


def test_a_column_without_any_number_is_left_out() -> None:
    assert run_in(run_of([{"step": 1, "x": None, "y": float("nan"), "z": 1.0}]))["columns"] == {"z": [1]}


@pytest.mark.parametrize(("max_staleness", "stage"), [(0, "rollout"), (1, "total")])
def test_tokens_and_time_so_far_stand_beside_the_steps(max_staleness: int, stage: str) -> None:
    rate, seconds = "throughput/generated_tokens_per_second", f"time/{stage}_seconds"
    log: list[dict[str, Any]] = [
        {"step": 0, "time/elapsed_seconds": 5.0},
        {"step": 1, rate: 100.0, seconds: 2.0, "time/elapsed_seconds": 8.0},
        {"step": 2, rate: None, seconds: 2.0},
        {"step": 3, rate: 50.0, seconds: 3.0, "time/elapsed_seconds": 20.0},
    ]
    run = run_in(run_of(log, settings={"rollout": {"max_staleness": max_staleness}}))
    assert (
        run["tokens"] == [0, 200, 200, 350]
        and run["minutes"] == [0.083333, 0.13333, None, 0.33333]
        and run["time"] == "0.333 min"
    )


def test_arms_are_places_of_runs_and_differences_are_of_arms() -> None:
    runs = [run_of(name=name, settings={"seed": seed, "steps": steps}) for name, seed, steps in ARMS]
    whole = run_data(runs)
    assert whole["arms"] == [{"label": "a (2 seeds)", "runs": [0, 2]}, {"label": "b", "runs": [1]}]
    assert whole["differences"] == [("steps", ["5", "6"])] and [run["seed"] for run in whole["runs"]] == ["0", "0", "1"]
    assert run_data(seeds_of([], []).runs)["differences"] == []


ARMS = (("a-0", 0, 5), ("b", 0, 6), ("a-1", 1, 5))


def test_runs_of_one_name_are_told_apart_by_their_directories() -> None:
    runs = [run_of(name="same", path=Path(place)) for place in ("x", "y")] + [run_of(name="other")]
    assert [run["label"] for run in run_data(runs)["runs"]] == ["x", "y", "other"]


def test_the_metrics_of_the_runs_have_their_definitions() -> None:
    log = [{"step": 1, "reward/mean": 1.0, "evaluation/a b/pass_at_1": 0.5, "mine": 1.0, "reward/f/mean": 1.0}]
    definitions = run_data([run_of(log)])["definitions"]
    general = {"reward/mean": "reward/mean", "evaluation/a b/pass_at_1": "evaluation/<set>/pass_at_1"}
    assert {name: known for name, (known, _, _) in definitions.items()} == {
        **general,
        "reward/f/mean": "reward/<function>/mean",
    }
    known = {name: definition for family in families() for name, definition in family.metrics.items()}
    for name, text, healthy in definitions.values():
        assert (known[name].text, known[name].healthy) == (text, healthy)


def test_the_steps_after_which_a_run_was_resumed_are_there() -> None:
    history = [begun(), ended("stopped"), begun(event="resumed"), ended(), begun(event="resumed", step=3), ended()]
    assert run_in(run_of([metrics_line(1)], history=history))["resumed"] == [3]


@pytest.mark.parametrize(("level", "clips"), [("sequence", True), ("sequence_token", True), ("token", False)])
def test_the_clip_range_is_drawn_where_it_is_of_the_sequence_ratio(level: str, clips: bool) -> None:
    assert run_in(run_of(settings={"actor": {"importance_sampling_level": level}}))["clips_sequences"] is clips


def test_recipes_of_other_versions_are_shown_too() -> None:
    odd: list[dict[str, Any]] = [{"actor": None}, {"actor": 3, "seed": None}, {"queries": [], "reward": {}}]
    for settings in odd:
        assert run_in(run_of(settings=settings))["steps"] == []


def test_what_cannot_be_written_as_json_is_no_number(tmp_path: Path) -> None:
    line = {"step": 1, "reward/mean": float("inf"), "x": [[float("nan")], 1.0]}
    run = replace(run_of([line]), path=tmp_path)
    assert run_in(run)["columns"] == {"x": [[None, 1]]}
