"""The client of an MCP server (modelcontextprotocol.io), in a process of its own: it lists tools, and calls them."""

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gspo.reward.reply import FailedCallError, ToolResult
from gspo.reward.tool_functions import ERROR, MAX_CHARACTERS, MAX_FAULT


class McpServer:
    """A server, by the command that starts it or by its address; connected when it is asked, and anew once it is lost.

    Example: await McpServer("python my_server.py")("add", {"a": 1, "b": 2}) == ["3"]
    """

    def __init__(self, server: str) -> None:
        self.__name__ = server
        self._connection: tuple[asyncio.Task[None], asyncio.Future[Any]] | None = None

    async def __call__(self, tool: str | None, arguments: Mapping[str, Any]) -> list[ToolResult]:
        """The text that a tool returns; without one the tools, as JSON.

        What the server says against a call is a result as well. FailedCallError where there is no server.
        """
        from mcp.shared.exceptions import MCPError

        if self._connection is None or self._connection[0].done():
            found = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._connect(found)), found
        task, found = self._connection
        await asyncio.wait([task, found], return_when=asyncio.FIRST_COMPLETED)
        try:
            client = found.result() if found.done() else task.result()
            if tool is None:
                return [ToolResult(json.dumps(await _schemas(client)))]
            return [_result(await client.call_tool(tool, dict(arguments)))]
        except MCPError as error:
            with suppress(Exception):  # is it there?
                await client.list_tools(cache_mode="bypass")
                return [ToolResult(f"{ERROR}{error.message}"[:MAX_CHARACTERS])]
            raise self._lost(error) from None
        except Exception as error:
            raise self._lost(error) from None

    async def _connect(self, found: asyncio.Future[Any]) -> None:
        """Keep a connection, which one task must open and close, until this process ends or the connection is lost."""
        from mcp import Client, StdioServerParameters

        command, *arguments = shlex.split(self.__name__)
        is_address = command.startswith(("http://", "https://"))
        stdio = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        async with Client(command if is_address else stdio) as client:
            found.set_result(client)
            await asyncio.get_running_loop().create_future()

    def _lost(self, error: BaseException) -> FailedCallError:
        """The failure of a call by an error of the connection, which is given up."""
        if self._connection is not None:
            self._connection[0].cancel()
            self._connection = None
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return FailedCallError(f"the server does not answer: {type(error).__name__}: {error}"[:MAX_FAULT], "crashed")


async def _schemas(client: Any) -> list[dict[str, Any]]:
    """All tools, as chat templates take them."""
    tools, cursor = list[Any](), None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return [
        {
            "type": "function",
            "function": {"name": own.name, "description": own.description or own.name, "parameters": own.input_schema},
        }
        for own in tools
    ]


def _result(answer: Any) -> ToolResult:
    """The texts of an answer; of what is none its kind."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in answer.content]
    if not parts and answer.structured_content is not None:
        parts = [json.dumps(answer.structured_content, ensure_ascii=False)]
    return ToolResult((ERROR * answer.is_error + "\n".join(parts))[:MAX_CHARACTERS])
