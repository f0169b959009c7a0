"""One browser for all tests of the page, and the runs that most of them look at."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.report.page.made_runs import made_run

if TYPE_CHECKING:
    from tests.report.page.browser import Tab


@pytest.fixture(scope="session")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Tab"]:
    """Skips the test where there is no Chromium."""
    from tests.report.page.browser import Tab, start

    driver = start(tmp_path_factory.mktemp("browser"))
    yield Tab(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of all its parts."""
    return made_run(tmp_path_factory.mktemp("runs") / "made")
