"""Calls of tools are read by the tokenizer's own response template, and without one from `<tool_call>` tags."""

import json
from typing import Any

import pytest
import torch
from tests.queries.chat_templates import PUBLISHED, byte_tokenizer
from tests.samples import query_of

from gspo import loop
from gspo.engine.engine import Completion
from gspo.model.policy import Policy
from gspo.queries.bridge import Bridge
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.rollout.conversation import Conversation
from gspo.rollout.dialects import Request, answer_of, spoken
from gspo.rollout.tools import Result, Tool, Tools
from gspo.types import Query, Sample

NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
WHOLE = {"type": "function", "function": "{content}"}
# How published families write calls, in transformers' form.
HARMONY = {  # gpt-oss
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|return|>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            **{"close": "<|call|>", "repeats": True, "content": "json", "transform": NAMED},
        },
    },
}
COMMAND = {  # Cohere
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"},
        "tool_calls": {
            **{"open": "<|START_ACTION|>", "close": "<|END_ACTION|>", "content": "json", "transform_each": True},
            "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
INLINE = {  # Qwen3-Coder
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            **{"close": "</tool_call>", "repeats": True, "content": "xml-inline", "transform": NAMED},
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
HERMES = {  # SmolLM3
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            **{"open": "<tool_call>", "close": "</tool_call>", "repeats": True, "content": "json"},
            "transform": WHOLE,
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
NUMBERS = {"a": {"type": "integer"}, "b": {"type": "integer"}}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": NUMBERS}},
}
SAID = {
    "harmony": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 3}',
    ),
    "command": (
        COMMAND,
        "<|CHATBOT_TOKEN|>",
        '<|START_ACTION|>[{"tool_name": "add", "parameters": {"a": 2, "b": 3}}]<|END_ACTION|>',
    ),
    "inline": (
        INLINE,
        "<|im_start|>assistant\n",
        "<tool_call>\n<function=add>\n<parameter=a>2</parameter>\n<parameter=b>3</parameter>\n</function>\n</tool_call>",
    ),
    "hermes": (
        HERMES,
        "<|im_start|>assistant\n",
        'so<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>',
    ),
}


def tokenizer_of(template: dict[str, Any] | None) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = PUBLISHED["chatml"], template
    return tokenizer


@pytest.mark.parametrize("family", SAID)
def test_calls_are_read_as_the_family_writes_them(family: str) -> None:
    template, opened, said = SAID[family]
    tokenizer = tokenizer_of(template)
    prompt = tokenizer(f"q{opened}")["input_ids"]
    before, calls = spoken(said, tokenizer, prompt, [ADD])
    assert [json.loads(call) for call in calls] == [{"name": "add", "arguments": {"a": 2, "b": 3}}]
    assert before == ("so" if family == "hermes" else "")


@pytest.mark.parametrize("family", SAID)
def test_a_call_that_breaks_off_is_none_that_can_be_read(family: str) -> None:
    template, opened, said = SAID[family]
    if family != "inline":  # which has no form that is wrong
        broken = said.replace("}", "")
        assert spoken(broken, tokenizer := tokenizer_of(template), tokenizer(opened)["input_ids"], [ADD])[1] == [""]


def test_a_prompt_that_begins_the_answer_is_read_with_it() -> None:
    tokenizer = tokenizer_of(HERMES)
    prompt = tokenizer("<|im_start|>assistant\n<think>")["input_ids"]
    assert spoken("<tool_call>no</tool_call></think>it is 5", tokenizer, prompt, [ADD])[1] == []


class Policies:
    def __init__(self, tokenizer: Any, *turns: str, end: str = "<|im_end|>") -> None:
        self.tokenizer, self.turns, self.end, self.asked = tokenizer, turns, end, list[str]()

    async def __call__(self, ids: Any, is_complete: Any, *, turn: int, max_new_tokens: int) -> Completion:
        self.asked.append(self.tokenizer.decode([*ids]))
        tokens = torch.tensor(self.tokenizer(f"{self.turns[turn]}{self.end}")["input_ids"])
        given: Any = {"full_logprobs": None, "versions": ((0, len(tokens)),), "experts": None, "finish_reason": "stop"}
        return Completion(token_ids=tokens, logprobs=-tokens.float(), **given)


def conversed(query: Query, policies: Policies) -> Sample:
    """A response with a tool that adds."""
    tokenizer = policies.tokenizer

    async def add(session: str, arguments: Any) -> Result:
        return Result(text=str(arguments["a"] + arguments["b"]))

    tools = Tools(
        by_name={"add": Tool(name="add", schema=ADD, call=add)},
        bridge=Bridge(tokenizer, QueriesConfig()),
        functions=(),
        close=lambda: None,
    )
    policy = object.__new__(Policy)
    vars(policy).update(tokenizer=tokenizer, stop_ids=(tokenizer.convert_tokens_to_ids(policies.end),))
    return loop.run(Conversation(policy, RolloutConfig(max_new_tokens=400), tools)(query, policies))


@pytest.mark.parametrize(("family", "broken"), [("inline", False), ("hermes", True)])
def test_a_conversation_makes_them(family: str, broken: bool) -> None:
    """Those of the turn, and none of an earlier one again."""
    template, opened, said = SAID[family]
    tokenizer = tokenizer_of(template)
    said = said.replace("}" if broken else "\0", "")

    query = query_of(tokenizer(f"q{opened}")["input_ids"])
    sample = conversed(query, Policies(tokenizer, said, "five"))
    assert sample.turns[1].text == ("error: the call cannot be read" if broken else "5") and sample.answer == "five"
    assert (sample.turns[0].num_calls, sample.turns[0].num_errors) == (1, int(broken))


def test_a_turn_that_the_prompt_has_begun_is_no_other_than_was_sampled() -> None:
    """Also where the template writes before the first turn otherwise than before one to come."""
    tokenizer = tokenizer_of(None)
    tokenizer.chat_template = PUBLISHED["deepseek"]

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    (query,) = render_all([Row(id="q", prompt=messages, columns={})], tokenizer, queries=QueriesConfig())
    sample = conversed(query, Policies(tokenizer, SAID["hermes"][2], "five", end="<|end|>"))
    assert sample.answer == "five" and sample.starts == ()


def test_an_agent_gets_them() -> None:
    tokenizer = tokenizer_of(HARMONY)
    _, opened, said = SAID["harmony"]
    ids = torch.tensor([1])
    sample = Sample(
        query=query_of(tokenizer(opened)["input_ids"]),
        token_ids=ids,
        loss_mask=ids.bool(),
        text=said,
        finish_reason="stop",
        sampler_logprobs=-ids.float(),
        versions=((0, 1),),
    )
    request = Request(messages=[], tools=[ADD], most=None, stop=())
    answer = answer_of(sample, request, num_read=1, tokenizer=tokenizer)
    assert (answer.finish_reason, answer.content) == ("tool_calls", "")
    assert answer.calls == [{"name": "add", "arguments": {"a": 2, "b": 3}}]
