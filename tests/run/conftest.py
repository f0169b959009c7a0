"""Runs that lie in a directory of the test's own, and are broken off where the test says."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import break_off


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return partial(break_off, monkeypatch)
