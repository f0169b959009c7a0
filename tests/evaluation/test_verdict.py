"""Which function judges a response: the first in the recipe's order that applies to it, whether or not it failed."""

import pytest

from gspo.evaluation.held_out import verdict
from gspo.types import Failure, Score

FAILED = Failure(kind="raised", message="reward function math: no")


@pytest.mark.parametrize(
    ("parts", "failed", "judge", "passed"),
    [
        ({"math": 1.0, "format": 0.0}, (), "math", True),
        ({"math": 0.0, "format": 1.0}, (), "math", False),  # format does not make up for a wrong answer
        ({"math": None, "code": 1.0}, (), "code", True),  # of two data sets, each with a verifier
        ({"math": None, "code": 0.99}, (), "code", False),
        ({"math": None, "format": 1.0}, ("math",), "math", False),  # nor for one that could not be looked at
        ({"math": None, "code": None}, ("code",), "code", False),
        ({"math": 1.0, "format": None}, ("format",), "math", True),
        ({"math": None, "code": None}, (), None, None),
    ],
)
def test_the_first_function_that_applies_judges(
    parts: dict[str, float | None], failed: tuple[str, ...], judge: str | None, passed: bool | None
) -> None:
    score = Score(reward=None, parts=parts, failures=dict.fromkeys(failed, FAILED))
    function, number = verdict(score)
    assert function == judge and (None if function is None else number >= 1.0) is passed
