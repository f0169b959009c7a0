"""The client of an MCP server (modelcontextprotocol.io), in a process of its own: it lists tools, and calls them."""

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gspo.reward.reply import FailedCallError, ToolResult
from gspo.reward.tool_functions import ERROR, MAX_CHARACTERS, MAX_FAULT

START_SECONDS = 120.0  # for a server to start, whatever a call may take
ANSWER_SECONDS = 10.0  # within which one that is there lists its tools


class McpServer:
    """A server, by the command that starts it or by its address; connected when it is asked, and anew once it is lost.

    Example: await McpServer("python my_server.py")("add", {"a": 1, "b": 2}) == ["3"]
    """

    def __init__(self, server: str) -> None:
        self.__name__ = server
        self._connection: tuple[asyncio.Task[None], asyncio.Future[Any]] | None = None
        self._is_late = False  # a call has not been answered in time

    @property
    def files(self) -> list[Path]:
        """The files that the command names."""
        return [path for word in shlex.split(self.__name__) if (path := Path(word)).is_file()]

    async def __call__(self, tool: str | None, arguments: Mapping[str, Any]) -> list[ToolResult]:
        """The text that a tool returns; without one the tools, as JSON.

        What the server says against a call is a result as well. FailedCallError where there is no server.
        """
        if self._connection is None or self._connection[0].done():
            found = asyncio.get_running_loop().create_future()
            self._connection = asyncio.create_task(self._connect(found)), found
        task, found = connection = self._connection
        client, is_asked = None, False
        try:
            await asyncio.wait([task, found], return_when=asyncio.FIRST_COMPLETED)
            if not found.done():
                raise ConnectionError("it was given up") if task.cancelled() else task.exception() or ConnectionError()
            client = found.result()
            if self._is_late and not await _answers(client):
                self._give_up(connection)
                raise _failure(TimeoutError())
            self._is_late, is_asked = False, True
            if tool is None:
                return [ToolResult(json.dumps(await _schemas(client)))]
            return [_result(await client.call_tool(tool, dict(arguments)))]
        except asyncio.CancelledError:  # by the time limit
            self._is_late = True
            if found.done() and not is_asked:
                self._give_up(connection)
            raise
        except FailedCallError:
            raise
        except Exception as error:
            if is_asked and tool is not None and await _answers(client):
                return [ToolResult(f"{ERROR}{error}"[:MAX_CHARACTERS])]
            self._give_up(connection)
            raise _failure(error) from None

    def _give_up(self, connection: tuple[asyncio.Task[None], asyncio.Future[Any]]) -> None:
        """End a connection; a newer one stays."""
        connection[0].cancel()
        if self._connection is connection:
            self._connection, self._is_late = None, False

    async def _connect(self, found: asyncio.Future[Any]) -> None:
        """Keep a connection, which one task must open and close, until this process ends or the connection is lost."""
        from mcp import Client, StdioServerParameters

        command, *arguments = shlex.split(self.__name__)
        is_address = command.startswith(("http://", "https://"))
        stdio = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
        async with asyncio.timeout(START_SECONDS) as limit, Client(command if is_address else stdio) as client:
            limit.reschedule(None)
            found.set_result(client)
            await asyncio.get_running_loop().create_future()


async def _answers(client: Any) -> bool:
    """Tell whether the server is there."""
    with suppress(Exception):
        await asyncio.wait_for(client.list_tools(cache_mode="bypass"), ANSWER_SECONDS)
        return True
    return False


def _failure(error: Exception) -> FailedCallError:
    """The failure of a call by an error of its connection."""
    while isinstance(error, ExceptionGroup):
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
