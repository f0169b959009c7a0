"""What came of one call of a reward function, as plain data that passes between processes."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from gspo.errors import FailureKind, UserError
from gspo.recipe.callables import error_line

MAX_REWARD = 1e100  # so that weighted sums, and the squares of them that a deviation takes, are still numbers
MAX_CHARACTERS = 400  # of what a function says of itself: it is written beside every rollout it masks


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One value a completion, or why there are none."""

    values: Sequence[float | list[float] | str | None] = ()  # a text says why what came is no score
    kind: FailureKind | None = None  # of a call that failed as a whole
    what: str = ""  # how it failed
    user_error: Sequence[str | None] | None = None  # what, where, fix: the recipe is at fault, not a completion


def read_reply(fields: Any, size: int) -> Reply:
    """The reply that a process sends about a call for `size` completions; an invalid one where it is no reply."""
    try:
        reply = Reply(**fields)
        kinds = [type(text) for text in reply.user_error or ()]
        is_error = len(kinds) in (0, 3) and set(kinds) <= {str, type(None)}
        if is_error and reply.kind in (None, "raised", "invalid") and isinstance(reply.what, str):
            return reply if reply.kind or reply.user_error else _returned(reply.values, size, is_sent=True)
    except (TypeError, OverflowError):
        pass
    return Reply(kind="invalid", what=f"its process says what is no reply: {repr(fields)[:80]}")


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


def _returned(returned: Any, size: int, *, is_sent: bool = False) -> Reply:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple) or len(values) != size:
        count = f"{len(values)} values" if isinstance(values, list | tuple) else repr(values)[:80]
        return Reply(kind="invalid", what=f"it returns {count} for {size} completion{'s' * (size != 1)}")
    # A text that a process sends says why what its function has returned is no score.
    return Reply(values=[value if is_sent and isinstance(value, str) else _score(value) for value in values])


def _score(value: Any) -> float | list[float] | str | None:
    if value is None:
        return None
    plain = _plain(value)
    if not isinstance(plain, list | tuple):
        number = _number(plain)
        return f"it returns {repr(value)[:80]} for a completion" if number is None else number
    numbers = [_number(_plain(entry)) for entry in plain]
    if None in numbers:
        place = numbers.index(None)
        return f"it returns {repr(plain[place])[:80]} as number {place + 1} of {len(numbers)} for a completion"
    return [number for number in numbers if number is not None]


def _plain(value: Any) -> Any:
    """Without numpy and torch, whose arrays of one number pass for that number."""
    if not hasattr(value, "tolist"):
        return value
    plain = value.tolist()
    while isinstance(plain, list) and len(plain) == 1:
        plain = plain[0]
    return plain


def _number(plain: Any) -> float | None:
    return float(plain) if isinstance(plain, Real) and abs(float(plain)) <= MAX_REWARD else None


def _raised(error: BaseException, function: Callable[..., Any]) -> Reply:
    if isinstance(error, UserError):
        return Reply(user_error=(error.what, error.where, error.fix))
    what = f"it raises {type(error).__name__}: {error}"[:MAX_CHARACTERS]
    return Reply(kind="raised", what=what + error_line(error, function))
