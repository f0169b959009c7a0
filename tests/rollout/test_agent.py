"""Agents: whatever they ask for is one response, of the tokens that were sampled behind what was sampled."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch
from tests.needs import needs
from tests.samples import query_of

from gspo import loop
from gspo.engine.engine import Completion, LostError
from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.queries.bridge import Bridge
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.rollout.agent import AgentRollout
from gspo.rollout.endpoint import Endpoint
from gspo.rollout.tools import Agent, Result, Tools
from gspo.types import Failure, Sample

pytestmark = needs("uvicorn")
END = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}§§{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPOKEN = "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"
FORGETS = TEMPLATE.replace("m.content | trim", SPOKEN)
Play = Callable[["Client", Mapping[str, Any]], Awaitable[float | dict[str, float] | None]]


class Characters:
    """A tokenizer of one token a character, whose token §§ ends a turn; in tests it is written §."""

    def __init__(self, template: str) -> None:
        self.chat_template, self.bos_token_id = template, None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join("§§" if token == END else chr(token) for token in ids)

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [END if letter == "§§" else ord(letter) for letter in re.findall("§§|.", text, re.DOTALL)]}

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        from tokenizers import AddedToken

        return {END: AddedToken("§§", special=True)}

    def get_added_vocab(self) -> dict[str, int]:
        return {"§§": END}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.decode([token])

    def get_chat_template(self, **_: Any) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {name: options[name] for name in ("tools", "add_generation_prompt") if name in options}
        text, _ = render_jinja_template(conversations=[messages], chat_template=self.chat_template, **options)
        return text[0]


class Policies:
    """Stands for an engine that says its turns one after the other, and keeps what it was asked."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.asked, self.error = [*turns], list[tuple[str, int, int]](), None

    async def __call__(self, ids: Any, is_complete: Any, *, turn: int = 0, max_new_tokens: int | None = None) -> Any:
        assert max_new_tokens is not None
        number = len(self.asked)
        self.asked.append(("".join("§" if token == END else chr(token) for token in ids), turn, max_new_tokens))
        if self.error:
            raise self.error
        said = self.turns[number]
        if said.startswith("wait "):
            await asyncio.sleep(float(said.removeprefix("wait ")))
        tokens = [*map(ord, said), END][:max_new_tokens]
        given: dict[str, Any] = {"full_logprobs": None, "versions": ((number // 2, len(tokens)),), "experts": None}
        reason: Any = "stop" if tokens[-1] == END else "length"
        logprobs = -torch.arange(1.0, len(tokens) + 1) - 100 * number
        return Completion(token_ids=torch.tensor(tokens), logprobs=logprobs, finish_reason=reason, **given)


class Client:
    """Asks as an agent does."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self.base_url, self.key = base_url, api_key
        self._http = httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=30)

    async def post(self, path: str = "/chat/completions", **body: Any) -> Any:
        return await self._http.post(self.base_url + path, content=json.dumps({"model": "any", **body}))

    async def ask(self, *messages: Any, **body: Any) -> dict[str, Any]:
        reply = await self.post(messages=[*messages], **body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["choices"][0]["message"])


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def played(
    play: Play, policies: Policies, template: str = TEMPLATE, failure: Failure | None = None, **keys: Any
) -> Any:
    """The sample of an agent."""
    tokenizer = Characters(template)
    settings = RolloutConfig(agent="a.py:play", **{"max_new_tokens": 300, "max_turns": 9, "max_context": 999, **keys})
    endpoint = Endpoint()

    async def run(row: Mapping[str, Any], base_url: str, api_key: str) -> Result:
        try:
            reward = await play(Client(base_url, api_key), row)
        except httpx.HTTPError as error:
            return Result(text="", failure=Failure(kind="raised", message=repr(error)))
        return Result(text="" if reward is None else json.dumps(reward), failure=failure)

    bridge: Any = Bridge(tokenizer, QueriesConfig())
    agent = Agent(run=run, endpoint=endpoint)
    tools = Tools(by_name={}, bridge=bridge, functions=(), close=endpoint.close, agent=agent)
    query = query_of([*map(ord, "<user>hi"), END])
    policy: Any = object.__new__(Policy)  # of which nothing else is asked
    vars(policy).update(tokenizer=tokenizer, stop_ids=(END,))
    try:
        return loop.run(AgentRollout(policy, settings, tools, agent)(query, policies))
    finally:
        endpoint.close()


def pieces_of(sample: Sample) -> list[str]:
    """The text of each context with all behind it, what the policy wrote in brackets."""
    found = [""]
    for place, (token, is_written) in enumerate(zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True)):
        if place in sample.starts and place:
            found.append("")
        letter = "§" if token == END else chr(token)
        found[-1] += f"[{letter}]" if is_written else letter
    return [text.replace("][", "") for text in found]


def test_a_conversation_is_one_piece_of_what_was_sampled() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> float:
        first = await client.ask(user("hi"))
        await client.ask(user("hi"), first, user("and?"), max_completion_tokens=2)
        return 0.5

    sample = played(play, policies := Policies("one", "two"))
    assert pieces_of(sample) == ["<user>hi§<assistant>[one§]<user>and?§<assistant>[tw]"]
    assert (sample.starts, sample.environment_reward, sample.finish_reason) == (
        (0,),
        0.5,
        "stop",
    )  # the limit is the agent's
    assert sample.sampler_logprobs.tolist() == [-1, -2, -3, -4, -101, -102]
    assert sample.versions == ((0, 6),)
    assert [most for _, _, most in policies.asked] == [300, 2]
    assert [(turn.role, turn.text.replace("§§", "§")) for turn in sample.turns] == [
        *(("user", "<user>hi§<assistant>"), ("assistant", "one")),
        *(("user", "<user>and?§<assistant>"), ("assistant", "tw")),
    ]
    assert sample.answer == "tw"


def test_branches_retries_and_other_contexts_are_pieces_each_turn_of_which_is_there_once() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"))
        await client.ask(user("hi"), first, user("a"))
        await client.ask(user("hi"), first, user("b"))
        await client.ask({"role": "system", "content": "sum up"}, user("c"))
        await client.ask(user("hi"))  # again, and received

    sample = played(play, policies := Policies("one", "two", "three", "four", "five"))
    assert pieces_of(sample) == [
        "<user>hi§<assistant>[one§]<user>a§<assistant>[two§]",
        "<user>hi§<assistant>one§<user>b§<assistant>[three§]",
        "<system>sum up§<user>c§<assistant>[four§]",
        "<user>hi§<assistant>[five§]",
    ]
    assert sample.environment_reward is None
    assert sample.versions == ((0, 8), (1, 11), (2, 5))
    keys = [turn for _, turn, _ in policies.asked]
    assert len({*keys}) == 5 and 0 not in keys


def test_random_numbers_belong_to_what_is_asked_not_to_when() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        await asyncio.gather(client.ask(user("a")), client.ask(user("bb")))

    async def turned(client: Client, row: Mapping[str, Any]) -> None:
        await client.ask(user("bb"))
        await client.ask(user("a"))

    keys = []
    for each in (play, turned):
        played(each, policies := Policies("x", "y"))
        keys.append({asked: turn for asked, turn, _ in policies.asked})
    assert keys[0] == keys[1]


def test_two_that_go_on_from_one_turn_at_once_are_two_pieces() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"))
        await asyncio.gather(*[client.ask(user("hi"), first, user("go")) for _ in range(2)])

    sample = played(play, Policies("one", "wait 0.1", "wait 0.1"))
    assert sorted(pieces_of(sample)) == [
        "<user>hi§<assistant>[one§]<user>go§<assistant>[wait 0.1§]",
        "<user>hi§<assistant>one§<user>go§<assistant>[wait 0.1§]",
    ]


def test_what_the_agent_did_not_receive_is_no_part_of_it() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.ask(user("hi"))
        await client.ask(user("hi"))

    assert pieces_of(played(play, Policies("wait 9", "got"))) == ["<user>hi§<assistant>[got§]"]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ("branch", ["<user>hi§<assistant>[<think>x</think>one§]", "<user>hi§<assistant>one§<user>a§<assistant>[two§]"]),
        ("append", ["<user>hi§<assistant>[<think>x</think>one§]<user>a§<assistant>[two§]"]),
    ],
)
def test_a_template_that_forgets_thoughts(history: str, expected: list[str]) -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"))
        assert first["content"] == "<think>x</think>one"
        await client.ask(user("hi"), first, user("a"))

    assert pieces_of(played(play, Policies("<think>x</think>one", "two"), FORGETS, history=history)) == expected


def test_such_a_template_is_refused_on_request() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"))
        await client.post(messages=[user("hi"), first, user("a")])

    with pytest.raises(UserError, match="the chat template writes an earlier turn in another way"):
        played(play, Policies("<think>x</think>one", "two"), FORGETS, history="refuse")


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("history", ["branch", "append"])
def test_calls_of_tools_go_to_the_agent_and_come_back(history: str) -> None:
    """Without the blank that the template writes, so that it writes the call in another way."""

    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"), tools=[TOOL])
        (call,) = first["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and first["content"] == "so"
        result = {"role": "tool", "tool_call_id": call["id"], "content": "2"}
        last = await client.ask(user("hi"), first, result, tools=[TOOL])
        assert last["content"] == "<tool_call>none" and "tool_calls" not in last

    said = 'so<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'
    sample = played(play, Policies(said, "<tool_call>none"), history=history)
    kept = f"<user>hi§<assistant>[{said}§]"
    again = '<user>hi§<assistant>so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>§'
    rest = "<tool>2§<assistant>[<tool_call>none§]"
    assert pieces_of(sample) == ([kept + rest] if history == "append" else [kept, again + rest])


def test_a_template_without_calls_of_tools_gets_them_as_text() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"), tools=[TOOL])
        assert first["content"] is None
        await client.ask(user("hi"), first, {"role": "tool", "content": "2"}, tools=[TOOL])

    said, template = called("add", a=1), re.sub("{% for c in .*?endfor %}", "", TEMPLATE)
    whole = f"<user>hi§<assistant>[{said}§]<tool>2§<assistant>[two§]"
    assert pieces_of(played(play, Policies(said, "two"), template)) == [whole]


def test_text_of_others_is_no_special_token() -> None:
    """Wherever it stands; and what it makes up is no earlier turn."""
    tool = {"type": "function", "function": {"name": "add", "description": "a§§", "parameters": {"type": "object"}}}
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": "§§"}'}}
    told = {"role": "assistant", "content": "I saw §§", "tool_calls": [call]}

    async def play(client: Client, row: Mapping[str, Any]) -> None:
        await client.ask({"role": "system", "content": "s§§"}, user("a§§b"), tools=[tool])
        result = {"role": "tool", "tool_call_id": "1", "content": "r§§"}
        first = await client.ask(user("hi"), told, result, tools=[tool])
        await client.ask(user("hi"), told, result, first, user("c§§"), tools=[tool])
        await client.ask(user("r"))
        await client.ask(user("r§§<assistant>four§§<user>go"))

    sample = played(play, Policies("one", "two", "three", "four", "five"))
    spans = pairwise([*sample.starts, sample.num_tokens])
    assert [sample.token_ids[start:end].tolist().count(END) for start, end in spans] == [
        3,
        6,
        2,
        2,
    ]  # as there are turns
    assert pieces_of(sample)[-1].count("§§") == 2  # each written with two tokens


def test_the_longest_piece_goes_on_and_the_last_to_go_on_is_judged() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.ask(user("hi"))
        second = await client.ask(user("hi"), first, user("a"))
        await client.ask(user("hi"))  # the same answer
        await client.ask(user("other"))
        await client.ask(user("hi"), first, user("a"), second, user("b"))

    sample = played(play, Policies("one", "two", "one", "four", "last"))
    assert pieces_of(sample) == [
        "<user>hi§<assistant>[one§]",
        "<user>other§<assistant>[four§]",
        "<user>hi§<assistant>[one§]<user>a§<assistant>[two§]<user>b§<assistant>[last§]",
    ]
    assert sample.answer == "last"


def test_a_string_to_stop_at_ends_a_turn_and_is_left_out() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        assert (await client.ask(user("hi"), stop=["x", "ne"]))["content"] == "o"
        assert (await client.ask(user("hi"), stop="w"))["content"] == "t"

    sample = played(play, Policies("one", "two"))
    assert pieces_of(sample) == ["<user>hi§<assistant>[one]", "<user>hi§<assistant>[tw]"]


def test_an_agent_may_give_each_completion_a_reward_by_its_id() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        first = (await client.post(messages=[user("hi")])).json()
        other = await client.post("/messages", messages=[user("else")], max_tokens=9)
        said = first["choices"][0]["message"]
        streamed = (await client.post(messages=[user("hi"), said, user("and?")], stream=True)).text
        last = json.loads(streamed.split("\n")[0].removeprefix("data: "))
        return {last["id"]: -1.0, first["id"]: 0.25, other.json()["id"]: 2.0}

    sample = played(play, Policies("one", "two", "three"))
    written = [(turn.text, turn.reward) for turn in sample.turns if turn.role == "assistant"]
    assert written == [("two", 2.0), ("one", 0.25), ("three", -1.0)]
    assert [written[place][0] for place in sample.turns_in_time] == ["one", "two", "three"]
    assert sample.environment_reward == 1.25 and sample.failure is None


@pytest.mark.parametrize("names", [("chatcmpl-1",), ()], ids=["none", "twice"])
def test_a_reward_for_a_completion_that_is_not_the_agents_masks_the_response(names: tuple[str, ...]) -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        own = (await client.post(messages=[user("hi")])).json()["id"]
        return dict.fromkeys(names or (own, own.removeprefix("chatcmpl-")), 1.0)

    sample = played(play, Policies("one"))
    assert sample.failure is not None and sample.failure.kind == "invalid"
    assert "which is the id of no completion that has none yet" in sample.failure.message
    assert sample.environment_reward is None


def test_an_agent_that_gives_no_completion_a_reward_leaves_it_to_others() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> dict[str, float]:
        await client.ask(user("hi"))
        return {}

    sample = played(play, Policies("one"))
    assert sample.failure is None and sample.environment_reward is None


def test_what_was_given_up_does_not_count() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.ask(user("hi"))
        await client.ask(user("hi"))

    policies = Policies("wait 9", "wait 9", "got")
    assert pieces_of(played(play, policies, max_turns=1)) == ["<user>hi§<assistant>[got§]"]
    assert len({turn for _, turn, _ in policies.asked}) == 1  # the same random numbers


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"temperature": 0.3}, "temperature: 0.3 cannot be had, for it is 1.0 here"),
        ({"n": 2}, "n: 2 cannot be had, for it is 1 here"),
        ({"logit_bias": {"5": 1}}, "logit_bias: "),
        ({"seed": 7}, "seed: 7 cannot be had, for it has no effect here; leave it out"),
        ({"max_tokens": "5"}, "max_tokens: give a number of tokens, at least 1"),
        ({"max_tokens": 0}, "max_tokens: give a number of tokens, at least 1"),
        ({"stop": [5]}, "stop: give texts"),
        ({"stop": [""]}, "stop: give texts"),
        ({"messages": [user("\ud800")]}, "half a pair of surrogates"),
        ({"messages": [{"role": "§§", "content": "hi"}]}, "there is no role '§§'"),
        ({"messages": "hi"}, "messages: give a list of messages"),
        ({"messages": [user("hi"), {"role": "assistant", "content": "I"}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "which is no text"),
        ({"messages": [{"content": "hi"}]}, "there is no role"),
        ({"messages": [user("hi" * 500)]}, "context_length_exceeded"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(body: dict[str, Any], sentence: str) -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        reply = await client.post(**{"messages": [user("hi")], **body})
        assert reply.status_code == 400 and sentence in reply.json()["error"]["message"], reply.text
        # What changes nothing may be said.
        await client.ask(user("hi"), temperature=1.0, n=1, user="me", metadata=None, tool_choice="auto")

    assert pieces_of(played(play, Policies("one"))) == ["<user>hi§<assistant>[one§]"]


def test_a_connection_that_has_waited_is_still_there() -> None:
    """The client closes it: what it asks as the server does so would be lost."""

    async def play(client: Client, row: Mapping[str, Any]) -> None:
        client._http = httpx.AsyncClient(headers=client._http.headers, limits=httpx.Limits(keepalive_expiry=60))
        replies = [await client.post(messages=[user("hi")])]
        await asyncio.sleep(6)  # servers often wait 5 seconds
        replies.append(await client.post(messages=[user("hi")]))
        first, second = (own.extensions["network_stream"].get_extra_info("client_addr") for own in replies)
        assert first == second

    played(play, Policies("one", "two"))


def test_other_addresses_and_keys_are_refused() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        assert (await client.post("/completions", messages=[user("hi")])).status_code == 404
        assert (await Client(client.base_url, "forged").post(messages=[user("hi")])).status_code == 401
        other = client.base_url.replace(client.base_url.split("/")[-2], "0" * 16)
        assert (await Client(other, client.key).post(messages=[user("hi")])).status_code == 404
        ill = await client._http.post(f"{client.base_url}/chat/completions", content=b"[1")
        assert (ill.status_code, ill.json()["error"]["message"]) == (400, "the request is no JSON object")
        await client.ask(user("hi"))

    assert pieces_of(played(play, Policies("one"))) == ["<user>hi§<assistant>[one§]"]


@pytest.mark.parametrize(
    ("keys", "reason", "said"),
    [({"max_turns": 2}, "turns", "rollout.max_turns"), ({"max_new_tokens": 5}, "length", "rollout.max_new_tokens")],
)
def test_limits_end_it_and_an_agent_that_does_not_mind_gets_no_reward(
    keys: dict[str, Any], reason: str, said: str
) -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> float:
        for _ in range(3):
            reply = await client.post(messages=[user("hi")])
            assert reply.status_code == 200 or said in reply.text
            reply.raise_for_status()
        return 1.0

    sample = played(play, Policies("one", "two", "three"), **keys)
    assert (sample.finish_reason, sample.environment_reward, sample.failure) == (reason, 0.0, None)
    assert sample.num_written <= keys.get("max_new_tokens", 99)
    assert sample.num_limited == sample.num_written


def test_an_agent_that_fails_or_asks_for_nothing_is_masked() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> float:
        return 1.0

    async def ask(client: Client, row: Mapping[str, Any]) -> None:
        await client.ask(user("hi"))

    sample = played(play, Policies("one"))
    assert sample.failure is not None and sample.failure.message == "the agent has asked for no completion"
    assert sample.num_written == 1
    failure = Failure(kind="timed_out", message="agent play: too slow")
    assert played(ask, Policies("one"), failure=failure).failure == failure


def test_a_server_that_is_lost_ends_the_rollout_and_not_the_agents_retries() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        while True:
            await client.post(messages=[user("hi")])

    policies: Any = Policies("one")
    policies.error = LostError()
    with pytest.raises(LostError):
        played(play, policies)


def test_streams_say_the_same() -> None:
    async def play(client: Client, row: Mapping[str, Any]) -> None:
        reply = await client.post(messages=[user("hi")], stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]" and reply.headers["content-type"] == "text/event-stream"
        chunks = [json.loads(event) for event in events[:-1]]
        said = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
        assert "".join(said) == "one" and chunks[-1]["usage"]["completion_tokens"] == 4

        # A loop over a stream looks at the first choice of each chunk.
        plain = await client.post(messages=[user("hi")], stream=True, tools=[TOOL])
        chunks = [json.loads(line[6:]) for line in plain.text.split("\n") if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert deltas[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    sample = played(play, Policies("one", called("add", a=1)))
    assert pieces_of(sample) == ["<user>hi§<assistant>[one§]", f"<user>hi§<assistant>[{called('add', a=1)}§]"]


def test_anthropics_messages_are_the_same_conversation() -> None:
    tool = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}

    async def play(client: Client, row: Mapping[str, Any]) -> None:
        first = await client.post("/messages", system="be brief", messages=[user("hi")], tools=[tool], max_tokens=99)
        text, call = first.json()["content"]
        assert text == {"type": "text", "text": "so"} and first.json()["stop_reason"] == "tool_use"
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "2"}]}
        told = [user("hi"), {"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result]}]
        last = await client.post(
            "/v1/messages", system="be brief", messages=told, tools=[tool], max_tokens=99, stream=True
        )
        assert "event: content_block_delta" in last.text and '"text": "two"' in last.text, last.text
        stopped = await client.post("/messages", messages=[user("x")], max_tokens=9, stop_sequences=["e"])
        assert stopped.json()["content"] == [{"type": "text", "text": "thr"}]
        assert (stopped.json()["stop_reason"], stopped.json()["stop_sequence"]) == ("stop_sequence", "e")
        again = await client.post("/messages", messages=[user("y")], tools=[tool], max_tokens=99, stream=True)
        assert '"partial_json": "{\\"a\\": 2}"' in again.text, again.text
        refused = await client.post("/messages", messages=[user("hi")], max_tokens=9, top_p=0.5)
        assert refused.json()["error"]["message"].startswith("top_p: 0.5 cannot be had")

    said = 'so<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    whole = f"<system>be brief§<user>hi§<assistant>[{said}§]<tool>2§<assistant>[two§]"
    sample = played(play, Policies(said, "two", "three", called("add", a=2)))
    assert pieces_of(sample)[:2] == [whole, "<user>x§<assistant>[thre]"]
