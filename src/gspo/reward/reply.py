"""The result of one call of a reward function, as plain data that passes between processes."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from gspo.errors import FailureKind, UserError, encodable
from gspo.recipe.callables import error_line
from gspo.reward.log import MAX_CHARACTERS, MAX_NUMBER, Cell, Log, Metrics, plain

# Of a call with lists; or of a call for each completion, as verl and AReaL make them.
Arguments = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The values of the completions, or the reason why there are none.

    Example: Reply(values=[1.0, None, "it returns nan for a completion"]), or
    Reply(kind="raised", what="it raises KeyError: 'answer', at mine.py:2")
    """

    values: list[float | list[float] | str | None] = field(default_factory=list)  # a text says why it is no score
    kind: FailureKind | None = None  # of a call that failed as a whole
    what: str = ""  # how it failed
    metrics: Metrics = field(default_factory=dict)  # logged
    columns: dict[str, list[Cell]] = field(default_factory=dict)  # logged, with a cell for each completion
    refused: str = ""  # why something that it logged was left out
    user_error: tuple[str, str | None, str | None] | None = None  # what, where, fix: no completion is at fault

    def __post_init__(self) -> None:
        rows = [value if isinstance(value, list) else [value] for value in self.values]
        if not all(abs(number) <= MAX_NUMBER for row in rows for number in row if isinstance(number, float)):
            raise ValueError("a number that is no reward")
        sums = all(count > 0 and abs(total) <= MAX_NUMBER * count for total, count in self.metrics.values())
        if not sums or any(len(cells) != len(self.values) for cells in self.columns.values()):
            raise ValueError("what no function can log")


class ToolResult(str):
    """The text that a tool has returned: its call's one value."""


def timed_out(seconds: float) -> Reply:
    """Make the reply for a call that takes too long."""
    return Reply(kind="timed_out", what=f"it ran over its time limit of {seconds:g} s")


def reply_of(function: Callable[..., Any], arguments: Callable[[], Arguments], size: int) -> Reply:
    """Call the function for `size` completions; the reply has the error that it or `arguments` raises."""
    log = Log(size)
    try:
        given = arguments()
        return _returned(_call(function, given, log), given, log, size)
    except BaseException as error:  # SystemExit too: the trainer must hear of it
        return _raised(error, function)


async def reply_of_coroutine(function: Callable[..., Any], arguments: Callable[[], Arguments], size: int) -> Reply:
    """Call an async function as `reply_of` does; a cancelled call raises CancelledError like other errors."""
    log = Log(size)
    try:
        given = arguments()
        made = _call(function, given, log)
        return _returned(await (made if isinstance(given, Mapping) else asyncio.gather(*made)), given, log, size)
    except BaseException as error:
        return _raised(error, function)


def _call(function: Callable[..., Any], arguments: Arguments, log: Log) -> Any:
    """Call the function, once or for each completion; the functions that log are its own process's."""
    if not isinstance(arguments, Mapping):
        return [function(**keywords) for keywords in arguments]
    loggers = {"log_metric": log.metric, "log_extra": log.extra}
    return function(**{**arguments, **{name: loggers[name] for name in loggers if name in arguments}})


def _returned(values: Any, arguments: Arguments, log: Log, size: int) -> Reply:
    """Turn the values that a function returns for `size` completions into a reply."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(arguments, Mapping):
        values = log.scores(values)
    if isinstance(values, list | tuple) and len(values) == size:
        return Reply(values=[*map(_score, values)], metrics=log.metrics, columns=log.columns, refused=log.refused)
    count = f"a list of {len(values)}" if isinstance(values, list | tuple) else repr(values)[:80]
    return Reply(kind="invalid", what=f"it returns {count} for {size} completion{'s' * (size != 1)}")


def _score(value: Any) -> float | list[float] | str | None:
    if isinstance(value, ToolResult):
        return encodable(value)
    if (plain_value := plain(value)) is None:
        return None
    is_list = isinstance(plain_value, list | tuple)
    numbers = []
    for place, entry in enumerate(plain_value if is_list else [plain_value], 1):
        number = plain(entry)
        if isinstance(number, Mapping):
            return f"it returns a dictionary without the entry 'score': {repr(entry)[:80]}"
        if not isinstance(number, Real) or not abs(float(number)) <= MAX_NUMBER:
            which = f" as number {place} of {len(plain_value)}" if is_list else ""
            return f"it returns {repr(entry)[:80]}{which} for a completion"
        numbers.append(float(number))
    return numbers if is_list else numbers[0]


def _raised(error: BaseException, function: Callable[..., Any]) -> Reply:
    if isinstance(error, UserError):
        return Reply(user_error=(error.what, error.where, error.fix))
    what = encodable(f"it raises {type(error).__name__}: {error}")[:MAX_CHARACTERS]
    return Reply(kind="raised", what=what + error_line(error, function))
