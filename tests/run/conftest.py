"""Runs that lie in a directory of the test's own, and are broken off where the test says."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import break_off

from gspo.recipe.sections import RewardConfig
from gspo.reward import functions as reward_functions


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return partial(break_off, monkeypatch)


@pytest.fixture(autouse=True)
def _no_process_for_a_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `format` in the test's process: to start one takes a third of a tiny run, and tests/test_train.py does."""
    made = reward_functions._made

    def in_this_process(reward: RewardConfig, *arguments: Any, in_processes: bool, **keywords: Any) -> Any:
        in_processes &= reward.function != "format"
        return made(reward, *arguments, in_processes=in_processes, **keywords)

    monkeypatch.setattr(reward_functions, "_made", in_this_process)
