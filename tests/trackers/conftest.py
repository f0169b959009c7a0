"""Made runs, a tracker that does as it is told, and no real one that reaches a network or a home directory."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.trackers.fake import PATIENCE, FakeTracker
from tests.trackers.made import MadeRun

from gspo.trackers import tracker


@pytest.fixture(scope="session", autouse=True)
def _at_home_in_a_temporary_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """trackio reads the place of its database once, at import."""
    home = str(tmp_path_factory.mktemp("home"))
    wandb = {f"WANDB_{name}_DIR": home for name in ("CONFIG", "CACHE", "DATA")}
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
            patch.delenv(name)
        for name, value in {**wandb, "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}.items():
            patch.setenv(name, value)
        patch.setenv("TRACKIO_DIR", home)
        yield


@pytest.fixture
def made_run(tmp_path: Path) -> Callable[..., MadeRun]:
    """A run's directory under a name, with the recipe's keys given; its project is this test's own."""
    return lambda name="made", **recipe: MadeRun(tmp_path / name, project=tmp_path.name, **recipe)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTracker]:
    """Stands in for wandb, as if every tracker's package were installed."""
    fake = FakeTracker()
    monkeypatch.setitem(tracker.OPENERS, "wandb", fake.open)
    monkeypatch.setattr(tracker, "find_spec", _found)
    yield fake
    fake.let_go.set()
    for thread in threading.enumerate():  # or it would open the next test's tracker
        if thread.name == "wandb":
            thread.join(PATIENCE)


def _found(name: str) -> Any:
    return SimpleNamespace(origin=name)
