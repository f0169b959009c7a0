"""MCP servers as tools: listed and called as their own client does, and one clear outcome for each fault."""

import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs

from gspo import loop
from gspo.errors import UserError
from gspo.loop import all_of
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.tools import load_tools
from gspo.rollout.tools import Result, Tools

pytestmark = needs("mcp")

SERVER = '''
import asyncio, os, signal, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"waited {seconds:g}"

@server.tool()
def fail() -> str:
    raise ValueError("no")

@server.tool()
def leave() -> str:
    os._exit(3)

@server.tool()
async def wrong() -> int:
    return 5

@server.tool()
async def count() -> str:
    CALLS.append(1)
    return str(len(CALLS))

@server.tool()
async def stop_all() -> str:
    signal.raise_signal(signal.SIGSTOP)

CALLS = []

async def no_number():
    return "five"

server._tool_manager._tools["wrong"].fn = no_number
server.run(*sys.argv[1:])
'''
COMMAND = f"{shlex.quote(sys.executable)} server.py"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    """The tools of a server that no test harms, and the calculator beside them."""
    (path := tmp_path_factory.mktemp("shared") / "server.py").write_text(SERVER)
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"
    given = RolloutConfig(mcp=(command,), tools=("calculator",), tool_seconds=20.0)
    with closing(load_tools(given, None, QueriesConfig(chat=False))) as tools:
        yield tools


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tools]]:
    monkeypatch.chdir(tmp_path)
    Path("server.py").write_text(SERVER)
    made: list[Tools] = []

    def load(*servers: str, **settings: Any) -> Tools:
        given = RolloutConfig(mcp=servers or (COMMAND,), **settings)
        made.append(load_tools(given, None, QueriesConfig(chat=False)))
        return made[-1]

    yield load
    for tools in made:
        tools.close()


def answers(tools: Tools, *calls: tuple[str, dict[str, Any]]) -> list[Result]:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return list(loop.run(tools.answers("s", texts)))


def test_a_servers_tools_are_the_policys_beside_others(shared: Tools) -> None:
    names = ["add", "wait", "fail", "leave", "wrong", "count", "stop_all"]
    assert list(shared.by_name) == ["calculator", *names]
    schema = shared.by_name["add"].schema
    assert schema["type"] == "function" and schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["required"] == ["a", "b"]
    results = answers(shared, ("add", {"a": 2, "b": 3}), ("calculator", {"expression": "2 * 3"}))
    assert results == [Result(text="5"), Result(text="6")]


def test_calls_are_made_at_the_same_time_and_one_that_is_late_costs_no_other(shared: Tools, loaded: Any) -> None:
    waits = [("wait", {"seconds": 1.0})] * 8
    started = time.monotonic()
    assert {result.text for result in answers(shared, *waits)} == {"waited 1"}
    assert time.monotonic() - started < 6  # not 8, however slow the machine is
    short = loaded(tool_seconds=2.0)
    late, other = answers(short, ("wait", {"seconds": 60.0}), ("add", {"a": 1, "b": 1}))
    assert late.failure is not None and late.failure.kind == "timed_out" and other.text == "2"
    assert answers(short, ("add", {"a": 1, "b": 2}))[0].text == "3"


@pytest.mark.parametrize("call", [("fail", {}), ("add", {"a": "x", "b": 1}), ("add", {})])
def test_what_the_server_says_against_a_call_is_read_by_the_policy(call: Any, shared: Tools) -> None:
    (result,) = answers(shared, call)
    assert result.is_error and result.text.startswith("error: ") and result.failure is None


def test_a_server_that_dies_masks_what_is_under_way_and_is_started_anew(loaded: Any) -> None:
    tools = loaded()

    async def both() -> list[list[Result]]:
        calls = [("wait", {"seconds": 30.0}), ("leave", {})]
        return await all_of([tools.answers("s", [json.dumps({"name": n, "arguments": a})]) for n, a in calls])

    for (result,) in loop.run(both()):
        assert result.failure is not None and result.failure.kind == "crashed"
        assert "the server does not answer" in result.failure.message and "server.py" in result.failure.message
    assert answers(tools, ("add", {"a": 1, "b": 1}))[0].text == "2"


def test_an_error_of_one_call_leaves_the_server_as_it_is(shared: Tools) -> None:
    assert answers(shared, ("count", {}))[0].text == "1"
    assert answers(shared, ("wrong", {}))[0].text.startswith("error: ")
    assert answers(shared, ("count", {}))[0].text == "2"


def test_a_server_that_hangs_is_given_up_and_started_anew(loaded: Any) -> None:
    tools = loaded(tool_seconds=12.0)
    assert answers(tools, ("count", {}))[0].text == "1"
    (stopped,) = answers(tools, ("stop_all", {}))
    assert stopped.failure is not None and stopped.failure.kind == "timed_out"
    assert answers(tools, ("count", {}))[0].failure is not None  # which finds that nobody answers
    assert answers(tools, ("count", {}))[0].text == "1"


def test_a_server_may_take_longer_to_start_than_a_call_may(loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import time\ntime.sleep(4)\n" + SERVER)
    tools = loaded(tool_seconds=2.0)
    assert answers(tools, ("add", {"a": 1, "b": 1}))[0].text == "2"
    assert answers(tools, ("leave", {}))[0].failure is not None
    results = [answers(tools, ("add", {"a": 1, "b": 2}))[0] for _ in range(12)]
    assert results[0].failure is not None and results[-1].text == "3"


def test_a_server_is_reached_by_its_address(loaded: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = SERVER.replace("server.run(*sys.argv[1:])", f'server.run("streamable-http", port={port})')
    (tmp_path / "web.py").write_text(text)
    with subprocess.Popen([sys.executable, str(tmp_path / "web.py")], stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(600):
                with socket.socket() as client:
                    if client.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            tools = loaded(f"http://127.0.0.1:{port}/mcp")
            assert answers(tools, ("add", {"a": 4, "b": 3})) == [Result(text="7")]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ("no-such-program", "FileNotFoundError"),
        (f"{shlex.quote(sys.executable)} -c pass", "the server does not answer: MCPError: Connection closed"),
        ("http://127.0.0.1:9/mcp", "the server does not answer"),
    ],
)
def test_what_is_no_server_is_refused_with_the_reason(server: str, why: str, loaded: Any) -> None:
    with pytest.raises(UserError) as error:
        loaded(server)
    assert why in str(error.value) and f"rollout.mcp: {server}" in str(error.value)
    assert "see what it prints" in str(error.value) and "TaskGroup" not in str(error.value)


def test_a_server_without_tools_is_refused(loaded: Any) -> None:
    Path("empty.py").write_text('from mcp.server.mcpserver import MCPServer\nMCPServer("empty").run()\n')
    with pytest.raises(UserError, match="the server has no tools"):
        loaded(f"{shlex.quote(sys.executable)} empty.py")


def test_two_servers_with_a_tool_of_one_name_are_refused(loaded: Any) -> None:
    with pytest.raises(UserError, match="two tools are named add"):
        loaded(COMMAND, f"{COMMAND} stdio")
