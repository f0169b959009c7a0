"""Training with trackers that fail, hang or die: the same run, an exit code of 0, and a note."""

import json
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from tests.breaking_off import TINY, logged
from tests.faults.laboratory import Laboratory, Server
from tests.trackers.fake import FakeWandb, sent

import gspo
from gspo import cli
from gspo.recipe.load import load_recipe
from gspo.run.console import Display
from gspo.trackers import followers

SECONDS = 60


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(followers, "WAIT_SECONDS", SECONDS)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Stands in for wandb."""
    return FakeWandb(tmp_path / "fake", monkeypatch)


def train(name: str, *overrides: str) -> str:
    """Train on rows and a reward from Python, which are there at once; what was said."""
    text = StringIO()
    recipe = load_recipe(TINY, [f"name={name}", "cold_start.steps=0", "evaluation.num_queries=0", *overrides])
    rows = [{"prompt": f"{number} + {number} ="} for number in range(8)]
    display = Display(Console(file=text, width=300))
    gspo.train(recipe, queries=rows, reward=lambda completions, **_: [len(one) for one in completions], display=display)
    return text.getvalue()


HOW_IT_GOES = {
    "raises": "tracker wandb has failed (ConnectionError: no such host): has 0 of 2 steps; the rest: gspo track runs/",
    "hangs": "tracker wandb was not done in time: has 0 of 2 steps; the rest: gspo track runs/x5 --to wandb",
    "dies": "tracker wandb has failed (it has said nothing): has 1 of 2 steps, not all of them for certain; the rest",
    "fails at the end": "has failed (TimeoutError: no answer): has 2 of 2 steps, not all of them for certain",
    "": "sending what is left to wandb",
}


def test_a_tracker_that_misbehaves_changes_nothing_of_the_run(fake: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    train("untracked")
    for mischief, note in HOW_IT_GOES.items():
        fake.misbehave(mischief)
        with monkeypatch.context() as patch:
            patch.setattr(followers, "WAIT_SECONDS", 0.5 if mischief == "hangs" else SECONDS)
            said = train(f"x{len(mischief)}", "report.trackers=[wandb]")
        assert note in said, (mischief, said)
        assert ("gspo track" in said) == bool(mischief)
        metrics = Path("runs", f"x{len(mischief)}", "metrics.jsonl")
        assert logged(metrics) == logged(Path("runs/untracked/metrics.jsonl"))
    assert [line[1] for line in sent(Path("runs/x0"))] == [1, 2]


def test_the_command_ends_well_though_its_tracker_fails(fake: FakeWandb, capsys: pytest.CaptureFixture[str]) -> None:
    fake.misbehave("raises")
    assert cli.main(["train", str(TINY), "report.trackers=[wandb]", "cold_start.steps=0"]) == 0
    assert "tracker wandb has failed" in capsys.readouterr().out


def test_a_tracker_that_is_not_installed_is_refused_before_anything_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert cli.main(["train", str(TINY), "report.trackers=[trackio]", "reward.0.function=absent"]) == 2
    said = capsys.readouterr().err
    assert "report.trackers: the tracker trackio needs" in said and "pip install trackio" in said
    assert not Path("runs").exists()


@pytest.fixture
def laboratory(fake: FakeWandb, tmp_path: Path) -> Iterator[Laboratory]:
    """Runs that are killed for real, with the fake wandb."""
    server = Server()
    yield Laboratory(server, tmp_path / "laboratory")
    server.close()


def test_a_run_that_was_killed_goes_on_in_the_same_run_of_its_tracker(laboratory: Laboratory) -> None:
    tracked = ("report.trackers=[wandb]", "checkpoint.every=2", "evaluation.num_queries=0")
    # In step 4, when step 3 has been sent that the checkpoint does not know: 3 cold updates, then 2 a step.
    assert laboratory.train(*tracked, fault=("signal_at", {"place": "optimizer step", "count": 10})) == -9
    assert [line["step"] for line in laboratory.lines()] == [1, 2, 3]
    state, deadline = laboratory.run / "trackers" / "wandb.json", time.monotonic() + SECONDS
    while not (state.exists() and json.loads(state.read_text())["closed"]):  # it ends by itself
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [line[1] for line in sent(laboratory.run)] == [1, 2, 3]
    assert laboratory.resume() == 0, laboratory.said
    assert len({line[0] for line in sent(laboratory.run)}) == 1
    assert [line[1] for line in sent(laboratory.run)] == [1, 2, 3, 4]
    rewards = [line["reward/mean"] for line in laboratory.lines()]
    assert [line[2]["reward/mean"] for line in sent(laboratory.run)] == rewards
