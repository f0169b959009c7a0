"""The server of runs, a laboratory a test, and the results of unbroken runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.faults.laboratory import Laboratory, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def laboratory(server: Server, tmp_path: Path) -> Laboratory:
    return Laboratory(server, tmp_path / "laboratory")


@pytest.fixture(scope="session")
def unbroken(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The result of an unbroken run with some overrides."""
    known: dict[tuple[str, ...], dict[str, Any]] = {}

    def result(*overrides: str) -> dict[str, Any]:
        if overrides not in known:
            laboratory = Laboratory(server, tmp_path_factory.mktemp("unbroken"))
            assert laboratory.train(*overrides) == 0, laboratory.said
            known[overrides] = laboratory.result()
        return known[overrides]

    return result
