"""The result of one call of a reward function, with what it logs, as plain data that passes between processes.

What it logs is TRL's log_metric and log_extra, and verl's dictionaries.
"""

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from gspo.errors import FailureKind, UserError, encodable
from gspo.recipe.callables import error_line

MAX_NUMBER = 1e100  # so that sums, and the squares of them that a deviation takes, are still numbers
MAX_NAMES, MAX_TEXT = 32, 1000  # metrics or columns of a function; characters of a cell
MAX_CHARACTERS = 400  # of what a function says of itself: it is written beside every rollout it masks
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ ./@%+-]{0,63}")

Metrics = dict[str, tuple[float, int]]  # by name, the sum of the values and how many there are
Cell = bool | int | float | str | None
# Of a call with lists; or of a call for each completion, as verl and AReaL make them.
Arguments = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """The numbers of transformers' TrainerState that a reward can depend on, under the same names.

    Example: TrainerState(global_step=12, max_steps=200, epoch=0.75) in step 13 of 200
    """

    global_step: int = 0  # finished: rollout batches, not optimiser steps
    max_steps: int = 1
    epoch: float = 0.0  # passes over the queries


class Log:
    """The values that one call logs for its `size` completions; `refused` says why the first was left out."""

    def __init__(self, size: int) -> None:
        self.metrics: Metrics = {}
        self.refused = ""
        self.columns: dict[str, list[Cell]] = {}
        self._size = size

    def metric(self, name: str, value: float) -> None:
        """Note a number; a step's metric is the mean over the step's calls, as in TRL."""
        number, call = plain(value), f"log_metric({name!r:.40}, …)"
        if not (isinstance(number, Real) and abs(number) <= MAX_NUMBER):  # type: ignore[operator]
            self._refuse(f"{call}: {number!r:.40} is no finite number")
        elif self._takes(name, self.metrics, call):
            total, count = self.metrics.get(name, (0.0, 0))
            self.metrics[name] = (total + float(number), count + 1)

    def extra(self, column: str, values: Any) -> None:
        """Note a value for each completion."""
        call = f"log_extra({column!r:.40}, …)"
        values = values.tolist() if hasattr(values, "tolist") else values
        if not (isinstance(values, list | tuple) and len(values) == self._size):
            self._refuse(f"{call}: {repr(values)[:40]} is no list with a value for each completion, {self._size}")
        elif self._takes(column, self.columns, call):
            self.columns[column] = [*map(_cell, values)]

    def scores(self, results: Sequence[Any]) -> list[Any]:
        """The scores of results that come one a completion; what a mapping with a `score` has besides it is logged."""
        are_verl = [isinstance(result, Mapping) and "score" in result for result in results]
        extras = [dict(result) if is_verl else {} for result, is_verl in zip(results, are_verl, strict=True)]
        scores = [extra.pop("score", result) for result, extra in zip(results, extras, strict=True)]
        for name in dict.fromkeys(name for extra in extras for name in extra):
            cells = [plain(extra.get(name)) for extra in extras]
            self.extra(name, cells)
            for number in (cell for cell in cells if isinstance(cell, int | float)):
                self.metric(name, number)
        return scores

    def _takes(self, name: Any, there: Mapping[str, Any], call: str) -> bool:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            return self._refuse(f"{call}: a name has 64 letters, digits, spaces and _./@%+- at most")
        if name not in there and len(there) >= MAX_NAMES:
            return self._refuse(f"{call}: it has logged {MAX_NAMES} names already, the most there may be")
        return True

    def _refuse(self, what: str) -> bool:
        self.refused = self.refused or encodable(what)[:MAX_CHARACTERS]
        return False


def plain(value: Any) -> Any:
    """A value without numpy and torch, whose arrays of one number pass for that number."""
    if not hasattr(value, "tolist"):
        return value
    number = value.tolist()
    while isinstance(number, list) and len(number) == 1:
        number = number[0]
    return number


def _cell(value: Any) -> Cell:
    """A value as a file holds it: a number that is none, such as NaN, is null; anything else is text."""
    value = plain(value)
    if value is None or isinstance(value, int | float):
        return value if value is not None and abs(value) <= MAX_NUMBER else None
    return encodable(str(value)[:MAX_TEXT])[:MAX_TEXT]


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


class FailedCallError(Exception):
    """The failure of a call that who makes it describes, where the function itself raises nothing."""

    def __init__(self, what: str, kind: FailureKind = "raised") -> None:
        super().__init__(encodable(what))
        self.kind = kind


def is_async(function: Callable[..., Any]) -> bool:
    """Tell whether a function, or an object that is called, returns a coroutine."""
    method = getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


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
    if isinstance(error, FailedCallError):
        return Reply(kind=error.kind, what=str(error))
    what = encodable(f"it raises {type(error).__name__}: {error}")[:MAX_CHARACTERS]
    return Reply(kind="raised", what=what + error_line(error, function))
