"""Each tracker for real: the numbers, the recipe and the samples in its own storage, once, in one run."""

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.needs import needs, require
from tests.trackers.made import COLUMNS, HOSTILE, NUMBERS, MadeRun
from tests.trackers.stored import read_stored

from gspo.track import track

TRACKERS = ("tensorboard", "trackio", "wandb")


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest) -> str:
    """The name of a tracker that is installed."""
    require(request.param)
    return str(request.param)


@pytest.fixture
def run(made_run: Callable[..., MadeRun]) -> MadeRun:
    """A run of 30 steps, three of which are done, and an evaluation before."""
    made = made_run(steps=30)
    for step in range(4):
        made.step(step, loss=step / 4)
    return made


def expected(steps: range) -> list[tuple[int, dict[str, float]]]:
    return [(step, {**NUMBERS, "policy/loss": step / 4}) for step in steps]


def send(run: MadeRun, name: str) -> str:
    """Send what is new; what was said."""
    notes: list[str] = []
    track(run.path, [name], note=notes.append)
    return "\n".join(notes)


def test_it_gets_everything_once_in_one_run_and_draws_no_random_number(tracker: str, run: MadeRun) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert send(run, tracker) == f"tracker {tracker}: 4 step(s) sent; it has the run up to step 3"
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert before == after, "a tracker in the training's process must leave the training's random numbers alone"
    stored = read_stored(tracker, run.path)
    (number,) = stored.runs
    assert stored.rows == expected(range(4))
    recipe = yaml.safe_load((run.path / "recipe.yaml").read_text())
    assert {key: value for key, value in stored.config.items() if not key.startswith("_")} == recipe
    assert set(stored.tables) == {2, 3}  # ⌈30 · k / 20⌉
    for rows in stored.tables.values():
        assert [(row["query"], row["reward"]) for row in rows] == [(f"q:{place}", place) for place in range(8)]
        assert all(list(row) == COLUMNS and row["completion"] == HOSTILE for row in rows)
        assert all(row["sequence_ratio"] is None and row["advantage"] == -0.5 for row in rows)

    assert send(run, tracker) == f"tracker {tracker}: nothing new to send; it has the run up to step 3"
    run.step(4, loss=1.0)
    assert "1 step(s) sent" in send(run, tracker)
    stored = read_stored(tracker, run.path)
    assert stored.runs == {number} and stored.rows == expected(range(5))
    assert run.state(tracker) == {"run": number, "step": 4, "closed": True}


def test_two_runs_of_one_name_stay_two(tracker: str, run: MadeRun, made_run: Callable[..., MadeRun]) -> None:
    other = made_run("elsewhere/made")
    other.step(1, loss=0.5)
    send(run, tracker)
    send(other, tracker)
    run.step(4, loss=1.0)
    send(run, tracker)
    stored = read_stored(tracker, run.path)
    number = run.state(tracker)["run"]
    assert [row for row, of in zip(stored.rows, stored.run_of_rows, strict=True) if of == number] == expected(range(5))


@needs("trackio")
def test_trackio_is_asked_what_has_arrived_after_a_kill(run: MadeRun) -> None:
    send(run, "trackio")
    run.state("trackio", step=1, closed=False)
    send(run, "trackio")
    assert read_stored("trackio", run.path).steps == [0, 1, 2, 3]
    run.state("trackio", step=9, closed=False)
    run.step(4, loss=1.0)
    send(run, "trackio")
    assert read_stored("trackio", run.path).rows == expected(range(5))


@needs("tensorboard")
def test_tensorboard_shows_a_hostile_completion_as_text_under_the_name_of_the_run(run: MadeRun) -> None:
    from tensorboard import plugin_util
    from tensorboard.backend.event_processing import event_multiplexer as inspector

    send(run, "tensorboard")
    shown = plugin_util.markdown_to_safe_html(read_stored("tensorboard", run.path).markdown[3])
    assert set(re.findall(r"<(\w+)", shown)) == {"pre", "code"}
    runs: Any = inspector.EventMultiplexer().AddRunsFromDirectory(str(run.path.parent)).Reload().Runs()
    assert set(runs) == {"made"}
