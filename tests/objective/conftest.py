"""The shapes of all tensors are checked here."""

from collections.abc import Iterator

import pytest
from tests import shapes


@pytest.fixture(autouse=True)
def _shapes_are_checked() -> Iterator[None]:
    with shapes.checked():
        yield
