"""What is sent of a run: each step once, when it is whole, and never a step that is being written."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.trackers.made import COLUMNS, METRICS, NUMBERS, MadeRun

from gspo.trackers.steps import Step, Steps, metrics_of


@pytest.fixture
def run(made_run: Callable[..., MadeRun]) -> MadeRun:
    """A run of 100 steps, each fifth of which has a table."""
    return made_run(steps=100)


def steps_of(run: MadeRun, *, after: int = -1) -> Steps:
    return Steps(run.path, yaml.safe_load((run.path / "recipe.yaml").read_text()), after=after)


def numbers(found: Any) -> list[int]:
    return [step.number for step in found]


def test_names_are_those_of_the_metrics_and_what_is_no_number_is_left_out() -> None:
    odd = {"a/text": "1", "a/flag": True, "a/nan": float("nan"), "a/infinite": [float("inf"), 1], "a/table": {"b": 1}}
    assert metrics_of({"step": 4, **METRICS, **odd}) == {**NUMBERS, "a/infinite/1": 1}


def test_each_step_is_read_once_as_the_log_grows(run: MadeRun) -> None:
    steps = steps_of(run)
    assert numbers(steps.new(is_over=False)) == []
    run.step(0)
    run.step(1)
    assert numbers(steps.new(is_over=False)) == [0, 1]
    with (run.path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 2, "reward/mean"')
        log.flush()
        assert numbers(steps.new(is_over=False)) == []
        log.write(": 0.5}\nnot json\n[]\n{}\n")
    run.step(3)
    found = [(step.number, step.metrics) for step in steps.new(is_over=False)]
    assert found == [(2, {"reward/mean": 0.5}), (3, NUMBERS)]
    assert numbers(steps_of(run, after=1).new(is_over=False)) == [2, 3]


def test_a_log_that_is_cut_back_and_grows_again_gives_only_what_is_new(run: MadeRun) -> None:
    steps = steps_of(run)
    for step in (1, 2, 3):
        run.step(step, loss=0.0625)
    assert numbers(steps.new(is_over=False)) == [1, 2, 3]
    log = run.path / "metrics.jsonl"
    (run.path / "copy").write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:1]))
    (run.path / "copy").replace(log)
    for step in (2, 3, 4):
        run.step(step)  # times differ: a line is not as long as it was
    assert numbers(steps.new(is_over=False)) == [4]


@pytest.mark.parametrize(("steps", "with_table"), [(3, range(1, 4)), (20, range(1, 21)), (100, range(5, 101, 5))])
def test_at_most_twenty_steps_have_a_table_the_last_among_them(
    made_run: Callable[..., MadeRun], steps: int, with_table: range
) -> None:
    run = made_run(steps=steps)
    for step in range(steps + 1):
        run.step(step)
    found = [step for step in steps_of(run).new(is_over=False) if step.samples]
    assert numbers(found) == list(with_table)
    assert all(len(step.samples) == 8 and list(step.samples[0]) == COLUMNS for step in found)


def test_a_step_with_a_table_waits_for_its_rows(run: MadeRun) -> None:
    steps = steps_of(run)
    run.step(4, rollouts=0)
    run.step(5, rollouts=0)
    assert numbers(steps.new(is_over=False)) == [4]
    run.rollouts(5, 7)
    assert numbers(steps.new(is_over=False)) == []
    run.rollouts(5, 1)
    (step,) = steps.new(is_over=False)
    assert step.number == 5 and len(step.samples) == 8


@pytest.mark.parametrize("why", ["the next step is there", "the run is over", "there are none", "a batch is smaller"])
def test_a_step_does_not_wait_for_rows_that_will_not_come(made_run: Callable[..., MadeRun], why: str) -> None:
    off = {"report": {"rollouts": False}} if why == "there are none" else {}
    run = made_run(steps=2, rollout={"queries_per_step": 2, "group_size": 2}, **off)
    steps = steps_of(run)
    run.step(1, rollouts={"there are none": 0, "a batch is smaller": 4}.get(why, 3))
    if why in ("the next step is there", "the run is over"):
        assert numbers(steps.new(is_over=False)) == []
    if why == "the next step is there":
        run.step(2, rollouts=3)
    found: list[Step] = list(steps.new(is_over=why == "the run is over"))
    assert numbers(found) == [1]
    assert len(found[0].samples) == {"there are none": 0, "a batch is smaller": 4}.get(why, 3)


def test_half_a_character_does_not_stop_a_tracker(run: MadeRun, tmp_path: Path) -> None:
    run.step(5, rollouts=0)
    with (run.path / "metrics.jsonl").open("a") as log:
        log.write('{"step": 6}\n')
    (run.path / "rollouts").mkdir()
    (run.path / "rollouts" / "step_000005.jsonl").write_text('{"completion": "\\ud83d"}\n')
    assert next(iter(steps_of(run).new(is_over=False))).samples[0]["completion"] == "?"
