"""Training with trackers: the same run, whatever they do."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import GRADIENT, TINY, break_off, differing, recipe_of, result, train
from tests.trackers.fake import PATIENCE, FakeTracker

from gspo import cli
from gspo.trackers import send

BRIEF = ("cold_start.steps=0", "evaluation.num_queries=0")


@pytest.fixture(autouse=True)
def _patient(own_directory: None, format_in_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "WAIT_SECONDS", PATIENCE)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that training announces to its trackers."""
    numbers: list[int] = []

    @contextmanager
    def recorded(*arguments: Any) -> Iterator[Callable[[int], None]]:
        with send.tracked(*arguments) as announce:

            def record(step: int) -> None:
                numbers.append(step)
                announce(step)

            yield record

    monkeypatch.setattr(import_module("gspo.train"), "tracked", recorded)
    return numbers


def test_trackers_change_nothing_of_a_run(fake: FakeTracker, announced: list[int]) -> None:
    installed = [name for name in ("tensorboard", "trackio") if find_spec(name)]
    fake.fails["log"] = ConnectionError("no such host")
    train(recipe_of("untracked", *BRIEF))
    train(recipe_of("tracked", *BRIEF, f"report.trackers={json.dumps(['wandb', *installed])}"))
    assert differing(result("untracked"), result("tracked")) == []
    assert fake.opened == [None] and fake.steps == []
    assert announced == [1, 2, 3, 1, 2, 3], "a step is sent when it is written, not at the end of the run"
    for name in installed:
        state = json.loads(Path("runs", "tracked", "trackers", f"{name}.json").read_text())
        assert state["step"] == 3 and state["closed"]


def test_a_run_that_is_ended_while_its_tracker_hangs_is_saved_and_goes_on_in_the_same_run(
    fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of("a", *BRIEF, "report.trackers=[wandb]")
    with monkeypatch.context() as patch:
        patch.setattr(send, "STOPPED_SECONDS", 0.01)
        fake.hangs = "finish"
        break_off(monkeypatch, recipe, GRADIENT, 3)
    fake.hangs = ""
    fake.let_go.set()
    train(recipe, resume=True)
    assert fake.steps == [1, 2, 3]
    assert fake.opened == [None, "number 1"]


def test_a_tracker_that_is_not_installed_is_refused_before_anything_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert cli.main(["train", str(TINY), "report.trackers=[trackio]", "reward.0.function=absent"]) == 2
    said = capsys.readouterr().err
    assert "report.trackers: the tracker trackio needs" in said and "pip install trackio" in said
    assert not Path("runs").exists()
