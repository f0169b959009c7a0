"""Made runs, and the command line in an environment in which no tracker reaches a network or a home directory."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.trackers.made import MadeRun


@pytest.fixture
def made_run(tmp_path: Path) -> Callable[..., MadeRun]:
    """A run's directory under a name, with the recipe's keys given."""
    return lambda name="made", **recipe: MadeRun(tmp_path / name, **recipe)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a process with a tracker: nothing reaches a network or a home directory."""
    home = str(tmp_path / "home")
    wandb = {f"WANDB_{name}_DIR": home for name in ("CONFIG", "CACHE", "DATA")}
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("WANDB_", "TRACKIO_"))},
        **wandb,
        "HOME": home,
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def gspo(environment: dict[str, str]) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run the command line in a process of its own, as trackers keep to themselves what they were told."""

    def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "gspo.cli", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    return run
