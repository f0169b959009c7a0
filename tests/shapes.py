"""The annotations of tensor functions, checked at every call while that is switched on.

A checked call takes longer than the work of a small model, and beartype seconds to make the checks: they are made at
the first checked call of a function. SHAPES=all in the environment, as in `make test-all`, has them on in every test.
Without it they are on in tests/objective and in tests/test_shapes.py, which has a run of each kind.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import update_wrapper
from importlib.util import find_spec
from typing import Any

import jaxtyping
import transformers.modeling_utils  # noqa: F401 - whatever a room imports first is compiled anew under the hook

ROOMS = ["gspo.objective", "gspo.model", "gspo.learner", "gspo.engine", "gspo.rollout", "gspo.evaluation"]
ALWAYS = os.environ.get("SHAPES") == "all"
_switch = {"on": ALWAYS}
_jaxtyped = jaxtyping.jaxtyped
_inner: set[Any] = set()  # the code of functions within functions that have been made


def install() -> None:
    """The rooms' functions are checked from now on where that is on; to be called before gspo is imported."""
    if find_spec("beartype") is None:
        return
    jaxtyping.jaxtyped = _switched  # type: ignore[assignment]  # what the hook puts before each function and class
    jaxtyping.install_import_hook(ROOMS, "beartype.beartype")


@contextmanager
def checked() -> Iterator[None]:
    """Calls within are checked."""
    before, _switch["on"] = _switch["on"], True
    try:
        yield
    finally:
        _switch["on"] = before


def _switched(*, typechecker: Any) -> Callable[[Any], Any]:
    check = _jaxtyped(typechecker=typechecker)

    def decorate(plain: Any) -> Any:
        if not isinstance(plain, type):
            if "<locals>" not in plain.__qualname__:
                return _either(plain, lambda: check(plain))
            # Made anew at each call of the outer function, its check would be, too: the first one of a process has it.
            is_first = plain.__code__ not in _inner
            _inner.add(plain.__code__)
            return check(plain) if ALWAYS and is_first else plain
        if is_dataclass(plain):
            _switch_init(plain, check)
        return plain

    return decorate


def _switch_init(kind: Any, check: Callable[[Any], Any]) -> None:
    """A dataclass's fields are checked as one is made."""
    plain = kind.__init__

    def make_checked() -> Any:
        switching, kind.__init__ = kind.__init__, plain
        check(kind)
        checking, kind.__init__ = kind.__init__, switching
        return checking

    kind.__init__ = _either(plain, make_checked)


def _either(plain: Callable[..., Any], make_checked: Callable[[], Any]) -> Callable[..., Any]:
    """The function itself where nothing is checked, else the one that is made of it."""
    made: list[Callable[..., Any]] = []

    def call(*arguments: Any, **keywords: Any) -> Any:
        if not _switch["on"]:
            return plain(*arguments, **keywords)
        if not made:
            made.append(make_checked())
        return made[0](*arguments, **keywords)

    return update_wrapper(call, plain)
