"""Loading is what is tested here: no policy is a copy."""

from collections.abc import Callable

import pytest

from gspo.model.policy import Policy


@pytest.fixture(scope="session")
def new_policy(loaded_policy: Callable[..., Policy]) -> Callable[..., Policy]:
    """A policy that is loaded and proven anew."""
    return loaded_policy
