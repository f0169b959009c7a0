"""What the tests of the engine share."""

from collections.abc import Callable
from typing import Any

import pytest

from gspo.engine.embedded import decoding


@pytest.fixture
def refilling(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], list[int]]:
    """Has the engine take in waiting prompts early, as on a GPU; the list grows by the rows of each taking in."""

    def set_up(decoder: str, look_every: int) -> list[int]:
        monkeypatch.setitem(decoding._REFILL_BELOW, "cpu", 0.75)
        monkeypatch.setitem(decoding._LOOK_EVERY, "cpu", look_every)
        if decoder != "fast":
            monkeypatch.setattr(decoding, "fast_decoder", lambda trunk: None)
        joined: list[int] = []
        join = decoding.Rows.join

        def joining(rows: Any, new: Any) -> Any:
            joined.append(len(new.index))
            return join(rows, new)

        monkeypatch.setattr(decoding.Rows, "join", joining)
        return joined

    return set_up
