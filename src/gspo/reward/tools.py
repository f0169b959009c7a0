"""Tools: functions that the policy calls within a response; they run in processes of their own, as rewards do."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from gspo.errors import UserError
from gspo.queries.bridge import Bridge
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.calls import RewardFunction, is_async
from gspo.reward.processes import Processes
from gspo.reward.tool_functions import BUILT_IN, ERROR, find_tool
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
    try:
        schema: Mapping[str, Any] = get_json_schema(call)
    except Exception as error:  # of transformers, about docstring or annotations
        raise UserError(f"{name} does not describe itself: {error}", where="rollout.tools", fix=_FORM) from None
    host = Processes(name, is_async=is_async(call), is_tool=True, output=output)
    label = schema["function"]["name"]
    function = RewardFunction(name=label, call=call, time_limit_seconds=settings.tool_seconds, host=host)

    async def make(arguments: Mapping[str, Any]) -> Result:
        reply, _ = await host.make(function, arguments, 1)
        if reply.kind in ("timed_out", "crashed"):
            return Result(text="", failure=Failure(kind=reply.kind, message=f"tool {label}: {reply.what}"))
        text = str(reply.values[0]) if reply.kind is None else f"{ERROR}{reply.what}"
        return Result(text=text[: settings.tool_characters], is_error=text.startswith(ERROR))

    return Tool(name=label, schema=schema, call=make, function=call, close=host.close)
