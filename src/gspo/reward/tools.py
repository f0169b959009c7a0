"""Tools: functions that the policy calls within a response; they run in processes of their own, as rewards do."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from importlib.util import find_spec
from inspect import signature
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema

from gspo import loop
from gspo.errors import UserError
from gspo.queries.bridge import Bridge
from gspo.recipe.callables import load_callable
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.calls import Processes, RewardFunction, parameters_of
from gspo.reward.functions import close_functions
from gspo.reward.mcp_server import START_SECONDS, McpServer
from gspo.reward.python_tool import PLACES, Python
from gspo.reward.reply import is_async
from gspo.reward.tool_functions import ERROR, find_tool, takes_steps, tool_methods
from gspo.rollout.endpoint import Endpoint
from gspo.rollout.tools import Agent, Environment, Result, Tool, Tools
from gspo.sandbox.sandbox import check_available
from gspo.types import Failure

_STEPS = "an environment without tools has reset(self, row) and step(self, text)"
_ALL = 2**20  # calls at a time
_MOST_THREADS = 128  # calls at a time of methods that are not async: each takes its time from the others
_METHODS = ("step", "get_reward")
_FORM = """write it as:
    def lookup(word: str) -> str:
        \"\"\"Look up a word.

        Args:
            word: The word.
        \"\"\"
        …"""


def load_tools(settings: RolloutConfig, tokenizer: Any, queries: QueriesConfig, *, output: int = 2) -> Tools:
    """Load the recipe's tools or its environment, with their processes; UserError for what says too little of itself.

    What processes print goes to the file descriptor `output`.
    """
    environment, agent, tools, functions = None, None, list[Tool](), list[RewardFunction]()
    if settings.agent is not None:
        agent, function = _agent(settings.agent, settings, output)
        functions.append(function)
    if settings.environment is not None:
        environment, tools, functions = _environment(settings.environment, settings, output)
    by_steps = environment is not None and environment.by_steps
    if by_steps and (settings.tools or settings.mcp):
        what = f"step of {settings.environment} answers each turn, and nobody calls rollout.tools or mcp"
        fix = "leave them out, or write methods in place of step: they are tools, too"
        raise UserError(what, where="rollout.environment", fix=fix)
    for name in settings.tools:
        function = _function(name, settings, output)
        if isinstance(function.call, type):
            fix = f"set rollout.environment: {name}, whose methods are the tools"
            raise UserError(f"{name} is a class", where="rollout.tools", fix=fix)
        functions, tools = [*functions, function], [*tools, _tool(name, function, settings)]
    for server in settings.mcp:
        function, own_tools = _mcp_server(server, settings, output)
        functions, tools = [*functions, function], [*tools, *own_tools]
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        places = {"tools": settings.tools, "mcp": settings.mcp, "environment": settings.environment}
        where = " or ".join(f"rollout.{key}" for key, is_given in places.items() if is_given)
        raise UserError(f"two tools are named {twice}", where=where, fix="rename one of them")
    bridge = Bridge(tokenizer, queries, [tool.schema for tool in tools], as_user=by_steps)
    if agent is not None and bridge.role is None:
        fix = "use an instruct model's tokenizer (model.tokenizer)"
        raise UserError("an agent's messages need a chat template", where="rollout.agent", fix=fix)

    def close() -> None:
        close_functions(functions)
        if agent is not None:
            agent.endpoint.close()

    return Tools(
        by_name={tool.name: tool for tool in tools},
        bridge=bridge,
        functions=[function.call for function in functions],
        close=close,
        environment=environment,
        agent=agent,
    )


def _agent(name: str, settings: RolloutConfig, output: int) -> tuple[Agent, RewardFunction]:
    """The agent, and what has it play a row."""
    call = load_callable(name, where="rollout.agent")
    _check_agent(name, call)
    # All are under way together: none of them waits for another to end.
    host = Processes(name, is_async=True, concurrent_calls=_ALL, role="agent", keeps_state=True, output=output)
    function = _hosted(name, call, host, settings.agent_seconds)

    async def run(row: Mapping[str, Any], base_url: str, api_key: str) -> Result:
        return await _made(function, {"row": row, "base_url": base_url, "api_key": api_key}, most=None, kind="agent")

    return Agent(run=run, endpoint=Endpoint()), function


def _check_agent(name: str, call: Callable[..., Any]) -> None:
    """UserError for what cannot be called as an agent is."""
    fix = "write async def run(row, *, base_url, api_key), or a class with such a method run"
    run = getattr(call, "run", None) if isinstance(call, type) else call
    if run is None:
        raise UserError(f"the class {name} has no method run", where="rollout.agent", fix=fix)
    with suppress(ValueError):  # some do not tell
        try:
            signature(run).bind(*[{}] * (1 + isinstance(call, type)), base_url="", api_key="")
        except TypeError as error:
            raise UserError(f"{name} cannot be called with a row: {error}", where="rollout.agent", fix=fix) from None


def _function(name: str, settings: RolloutConfig, output: int) -> RewardFunction:
    call = find_tool(name)
    is_class = isinstance(call, type)
    methods: list[Any] = [call]
    if isinstance(call, type):
        methods = [*tool_methods(call).values(), *([getattr(call, "step", None)] if takes_steps(call) else ())]
    awaited = all(map(is_async, methods))
    places = _ALL if awaited else _MOST_THREADS if is_class else None  # to wait for one takes nothing of a call's time
    places = PLACES if call is Python else places
    host = Processes(
        name,
        is_async=is_class or is_async(call),
        concurrent_calls=places,
        role="tool",
        keeps_state=is_class,
        output=output,
    )
    return _hosted(name, call, host, settings.tool_seconds)


def _mcp_server(server: str, settings: RolloutConfig, output: int) -> tuple[RewardFunction, list[Tool]]:
    """An MCP server, once it has told its tools, and these."""
    where = f"rollout.mcp: {server}"
    if find_spec("mcp") is None:
        raise UserError("the package mcp is not installed", where=where, fix="pip install 'gspo[mcp]'")
    options: dict[str, Any] = {"role": "MCP server", "keeps_state": True, "output": output}
    host = Processes(server, is_async=True, concurrent_calls=_ALL, **options)
    function = _hosted(server, McpServer(server), host, settings.tool_seconds)
    listing = replace(function, time_limit_seconds=START_SECONDS)
    listed = loop.run(_made(listing, {"tool": None, "arguments": {}}, most=None, kind="MCP server"))
    if listed.failure is not None:
        function.host.close()
        fix = "see what it prints; a server is the command that starts it, such as python server.py, or http://host:8000/mcp"
        raise UserError(listed.failure.message.removeprefix(f"MCP server {server}: "), where=where, fix=fix)
    if not (schemas := json.loads(listed.text)):
        function.host.close()
        raise UserError("the server has no tools", where=where, fix="leave it out, or see what it offers")

    def tool(schema: Mapping[str, Any]) -> Tool:
        async def make(session: str, arguments: Mapping[str, Any]) -> Result:
            call = {"tool": name, "arguments": dict(arguments)}
            return await _made(function, call, most=settings.tool_characters, kind="MCP server")

        name = schema["function"]["name"]
        return Tool(name=name, schema=schema, call=make)

    return function, [tool(schema) for schema in schemas]


def _hosted(name: str, call: Callable[..., Any], host: Processes, seconds: float) -> RewardFunction:
    own_name = getattr(call, "__name__", name.rpartition(":")[2])
    return RewardFunction(name=own_name, call=call, time_limit_seconds=seconds, host=host)


def _tool(name: str, function: RewardFunction, settings: RolloutConfig) -> Tool:
    async def make(session: str, arguments: Mapping[str, Any]) -> Result:
        return await _made(function, arguments, most=settings.tool_characters)

    return Tool(name=function.name, schema=_schema(function.call, name), call=make)


def _environment(
    name: str, settings: RolloutConfig, output: int
) -> tuple[Environment, list[Tool], list[RewardFunction]]:
    """The environment, its methods as tools, and what makes the calls of both."""
    kind = find_tool(name, where="rollout.environment")
    if not isinstance(kind, type) or not hasattr(kind, "reset"):
        fix = "name a class with a method reset(self, **row), or reset(self, row) and step(self, text)"
        raise UserError(f"{name} is no environment", where="rollout.environment", fix=fix)
    if kind is Python:
        check_available()
    by_steps, has_reward = takes_steps(kind), hasattr(kind, "get_reward")
    if by_steps and has_reward:
        fix = "leave out get_reward, or take the row by name in reset(self, **row), where methods are tools"
        raise UserError("step returns the rewards", where=f"rollout.environment: {name}", fix=fix)
    for own in tool_methods(kind):
        near = get_close_matches(own, [each for each in _METHODS if not hasattr(kind, each)], n=1, cutoff=0.8)
        if near and not getattr(kind, own).__doc__:
            fix = "rename it, or describe it in a docstring as a tool of the policy's"
            what = f"{own} of {name} has no docstring; did you mean {near[0]}?"
            raise UserError(what, where="rollout.environment", fix=fix)
    schemas = {
        own: _schema(MethodType(call, object()), f"{name}.{own}", where="rollout.environment")
        for own, call in tool_methods(kind).items()
    }
    function = _function(name, settings, output)

    async def ask(session: str, method: str | None, arguments: Mapping[str, Any]) -> Result:
        call = {"session": session, "method": method, "arguments": dict(arguments)}
        most = None if method in ("get_reward", "step") else settings.tool_characters
        return await _made(function, call, most=most)

    def tool(method: str) -> Tool:
        return Tool(name=method, schema=schemas[method], call=lambda own, given: ask(own, method, given))

    return Environment(ask=ask, has_reward=has_reward, by_steps=by_steps), [*map(tool, schemas)], [function]


async def _made(
    function: RewardFunction, arguments: Mapping[str, Any], *, most: int | None, kind: str = "tool"
) -> Result:
    """The result of a call, of at most so many characters; a place is waited for."""
    reply, _ = await function.host.make(function, arguments, 1)
    if reply.kind is not None:
        # The process names what raises.
        name = "" if reply.kind == "raised" else f"{kind} {function.name}: "
        return Result(text="", failure=Failure(kind=reply.kind, message=f"{name}{reply.what}"))
    text = str(reply.values[0])
    return Result(text=text[:most], is_error=text.startswith(ERROR))


def _schema(call: Any, name: str, *, where: str = "rollout.tools") -> Mapping[str, Any]:
    for parameter in parameters_of(call):
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            what = f"{name} takes {parameter.name} by position, and a call names its arguments"
            raise UserError(what, where=where, fix=_FORM)
    try:
        schema: Mapping[str, Any] = get_json_schema(call)
        return schema
    except Exception as error:  # of transformers, about docstring or annotations
        fix = _FORM if where == "rollout.tools" else f"{_FORM}\n{_STEPS}"
        raise UserError(f"{name} does not describe itself: {error}", where=where, fix=fix) from None
