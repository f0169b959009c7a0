"""Runs that lie in a directory of the test's own, and are broken off where the test says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.breaking_off import break_off


@pytest.fixture(autouse=True)
def _in_place(own_directory: None, format_in_process: None) -> None: ...


@pytest.fixture
def broken_off(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return partial(break_off, monkeypatch)
