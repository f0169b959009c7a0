"""Tools: functions that the policy calls within a response; they run in processes of their own, as rewards do."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema

from gspo.errors import UserError
from gspo.queries.bridge import Bridge
from gspo.recipe.callables import CLOSE, GET_REWARD, RESET
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.calls import RewardFunction, is_async, parameters_of
from gspo.reward.processes import Processes
from gspo.reward.tool_functions import BUILT_IN, ERROR, LOST, find_tool, tool_methods
from gspo.rollout.conversation import Result, Tool, Tools
from gspo.types import Failure

_FORM = """write it as:
    def lookup(word: str) -> str:
        \"\"\"Look up a word.

        Args:
            word: The word.
        \"\"\"
        …"""


def load_tools(settings: RolloutConfig, *, output: int = 2) -> tuple[Tool, ...]:
    """Load the recipe's tools, each with its processes; UserError for one that says too little of itself."""
    tools: dict[str, Tool] = {}
    if settings.environment is not None:
        return _environment(settings.environment, settings, output)
    for name in settings.tools:
        tool = _tool(name, settings, output)
        if tool.name in tools:
            raise UserError(f"two tools are named {tool.name}", where="rollout.tools", fix="rename one of them")
        tools[tool.name] = tool
    return tuple(tools.values())


def made_tools(tools: Sequence[Tool], tokenizer: Any, queries: QueriesConfig) -> Tools | None:
    """The tools with the way in which their results are written; None where there are none."""
    return Tools(by_name={tool.name: tool for tool in tools}, bridge=Bridge(tokenizer, queries)) if tools else None


def _tool(name: str, settings: RolloutConfig, output: int) -> Tool:
    if ":" not in name and name not in BUILT_IN:
        fix = f"built in: {', '.join(BUILT_IN)}; one of your own is module:function or file.py:function"
        raise UserError(f"no built-in tool {name!r}", where="rollout.tools", fix=fix)
    call = find_tool(name)
    schema = _schema(call, name)
    host = Processes(name, is_async=is_async(call), is_tool=True, output=output)
    label = schema["function"]["name"]
    function = RewardFunction(name=label, call=call, time_limit_seconds=settings.tool_seconds, host=host)

    async def make(session: str, arguments: Mapping[str, Any]) -> Result:
        return await _made(function, arguments, settings)

    return Tool(name=label, schema=schema, call=make, function=call, close=host.close)


def _environment(name: str, settings: RolloutConfig, output: int) -> tuple[Tool, ...]:
    """The methods of an environment as tools, and what begins and ends a response in it."""
    kind = find_tool(name)
    if not isinstance(kind, type) or not hasattr(kind, "reset"):
        fix = "name a class with a method reset(self, **row)"
        raise UserError(f"{name} is no environment", where="rollout.environment", fix=fix)
    host = Processes(name, is_async=True, is_tool=True, output=output)
    function = RewardFunction(name=kind.__name__, call=kind, time_limit_seconds=settings.tool_seconds, host=host)

    def caller(method: str) -> Callable[[str, Mapping[str, Any]], Awaitable[Result]]:
        async def make(session: str, arguments: Mapping[str, Any]) -> Result:
            call = {"session": session, "method": method, "arguments": dict(arguments)}
            return await _made(function, call, settings)

        return make

    methods = {own: _schema(MethodType(call, object()), f"{name}.{own}") for own, call in tool_methods(kind).items()}
    own_reward = {GET_REWARD: dict[str, Any]()} if hasattr(kind, "get_reward") else {}
    schemas: Mapping[str, Mapping[str, Any]] = {RESET: {}, CLOSE: {}, **own_reward, **methods}
    return tuple(
        Tool(name=own, schema=schema, call=caller(own), function=kind, close=host.close)
        for own, schema in schemas.items()
    )


async def _made(function: RewardFunction, arguments: Mapping[str, Any], settings: RolloutConfig) -> Result:
    """The result of a call, for which a place is waited."""
    reply, _ = await function.host.make(function, arguments, 1)
    kind, text = reply.kind, str(reply.values[0]) if reply.kind is None else f"{ERROR}{reply.what}"
    if text == LOST:
        kind, text = "crashed", "its process has ended"
    if kind in ("timed_out", "crashed"):
        what = reply.what or text
        return Result(text="", failure=Failure(kind=kind, message=f"tool {function.name}: {what}"))
    return Result(text=text[: settings.tool_characters], is_error=text.startswith(ERROR))


def _schema(call: Any, name: str) -> Mapping[str, Any]:
    for parameter in parameters_of(call):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            what = f"{name} takes {parameter.name} by position, and a call names its arguments"
            raise UserError(what, where="rollout.tools", fix=_FORM)
    try:
        schema: Mapping[str, Any] = get_json_schema(call)
        return schema
    except Exception as error:  # of transformers, about docstring or annotations
        raise UserError(f"{name} does not describe itself: {error}", where="rollout.tools", fix=_FORM) from None
