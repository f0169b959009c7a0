"""What the tests of rollouts share with those of the engine."""

from tests.engine.conftest import refilling

__all__ = ["refilling"]
