"""What agents ask for and get, in the form of OpenAI's chat completions and of Anthropic's messages."""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gspo.types import Messages, Sample

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_OPENAI = {
    **{"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False},
    **{"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True},
}
_ANTHROPIC = {"tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}}
_READ = ("messages", "tools", "stream", "max_tokens", "max_completion_tokens", "stop", "stop_sequences", "system")
_IGNORED = ("model", "user", "metadata", "store", "stream_options", "service_tier")  # of none of them tokens depend
_ROLES = ("system", "developer", "user", "assistant", "tool")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class RefusedError(Exception):
    """A request that is not answered, with the reason and the status of HTTP."""

    def __init__(self, what: str, status: int = 400) -> None:
        super().__init__(what)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of an agent's: the policy's next message, behind these in OpenAI's form.

    Example: Request(messages=[{"role": "user", "content": "2 + 3?"}], tools=(), most=None, stop=())
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]]
    most: int | None  # tokens
    stop: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The policy's message.

    Example: Answer(content="5", calls=(), finish_reason="stop", num_read=12, num_written=2)
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # a response's own id ends in it
    content: str
    calls: Sequence[Mapping[str, Any]]  # {"name": …, "arguments": {…}}
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_read: int
    num_written: int
    stop: str | None = None  # the string that the agent has given, and that ended it


def answer_of(sample: Sample, request: Request, *, num_read: int, tokenizer: Any) -> Answer:
    """The message that a turn is, with its calls where the agent has tools.

    A string that the agent has given to stop at is left out.
    """
    text, is_cut = sample.text, sample.finish_reason == "length"
    places = [(text.index(string), string) for string in request.stop if string in text and not is_cut]
    place, stop = min(places, default=(len(text), None))
    text = text[:place]
    said, inside = spoken(text, tokenizer, sample.query.prompt_ids, request.tools) if request.tools else (text, [])
    found = [call_of(own) for own in inside]
    calls = [{"name": call[0], "arguments": call[1]} for call in found if call and isinstance(call[0], str)]
    is_call = bool(calls) and len(calls) == len(found)  # else the agent reads what the policy wrote
    return Answer(
        content=said if is_call else text,
        calls=calls if is_call else (),
        finish_reason="length" if is_cut else "tool_calls" if is_call else "stop",
        stop=stop,
        num_read=num_read,
        num_written=sample.num_tokens,
    )


def spoken(
    text: str, tokenizer: Any, prompt_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, list[str]]:
    """Return what a turn says before its calls, and each of them as JSON; one that cannot be read is an empty text.

    They are read by the tokenizer's own response template, and without one are what stands in `<tool_call>` tags.
    """
    before = text.partition("<tool_call>")[0].strip()
    if getattr(tokenizer, "response_template", None) is None:
        return before, CALL.findall(text)
    try:
        message = tokenizer.parse_response(text, prefix=tokenizer.decode([*prompt_ids]), tools=[*tools])
        calls = message.get("tool_calls") or []
        return (
            before if "<tool_call>" in text else str(message.get("content") or ""),
            [json.dumps(call["function"]) for call in (calls if isinstance(calls, list) else [calls])],
        )
    except Exception:  # of what the policy may write there is no end
        return text, [""]


def call_of(text: str) -> tuple[Any, dict[str, Any]] | None:
    """The name and the arguments of a call, the inside of `<tool_call>`; None where it is not one."""
    try:
        said = json.loads(text)
        name, arguments = said["name"], said.get("arguments", said.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return (name, arguments) if isinstance(arguments, dict) and _is_shallow(arguments) else None


def _is_shallow(value: Any, most: int = 100) -> bool:
    """Tell whether it has at most so many levels: what has more could not be handed to a process."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most >= 0 and all(_is_shallow(inner, most - 1) for inner in inside)


class OpenAI:
    """Chat completions."""

    @staticmethod
    def request(body: Mapping[str, Any], given: Mapping[str, Any]) -> Request:
        """Read a request; RefusedError for what would change the distribution that is `given`, by key."""
        _check(body, {**_OPENAI, **given})
        stop = body.get("stop") or ()
        messages = [_openai_message(message) for message in body["messages"]]
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        stops = (stop,) if isinstance(stop, str) else (*stop,)
        return Request(messages=messages, tools=body.get("tools") or (), most=most, stop=stops)

    @staticmethod
    def response(answer: Answer, model: str) -> dict[str, Any]:
        """The answer, whole."""
        content = answer.content if answer.content or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.calls:
            message["tool_calls"] = _openai_calls(answer)
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": None}
        frame = {"id": f"chatcmpl-{answer.id}", "object": "chat.completion", "created": 0, "model": model}
        return {**frame, "choices": [choice], "usage": _openai_usage(answer)}

    @staticmethod
    def events(answer: Answer, model: str, options: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
        """The answer as a stream: names and contents of events."""
        frame = {"id": f"chatcmpl-{answer.id}", "object": "chat.completion.chunk", "created": 0, "model": model}
        delta: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(_openai_calls(answer))]
        for part, reason in ((delta, None), ({}, answer.finish_reason)):
            yield None, {**frame, "choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        if options.get("include_usage"):
            yield None, {**frame, "choices": [], "usage": _openai_usage(answer)}
        yield None, "[DONE]"

    @staticmethod
    def error(what: str) -> dict[str, Any]:
        """Say why a request is refused."""
        return {"error": {"message": what, "type": "invalid_request_error", "param": None, "code": None}}


class Anthropic:
    """Messages."""

    @staticmethod
    def request(body: Mapping[str, Any], given: Mapping[str, Any]) -> Request:
        """Read a request; RefusedError for what would change the distribution that is `given`, by key."""
        _check(body, {**_ANTHROPIC, **given})
        messages: Messages = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": system})
        for message in body["messages"]:
            messages += _from_anthropic(message)
        tools = [_from_anthropic_tool(tool) for tool in body.get("tools") or ()]
        stop = (*(body.get("stop_sequences") or ()),)
        return Request(messages=messages, tools=tools, most=body.get("max_tokens"), stop=stop)

    @staticmethod
    def response(answer: Answer, model: str) -> dict[str, Any]:
        """The answer, whole."""
        return {
            **{"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": model},
            **{"stop_reason": "stop_sequence" if answer.stop else _REASONS[answer.finish_reason]},
            **{"content": _blocks(answer), "stop_sequence": answer.stop},
            "usage": {"input_tokens": answer.num_read, "output_tokens": answer.num_written},
        }

    @staticmethod
    def events(answer: Answer, model: str, options: Mapping[str, Any]) -> Iterator[tuple[str | None, Any]]:
        """The answer as a stream: names and contents of events."""
        whole = Anthropic.response(answer, model)
        begun = {**whole, "content": [], "stop_reason": None}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(whole["content"]):
            is_text = block["type"] == "text"
            said = {"type": "text_delta", "text": block["text"]} if is_text else None
            said = said or {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = {**block, "text": ""} if is_text else {**block, "input": {}}
            events.append({"type": "content_block_start", "index": index, "content_block": empty})
            events.append({"type": "content_block_delta", "index": index, "delta": said})
            events.append({"type": "content_block_stop", "index": index})
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        events.append({"type": "message_delta", "delta": delta, "usage": whole["usage"]})
        events.append({"type": "message_stop"})
        return ((event["type"], event) for event in events)

    @staticmethod
    def error(what: str) -> dict[str, Any]:
        """Say why a request is refused."""
        return {"type": "error", "error": {"type": "invalid_request_error", "message": what}}


def _check(body: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise RefusedError for keys on which tokens depend, and which are not as they are given."""
    if not isinstance(body.get("messages"), list) or not all(isinstance(each, dict) for each in body["messages"]):
        raise RefusedError("messages: give a list of messages")
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError("a text has half a pair of surrogates, which no tokenizer takes") from None
    for message in body["messages"]:
        if message.get("role") not in _ROLES:
            raise RefusedError(f"messages: there is no role {str(message.get('role'))[:40]!r}")
    for name in ("max_tokens", "max_completion_tokens"):
        if (most := body.get(name)) is not None and (type(most) is not int or most < 1):
            raise RefusedError(f"{name}: give a number of tokens, at least 1")
    for name in ("stop", "stop_sequences"):
        strings = body.get(name) or ()
        if not isinstance(strings, str) and not all(isinstance(own, str) and own for own in strings):
            raise RefusedError(f"{name}: give texts")
    for name, value in body.items():
        if name in _READ or name in _IGNORED or value is None or (name in given and given[name] == value):
            continue
        instead = f"it is {given[name]!r} here" if name in given else "it has no effect here"
        raise RefusedError(f"{name}: {json.dumps(value)[:80]} cannot be had, for {instead}; leave it out")


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with the arguments of calls as templates take them."""
    made = {name: value for name, value in message.items() if value is not None}
    if calls := made.get("tool_calls"):
        functions = [call["function"] for call in calls]
        made["tool_calls"] = [_function_call(own["name"], _loaded(own["arguments"])) for own in functions]
    return {"content": "", **made}


def _loaded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        raise RefusedError(f"tool_calls: the arguments {arguments[:80]!r} are no JSON") from None


def _from_anthropic(message: Mapping[str, Any]) -> Messages:
    """The message in OpenAI's form: results of tools are messages of their own."""
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message.get("role"), "content": content}]
    results = [block for block in content if block.get("type") == "tool_result"]
    calls = [block for block in content if block.get("type") == "tool_use"]
    texts = [block for block in content if block.get("type") not in ("tool_result", "tool_use", "thinking")]
    made: Messages = [{"role": "tool", "content": block.get("content") or ""} for block in results]
    if texts or calls or not results:
        own: dict[str, Any] = {"role": message.get("role"), "content": texts}
        if calls:
            own["tool_calls"] = [_function_call(call["name"], call["input"]) for call in calls]
        made.append(own)
    return made


def _from_anthropic_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    description = tool.get("description", "")
    function = {"name": tool["name"], "description": description, "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _function_call(name: Any, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _openai_calls(answer: Answer) -> list[dict[str, Any]]:
    texts = [json.dumps(call["arguments"], ensure_ascii=False) for call in answer.calls]
    calls = [_function_call(call["name"], text) for call, text in zip(answer.calls, texts, strict=True)]
    return [{"id": f"call_{uuid.uuid4().hex}", **call} for call in calls]


def _openai_usage(answer: Answer) -> dict[str, int]:
    total = answer.num_read + answer.num_written
    return {"prompt_tokens": answer.num_read, "completion_tokens": answer.num_written, "total_tokens": total}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": answer.content}] if answer.content or not answer.calls else []
    calls = [
        {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call["name"], "input": call["arguments"]}
        for call in answer.calls
    ]
    return [*text, *calls]
