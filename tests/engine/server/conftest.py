"""Fixtures of the tests with real servers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.server import real

from gspo.engine.server.fleet import KEY_VARIABLE


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM; without one the test is skipped."""
    return real.vllm_python()


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    """The key of the tests' servers, as a run finds it."""
    monkeypatch.setenv(KEY_VARIABLE, real.KEY)
    return real.KEY


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory for a file's server."""
    yield tmp_path_factory.mktemp("server")
