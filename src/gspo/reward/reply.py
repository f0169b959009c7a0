"""What came of one call of a reward function, as plain data that passes between processes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from gspo.errors import FailureKind, UserError, encodable
from gspo.recipe.callables import error_line

MAX_REWARD = 1e100  # so that weighted sums, and the squares of them that a deviation takes, are still numbers
MAX_CHARACTERS = 400  # of what a function says of itself: it is written beside every rollout it masks


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One value for each completion, or the reason why there are none.

    Example: Reply(values=[1.0, None, "it returns nan for a completion"]), or
    Reply(kind="raised", what="it raises KeyError: 'answer', at mine.py:2")
    """

    values: list[float | list[float] | str | None] = field(default_factory=list)  # a text says why it is no score
    kind: FailureKind | None = None  # of a call that failed as a whole
    what: str = ""  # how it failed
    user_error: tuple[str, str | None, str | None] | None = None  # what, where, fix: no completion is at fault

    def __post_init__(self) -> None:
        rows = [value if isinstance(value, list) else [value] for value in self.values]
        if not all(abs(number) <= MAX_REWARD for row in rows for number in row if isinstance(number, float)):
            raise ValueError("a number that is no reward")


def timed_out(seconds: float) -> Reply:
    """The reply in place of one that does not come in time."""
    return Reply(kind="timed_out", what=f"it ran over its time limit of {seconds:g} s")


def reply_of(call: Callable[[], Any], function: Callable[..., Any], size: int) -> Reply:
    """Make a call of the function for `size` completions; whatever it raises is in the reply."""
    try:
        return _returned(call(), size)
    except BaseException as error:  # SystemExit too: the trainer must hear of it
        return _raised(error, function)


async def reply_of_coroutine(call: Callable[[], Awaitable[Any]], function: Callable[..., Any], size: int) -> Reply:
    """The same of an async function; a cancelled call raises CancelledError like any other error."""
    try:
        return _returned(await call(), size)
    except BaseException as error:
        return _raised(error, function)


def _returned(values: Any, size: int) -> Reply:
    """The reply of a function that returns these values for `size` completions."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, list | tuple) and len(values) == size:
        return Reply(values=[_score(value) for value in values])
    count = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)[:80]
    return Reply(kind="invalid", what=f"it returns {count} for {size} completion{'s' * (size != 1)}")


def _score(value: Any) -> float | list[float] | str | None:
    plain = None if value is None else _plain(value)
    if plain is None:
        return None
    is_list = isinstance(plain, list | tuple)
    numbers = []
    for place, entry in enumerate(plain if is_list else [plain], 1):
        number = _plain(entry)
        if not isinstance(number, Real) or not abs(float(number)) <= MAX_REWARD:
            which = f" as number {place} of {len(plain)}" if is_list else ""
            return f"it returns {repr(entry)[:80]}{which} for a completion"
        numbers.append(float(number))
    return numbers if is_list else numbers[0]


def _plain(value: Any) -> Any:
    """Without numpy and torch, whose arrays of one number pass for that number."""
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain


def _raised(error: BaseException, function: Callable[..., Any]) -> Reply:
    if isinstance(error, UserError):
        return Reply(user_error=(error.what, error.where, error.fix))
    what = encodable(f"it raises {type(error).__name__}: {error}")[:MAX_CHARACTERS]
    return Reply(kind="raised", what=what + error_line(error, function))
