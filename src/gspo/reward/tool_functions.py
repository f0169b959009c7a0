"""The functions behind tools: those that are built in, and what a process makes of a function so that it is one."""

import ast
import asyncio
import inspect
import json
import math
import operator
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import ValidationError, validate_call

from gspo.errors import UserError, did_you_mean, encodable
from gspo.recipe.callables import error_line, load_callable
from gspo.reward.python_tool import Python
from gspo.reward.reply import FailedCallError, ToolResult, is_async

ERROR = "error: "  # how a result begins that is none
MAX_CHARACTERS = 1_000_000  # of a result, on its way to the trainer
MAX_FAULT = 1000  # characters of what is raised
_MAX_DIGITS = 1000  # of a number
_OPERATIONS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % ** and parentheses, such as 3 * (4 + 5).
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        result = _OPERATIONS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) * len(str(abs(left))) > _MAX_DIGITS:
            raise ValueError("the result is too large")
        result = _OPERATIONS[type(node.op)](left, right)
    else:
        raise ValueError(f"only numbers, + - * / // % ** and parentheses: {ast.unparse(node)[:60]!r} is none of them")
    if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > 4 * _MAX_DIGITS):
        raise ValueError("the result is too large, or no real number")
    return float(result) if isinstance(result, float) else int(result)


BUILT_IN: Mapping[str, Callable[..., Any]] = {"calculator": calculator, "python": Python}  # an environment


def find_tool(name: str, *, where: str = "rollout.tools") -> Callable[..., Any]:
    """The function of a built-in's name, `module:name` or `file.py:name`; UserError where there is none."""
    if ":" not in name and name not in BUILT_IN:
        fix = f"built in: {', '.join(BUILT_IN)}; your own are module:name or file.py:name"
        raise UserError(f"no built-in tool {name!r}", where=where, fix=did_you_mean(name, BUILT_IN, fix))
    return BUILT_IN[name] if name in BUILT_IN else load_callable(name, where=where)


def takes_steps(kind: type) -> bool:
    """Tell whether an environment is one of two methods, `reset(row)` and `step(text)`, and none of tools.

    A class in TRL's form may have a tool named step: its `reset(**row)` takes the row's columns by name.
    """
    step, reset = getattr(kind, "step", None), getattr(kind, "reset", None)
    if not (inspect.isfunction(step) and inspect.isfunction(reset)):
        return False
    parameters = [*inspect.signature(reset).parameters.values()][1:]
    by_position = [own for own in parameters if own.kind in (own.POSITIONAL_ONLY, own.POSITIONAL_OR_KEYWORD)]
    takes_columns = any(own.kind is own.VAR_KEYWORD for own in parameters)
    return not takes_columns and sum(own.default is own.empty for own in by_position) == 1


def tool_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods that the policy may call of an environment, as in TRL: public ones but `reset` and `get_reward`."""
    if takes_steps(kind):
        return {}
    functions = inspect.getmembers(kind, inspect.isfunction)
    functions = [(name, own) for name, own in functions if inspect.getattr_static(kind, name) is own]  # no static ones
    return {name: own for name, own in functions if not name.startswith("_") and name not in ("reset", "get_reward")}


def as_tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its arguments checked by its annotations; it returns a list with the text of its result.

    That of an error begins with `error: `, as a tool's own text may.
    """
    if isinstance(function, type):
        return _as_environment(function)
    checked = validate_call(function)

    def call(**arguments: Any) -> list[ToolResult]:
        return [_result(*_outcome(checked, arguments))]

    async def call_async(**arguments: Any) -> list[ToolResult]:
        return [_result(*await _awaited(checked, arguments))]

    return call_async if is_async(function) else call


def _as_environment(kind: type) -> Callable[..., Any]:
    """A function that makes the calls of all instances of a class: `reset` makes the one of a session, None ends it.

    Methods that are not async run in a thread of the session, so that no response waits for another's.
    """
    sessions, methods = dict[str, tuple[Any, ThreadPoolExecutor]](), tool_methods(kind)
    by_steps = takes_steps(kind)

    def fault(method: str, error: BaseException) -> FailedCallError:
        return _fault(f"{kind.__name__}.{method}", error, getattr(kind, method))

    async def call(session: str, method: str | None, arguments: Mapping[str, Any]) -> list[ToolResult]:
        if method is None:
            if session in sessions:
                sessions.pop(session)[1].shutdown(wait=False)  # its thread may hang
            return [ToolResult("")]
        if method == "reset":
            thread = ThreadPoolExecutor(1)
            instance, error = await _outcome_in(thread, kind, {})
            if error is not None:
                raise fault("__init__", error)
            sessions[session] = instance, thread
        if session not in sessions:
            raise FailedCallError("its process has ended", "crashed")
        instance, thread = sessions[session]
        function = getattr(instance, method)
        if method in methods:
            function = validate_call(function)
        if by_steps:  # their one argument may have any name
            function, arguments = partial(function, *arguments.values()), {}
        if is_async(function):
            value, error = await _awaited(function, arguments)
        else:
            value, error = await _outcome_in(thread, function, arguments)
        if error is not None and method not in methods:
            raise fault(method, error)
        if method == "get_reward":
            return [_reward(f"{kind.__name__}.get_reward", value)]
        if by_steps:
            name = f"{kind.__name__}.{method}"
            return [_step(name, value) if method == "step" else ToolResult(_text(name, value))]
        return [ToolResult("") if method == "reset" and value is None else _result(value, error)]

    return call


