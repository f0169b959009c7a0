"""Each tracker for real: the numbers, the recipe and the samples in its own storage, once, in one run."""

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from tests.trackers.made import COLUMNS, HOSTILE, NUMBERS, MadeRun
from tests.trackers.stored import read_stored

TRACKERS = ("tensorboard", "trackio", "wandb")


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest) -> str:
    """The name of a tracker that is installed."""
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def run(made_run: Callable[..., MadeRun]) -> MadeRun:
    """A run of 30 steps, three of which are done, and an evaluation before."""
    made = made_run(steps=30)
    made.event("begun")
    for step in range(4):
        made.step(step, loss=step / 4)
    made.event("ended", how="stopped")
    return made


def expected(steps: range) -> list[tuple[int, dict[str, float]]]:
    return [(step, {**NUMBERS, "policy/loss": step / 4}) for step in steps]


def test_a_tracker_has_the_numbers_the_recipe_and_the_samples(tracker: str, run: MadeRun, gspo: Any) -> None:
    done = gspo("track", run.path, "--to", tracker)
    assert done.returncode == 0, done.stderr
    assert f"tracker {tracker}: 4 step(s) sent; it has the run up to step 3" in done.stdout
    stored = read_stored(tracker, run.path)
    assert stored.rows == expected(range(4))
    recipe = yaml.safe_load((run.path / "recipe.yaml").read_text())
    assert {key: value for key, value in stored.config.items() if not key.startswith("_")} == recipe
    assert set(stored.tables) == {2, 3}  # ⌈30 · k / 20⌉
    if tracker == "tensorboard":
        return  # whose Markdown has a test of its own
    for rows in stored.tables.values():
        assert [row["query"] for row in rows] == [f"q:{place}" for place in range(8)]
        assert [row["reward"] for row in rows] == list(range(8))
        assert all(list(row) == COLUMNS and row["completion"] == HOSTILE for row in rows)
        assert all(row["sequence_ratio"] is None and row["advantage"] == -0.5 for row in rows)


def test_what_was_sent_is_not_sent_again_and_what_is_new_goes_to_the_same_run(
    tracker: str, run: MadeRun, gspo: Any
) -> None:
    gspo("track", run.path, "--to", tracker)
    (first,) = read_stored(tracker, run.path).runs
    again = gspo("track", run.path, "--to", tracker)
    assert f"tracker {tracker}: nothing new to send; it has the run up to step 3" in again.stdout
    run.step(4, loss=1.0)
    assert gspo("track", run.path, "--to", tracker).returncode == 0
    stored = read_stored(tracker, run.path)
    assert stored.runs == {first}
    assert stored.rows == expected(range(5))
    sent = json.loads((run.path / "trackers" / f"{tracker}.json").read_text())
    assert sent == {"run": first, "step": 4, "closed": True}


def test_two_runs_of_one_name_stay_two(tracker: str, run: MadeRun, gspo: Any, made_run: Callable[..., MadeRun]) -> None:
    other = made_run("elsewhere/made")
    other.step(1, loss=0.5)
    gspo("track", run.path, "--to", tracker)
    gspo("track", other.path, "--to", tracker)
    run.step(4, loss=1.0)
    assert gspo("track", run.path, "--to", tracker).returncode == 0
    stored = read_stored(tracker, run.path)
    number = json.loads((run.path / "trackers" / f"{tracker}.json").read_text())["run"]
    assert [row for row, of in zip(stored.rows, stored.run_of_rows, strict=True) if of == number] == expected(range(5))


def test_trackio_is_asked_what_it_has_where_it_was_not_closed(run: MadeRun, gspo: Any) -> None:
    pytest.importorskip("trackio")
    gspo("track", run.path, "--to", "trackio")
    state = run.path / "trackers" / "trackio.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "step": 1, "closed": False}))
    gspo("track", run.path, "--to", "trackio")
    assert read_stored("trackio", run.path).steps == [0, 1, 2, 3]
    state.write_text(json.dumps({**json.loads(state.read_text()), "step": 9, "closed": False}))
    run.step(4, loss=1.0)
    gspo("track", run.path, "--to", "trackio")
    assert read_stored("trackio", run.path).rows == expected(range(5))


def test_wandb_without_a_login_fails_and_says_so(run: MadeRun, gspo: Any, environment: dict[str, str]) -> None:
    pytest.importorskip("wandb")
    del environment["WANDB_MODE"]
    done = gspo("track", run.path, "--to", "wandb", "--to", "tensorboard")
    assert done.returncode == 1
    assert "failed: tracker wandb: " in done.stderr and "wandb login" in done.stderr
    assert "tracker tensorboard: 4 step(s) sent" in done.stdout, "the others go on"


def test_tensorboard_shows_a_hostile_completion_as_text(run: MadeRun, gspo: Any) -> None:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    gspo("track", run.path, "--to", "tensorboard")
    shown = plugin_util.markdown_to_safe_html(read_stored("tensorboard", run.path).tables[3])
    assert set(re.findall(r"<(\w+)", shown)) == {"table", "thead", "tbody", "tr", "th", "td", "br"}
    header, *rows = re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
    assert re.findall(r"<th>(.*?)</th>", header) == COLUMNS
    assert len(rows) == 8
    for place, row in enumerate(rows):
        cells = [html.unescape(cell.replace("<br>", "\n")) for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)]
        completion = HOSTILE.replace("\x02", "<02>").replace("\t", "<09>")
        assert cells == [f"q:{place}", "1+1=", completion, str(place), "-0.5", "", "0", "stop"]
