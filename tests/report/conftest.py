"""What the tests of the terminal's views share."""

from pathlib import Path

import pytest


@pytest.fixture
def plain_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty directory to work in, and no say of the environment in colours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
