"""What the policy may call within a response: tools, and an environment that keeps a state for each response."""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import UserError
from gspo.loop import all_of
from gspo.queries.bridge import Bridge
from gspo.rollout.dialects import call_of, spoken
from gspo.rollout.endpoint import Endpoint
from gspo.types import Failure, Query, Sample


@dataclass(frozen=True, kw_only=True)
class Result:
    """The answer to a call.

    Example: Result(text="56088")
    """

    text: str
    is_error: bool = False  # which the policy may mend
    failure: Failure | None = None  # of what is not the policy's fault: there is no answer


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function, or a method of an environment, that the policy may call.

    Example: await Tool(name="calculator", schema={…}, call=…).call("7", {"expression": "3 * 4"}) == Result(text="12")
    """

    name: str
    schema: Mapping[str, Any]  # as chat templates take it
    call: Callable[[str, Mapping[str, Any]], Awaitable[Result]]  # of a session: the name of a response's state


@dataclass(frozen=True, kw_only=True, eq=False)
class Environment:
    """A class of which each response has an instance, known by its session.

    Example: await Environment(ask=…, has_reward=True).ask("7", "reset", {"number": 12})
    """

    ask: Callable[[str, str | None, Mapping[str, Any]], Awaitable[Result]]  # a method; None ends the session
    has_reward: bool  # by a method of its own
    by_steps: bool = False  # its method step answers each turn: it has no tools


@dataclass(frozen=True, kw_only=True, eq=False)
class Agent:
    """A program that asks the endpoint for completions, and returns a reward or nothing.

    Example: await Agent(run=…, endpoint=Endpoint()).run({"prompt": "2 + 3?"}, base_url, api_key) == Result(text="1.0")
    """

    run: Callable[[Mapping[str, Any], str, str], Awaitable[Result]]  # with a row
    endpoint: Endpoint


@dataclass(frozen=True, kw_only=True)
class Tools:
    """The tools of a run, and how their results are written.

    Example: Tools(by_name={"calculator": calculator}, bridge=bridge, functions=(calculate,), close=host.close)
    """

    by_name: Mapping[str, Tool]
    bridge: Bridge
    functions: Sequence[Callable[..., Any]]  # what the recipe names
    close: Callable[[], None]  # ends their processes
    environment: Environment | None = None
    agent: Agent | None = None  # instead of tools and environment

    async def begin(self, session: str, query: Query) -> str | None:
        """Begin a response in the environment, if there is one: what it says first; UserError where it cannot begin."""
        if self.environment is None:
            return None
        row: Mapping[str, Any] = {"prompt": query.prompt, **query.columns}
        row = {"row": row} if self.environment.by_steps else row
        result = await self.environment.ask(session, "reset", row)
        if result.failure and result.failure.kind == "crashed":  # another response may have ended the process
            result = await self.environment.ask(session, "reset", row)
        if result.failure:
            fix = "correct the class"
            raise UserError(result.failure.message, where=f"rollout.environment, row {query.id}", fix=fix)
        return result.text

    async def step(self, session: str, text: str) -> tuple[str, float | None, bool] | Failure:
        """Return what the environment says of a turn, its reward, and whether it was the last; or why it says nothing.

        Only an environment that is `by_steps` is asked.
        """
        assert self.environment is not None
        result = await self.environment.ask(session, "step", {"text": text})
        if result.failure:
            return result.failure
        said, reward, is_over = json.loads(result.text)
        return said, reward, is_over

    async def reward(self, session: str) -> tuple[float | None, Failure | None]:
        """Return what the environment gives a response in the end, or why it gives nothing."""
        if self.environment is None or not self.environment.has_reward:
            return None, None
        result = await self.environment.ask(session, "get_reward", {})
        return float(result.text) if result.text else None, result.failure

    async def end(self, session: str) -> None:
        """Forget a response in the environment, whatever has become of it."""
        if self.environment is not None:
            await self.environment.ask(session, None, {})

    def calls(self, sample: Sample) -> list[str]:
        """The calls of a turn, each as JSON."""
        schemas = [tool.schema for tool in self.by_name.values()]
        return spoken(sample.text, self.bridge.tokenizer, sample.query.prompt_ids, schemas)[1]

    async def answers(self, session: str, calls: Sequence[str]) -> list[Result]:
        """Make the calls of a turn: in an environment one after the other, for they may change it, else all at once."""
        if self.environment is not None:
            results = list[Result]()
            for call in calls:
                results.append(await self.answer(session, call))
                if results[-1].failure:
                    break
            return results
        return await all_of([self.answer(session, call) for call in calls])

    async def answer(self, session: str, call: str) -> Result:
        """Make the call that a text says; what is wrong with it is a result, too."""
        if not call:
            return Result(text="error: the call cannot be read", is_error=True)
        if (found := call_of(call)) is None:
            form = '{"name": "…", "arguments": {…}}'
            return Result(text=f"error: a call is JSON of the form {form}", is_error=True)
        name, arguments = found
        if not isinstance(name, str) or name not in self.by_name:
            known = ", ".join(self.by_name)
            return Result(text=f"error: there is no tool {str(name)[:80]!r}; there are: {known}", is_error=True)
        return await self.by_name[name].call(session, arguments)