def as_agent(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that has an agent play a row; of a class, an instance for each row does, by its method `run`.

    One that is not async runs in a thread of its own, so that no response waits for another's.
    """
    name = getattr(function, "__name__", "agent")

    async def play(row: Mapping[str, Any], base_url: str, api_key: str) -> list[ToolResult]:
        def run() -> Any:
            own = function().run if isinstance(function, type) else function
            return own(dict(row), base_url=base_url, api_key=api_key)

        thread = ThreadPoolExecutor(1)
        value, error = await _outcome_in(thread, run, {})
        thread.shutdown(wait=False)
        if error is None and inspect.isawaitable(value):
            value, error = await _awaited(lambda: value, {})
        if error is not None:
            raise _fault(name, error, function)
        return [_rewards(name, value) if isinstance(value, Mapping) else _reward(name, value)]

    return play


Outcome = tuple[Any, BaseException | None]


def _outcome(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    """Return what a function returns, or its error: a future cannot take each, and StopIteration is none of its."""
    try:
        return function(**arguments), None
    except BaseException as error:  # SystemExit too
        return None, error


async def _outcome_in(
    thread: ThreadPoolExecutor, function: Callable[..., Any], arguments: Mapping[str, Any]
) -> Outcome:
    return await asyncio.get_running_loop().run_in_executor(thread, _outcome, function, arguments)


async def _awaited(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Outcome:
    try:
        return await function(**arguments), None
    except asyncio.CancelledError:  # by the time limit
        raise
    except BaseException as error:
        return None, error


def _fault(name: str, error: BaseException, function: Callable[..., Any]) -> FailedCallError:
    """The failure of a call by an error with which the policy has nothing to do."""
    return FailedCallError(f"{name} raises {_described(error)}"[:MAX_FAULT] + error_line(error, function))


def _reward(name: str, value: Any) -> ToolResult:
    """A number as the trainer reads it."""
    if value is None:
        return ToolResult("")
    with suppress(Exception):  # of its own methods
        if not isinstance(value, str) and math.isfinite(number := float(value)):
            return ToolResult(repr(number))
    raise FailedCallError(f"{name} returns {_shown(value)}, which is no finite number")


def _rewards(name: str, values: Mapping[Any, Any]) -> ToolResult:
    """Return, as JSON, what an agent gives single completions, by their ids; None is the same as 0."""
    given = {str(own): _reward(f"{name}, for a completion,", value) for own, value in values.items()}
    return ToolResult(json.dumps({own: float(number) for own, number in given.items() if number}))


def _shown(value: Any) -> str:
    with suppress(Exception):  # of its own methods
        return repr(value)[:80]
    return type(value).__name__


def _step(name: str, value: Any) -> ToolResult:
    """Return what an environment says of a turn as JSON: its text, the turn's reward, and whether it was the last."""
    try:
        said, reward, done = value
        is_over = {True: True, False: False}[done]
    except Exception:  # of its own methods, too
        form = "messages, the turn's reward or None, and True where the response is over, else False"
        raise FailedCallError(f"{name} returns {_shown(value)}, which is not: {form}") from None
    text, given = _text(name, said), _reward(name, reward)
    return ToolResult(json.dumps([text, float(given) if given else None, is_over]))


def _text(name: str, said: Any) -> str:
    """The text of messages: of none, of one that is a text, or of a list."""
    try:
        texts = [said] if isinstance(said, str) else [message["content"] for message in said or ()]
        return encodable("\n\n".join(texts))[:MAX_CHARACTERS]
    except Exception:
        form = 'a text nor a list such as [{"role": "user", "content": "…"}]'
        raise FailedCallError(f"{name} says {_shown(said)}, which is neither {form}") from None


def _result(value: Any, error: BaseException | None) -> ToolResult:
    """Return what the policy reads of a call; of an error no path of this machine: the next has another."""
    if error is None:
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            return ToolResult(text[:MAX_CHARACTERS])
        except Exception as own:  # of a value in a circle, or of its own methods
            error = own
    described = _described(error)
    if isinstance(error, ValidationError):
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        described = "; ".join(faults)
    return ToolResult(f"{ERROR}{described}"[:MAX_CHARACTERS])


def _described(error: BaseException) -> str:
    with suppress(Exception):  # its own text may fail
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
