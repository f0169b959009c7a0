"""Conversations: what was sampled is what is trained, tools answer at the same time, and each ending has its reason."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.queries.chat_templates import PUBLISHED, TURN_END, byte_tokenizer
from tests.samples import query_of, sequence_of
from tests.sampling import sampler_of

from gspo import loop
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.engine import Completion
from gspo.errors import UserError
from gspo.model.policy import Policy
from gspo.queries.bridge import Bridge
from gspo.queries.render import render_all
from gspo.queries.row import Row
from gspo.recipe.sections import QueriesConfig, RolloutConfig
from gspo.reward.score import Scoring
from gspo.rollout.conversation import Conversation
from gspo.rollout.keys import SamplingKey, key_of_turn
from gspo.rollout.sampler import Sampler
from gspo.rollout.tools import Environment, Result, Tool, Tools
from gspo.types import Failure, Group, Query, Sample, Turn

END = 0  # a token that ends a turn


class Characters:
    """A tokenizer of one token a character, whose token 0 ends a turn."""

    chat_template = None
    added_tokens_decoder = MappingProxyType[int, Any]({})

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(index) if index else "§" for index in ids)

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": [END if letter == "§" else ord(letter) for letter in text]}

    def get_added_vocab(self) -> dict[str, int]:
        return {"§": END}

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.decode([token])


def tool(name: str, call: Callable[[Any], Any]) -> Tool:
    async def make(session: str, arguments: Any) -> Result:
        result = call(arguments)
        return await result if asyncio.iscoroutine(result) else result

    return Tool(name=name, schema={}, call=make)


ADD = tool("add", lambda arguments: Result(text=str(arguments["a"] + arguments["b"])))


def tools_of(*tools: Tool, tokenizer: Any) -> Tools:
    by_name, bridge = {each.name: each for each in tools}, Bridge(tokenizer, QueriesConfig())
    return Tools(by_name=by_name, bridge=bridge, functions=(), close=lambda: None)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Policies:
    """Stands for an engine: it says its turns one after the other, and keeps what it was asked."""

    def __init__(self, *turns: str, reasons: Sequence[str] = ()) -> None:
        self.turns, self.reasons, self.asked = [*turns], [*reasons], list[tuple[list[int], int, int]]()

    async def __call__(
        self, ids: Any, is_complete: Any, *, turn: int = 0, max_new_tokens: int | None = None
    ) -> Completion:
        assert max_new_tokens is not None
        self.asked.append((list(ids), turn, max_new_tokens))
        tokens = [ord(letter) for letter in self.turns[turn]] + [END]
        tokens = tokens[:max_new_tokens]
        reason = "stop" if tokens[-1] == END else "length"
        logprobs = -torch.arange(1.0, len(tokens) + 1) - 100 * turn
        given: dict[str, Any] = {"full_logprobs": None, "versions": ((turn // 2, len(tokens)),), "experts": None}
        return Completion(token_ids=torch.tensor(tokens), logprobs=logprobs, finish_reason=reason, **given)  # type: ignore[arg-type]


def talk(policies: Policies, *tools: Tool, **settings: Any) -> Sample:
    given = tools_of(*(tools or (ADD,)), tokenizer=Characters())
    given.bridge.role = "user"  # turns end with their own token
    return talk_in(given, policies, **settings)


def talk_in(given: Tools, policies: Policies, **settings: Any) -> Sample:
    policy = object.__new__(Policy)  # of which nothing else is asked
    vars(policy).update(tokenizer=Characters(), stop_ids=(END,))
    conversation = Conversation(policy, RolloutConfig(**{"max_new_tokens": 1000, **settings}), given)
    query = Query(id="q", prompt="?", text="?", prompt_ids=(63,), columns={})
    return loop.run(conversation(query, policies))


def stepped(*answers: Any, first: str = "so: ") -> Tools:
    """An environment that answers the turns one after the other."""
    left = [*answers]

    async def ask(session: str, method: str | None, arguments: Any) -> Result:
        if method != "step":
            return Result(text=first if method == "reset" else "")
        answer = left.pop(0)
        return Result(text="", failure=answer) if isinstance(answer, Failure) else Result(text=json.dumps(answer))

    environment = Environment(ask=ask, has_reward=False, by_steps=True)
    tokenizer: Any = Characters()
    bridge = Bridge(tokenizer, QueriesConfig(), as_user=True)
    return Tools(by_name={}, bridge=bridge, functions=(), close=lambda: None, environment=environment)


def text_of(ids: Sequence[int]) -> str:
    return Characters().decode(ids)


def test_what_was_sampled_is_trained_and_what_tools_returned_is_read() -> None:
    first, second = f"so {called('add', a=1, b=2)}", "it is 3"
    policies = Policies(first, second)
    sample = talk(policies)
    between = "\n<tool_response>\n3\n</tool_response>\n"
    assert text_of(sample.token_ids.tolist()) == f"{first}§{between}{second}§"
    written = [
        text_of([token]) for token, mask in zip(sample.token_ids.tolist(), sample.loss_mask, strict=True) if mask
    ]
    assert "".join(written) == f"{first}§{second}§"
    assert policies.asked[1][0] == [63, *sample.token_ids.tolist()[: len(first) + 1 + len(between)]]
    assert sample.sampler_logprobs.tolist() == [
        *(-float(n) for n in range(1, len(first) + 2)),
        *(-100.0 - n for n in range(1, len(second) + 2)),
    ]
    assert sample.turns == (
        Turn(role="assistant", text=first, num_tokens=len(first) + 1, num_calls=1),
        Turn(role="tool", text="3", num_tokens=len(between)),
        Turn(role="assistant", text=second, num_tokens=len(second) + 1),
    )
    assert sum(turn.num_tokens for turn in sample.turns) == sample.num_tokens
    assert (sample.answer, sample.finish_reason, sample.versions) == (second, "stop", ((0, sample.num_written),))


def test_a_response_without_a_call_is_one_turn() -> None:
    sample = talk(Policies("it is 3"))
    assert sample.text == sample.answer == "it is 3" and len(sample.turns) == 1 and sample.loss_mask.all()


def test_each_turn_may_have_another_version() -> None:
    turn = called("add", a=1, b=1)
    sample = talk(Policies(turn, turn, turn, "2"))
    size = len(turn) + 1
    assert sample.versions == ((0, 2 * size), (1, size + 2))


def test_the_first_turns_random_numbers_are_those_of_a_single_turn() -> None:
    key = SamplingKey(seed=0, step=1).of_groups(["q"], 1)[0][0]
    assert key_of_turn(key, 0) == key
    assert len({key_of_turn(key, turn) for turn in range(9)} | {key_of_turn(key + 1, turn) for turn in range(9)}) == 18


def test_several_calls_of_a_turn_are_made_at_the_same_time() -> None:
    met = asyncio.Barrier(2)

    async def wait(arguments: Any) -> Result:
        await asyncio.wait_for(met.wait(), 60)
        return Result(text=f"met {arguments['n']}")

    sample = talk(Policies(called("wait", n=1) + called("wait", n=2), "done"), tool("wait", wait))
    assert sample.turns[1].text == "met 1\nmet 2" and sample.turns[0].num_calls == 2
    assert "<tool_response>\nmet 1\n</tool_response>\n" in sample.text


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("<tool_call>{</tool_call>", "error: a call is JSON of the form"),
        ("<tool_call>[1]</tool_call>", "error: a call is JSON of the form"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error: a call is JSON of the form"),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', "error: a call is JSON of the form"),
        ('<tool_call>{"name": 7}</tool_call>', "error: there is no tool '7'; there are: add"),
        (called("sub", a=1), "error: there is no tool 'sub'; there are: add"),
        ("<tool_call>" + "[" * 100_000, "error: a call is JSON of the form"),
        *(
            (called("add", a=1).replace("1", "[" * n + "]" * n), "error: a call is JSON of the form")
            for n in (700, 985)
        ),
    ],
)
def test_what_is_no_call_is_answered_with_the_reason(call: str, said: str) -> None:
    sample = talk(Policies(call, "ok"), max_new_tokens=200_000)
    assert sample.turns[1].text.startswith(said) and sample.turns[0].num_errors == 1 and sample.answer == "ok"


def test_names_of_parameters_may_be_those_of_other_dialects() -> None:
    call = '<tool_call>\n{"name": "add", "parameters": "{\\"a\\": 1, \\"b\\": 4}"}\n</tool_call>'
    assert talk(Policies(call, "ok")).turns[1].text == "5"


def test_the_last_turns_calls_are_not_made() -> None:
    asked = list[Any]()

    def note(arguments: Any) -> Result:
        asked.append(arguments)
        return Result(text="noted")

    noted = tool("note", note)
    sample = talk(Policies(*[called("note", n=n) for n in range(5)]), noted, max_turns=3)
    assert [each["n"] for each in asked] == [0, 1]
    assert sample.finish_reason == "turns" and [turn.role for turn in sample.turns][-1] == "assistant"


@pytest.mark.parametrize("room", range(1, 60))
def test_no_response_is_longer_than_it_may_be(room: int) -> None:
    first = called("add", a=1, b=2)
    sample = talk(Policies(first, "it is three"), max_new_tokens=len(first) + room)
    assert sample.num_tokens <= len(first) + room
    assert sample.finish_reason == ("stop" if "three§" in text_of(sample.token_ids.tolist()) else "length")
    assert sample.loss_mask[-1]  # what a tool returned is never the end


def test_a_tool_that_gives_no_answer_masks_the_response(batch_of: Any) -> None:
    failure = Failure(kind="timed_out", message="tool slow: it ran over its time limit of 1 s")
    slow = tool("slow", lambda _: Result(text="", failure=failure))
    sample = talk(Policies(called("slow"), "never"), slow)
    assert sample.failure == failure and len(sample.turns) == 1 and sample.finish_reason == "stop"
    assert sample.turns[0].num_calls == 1
    group = Group(samples=(sample, *[talk(Policies("5"))] * 5))
    scoring = Scoring([], num_samples=6)
    scored = loop.run(scoring.score(group)).groups[0].samples
    assert scored[0].reward is None and scored[0].score is not None and scored[0].score.failure == failure
    assert not scored[0].takes_part
    with pytest.raises(UserError, match="slow: it ran over its time limit of 1 s; 1 of 4 responses have no reward"):
        loop.run(Scoring([], num_samples=4).score(group))


def test_an_environment_answers_each_turn_and_its_rewards_stay_with_the_turns() -> None:
    tools = stepped(["two?", 1.0, False], ["three?", None, False], ["", -0.25, True])
    sample = talk_in(tools, Policies("1", called("add", a=1, b=1), "4"))
    assert text_of(sample.token_ids.tolist()) == f"so: 1§two?{called('add', a=1, b=1)}§three?4§"
    assert [(turn.role, turn.text, turn.reward) for turn in sample.turns] == [
        ("user", "so: ", None),
        ("assistant", "1", 1.0),
        ("user", "two?", None),
        ("assistant", called("add", a=1, b=1), None),
        ("user", "three?", None),
        ("assistant", "4", -0.25),
    ]
    assert (sample.finish_reason, sample.environment_reward, sample.answer) == ("stop", 0.75, "4")
    assert sum(turn.num_tokens for turn in sample.turns) == sample.num_tokens
    assert sum(size for size, _ in sample.written_turns) == sample.num_written == int(sample.loss_mask.sum())


@pytest.mark.parametrize(
    ("settings", "reason", "reward"),
    [
        ({"max_turns": 2}, "turns", 3.0),
        ({"max_new_tokens": 9}, "length", 1.0),
        ({"max_new_tokens": 8}, "length", 1.0),
        ({"max_new_tokens": 5}, "length", 0.0),  # in the first turn
    ],
)
def test_the_last_turn_that_may_be_has_its_reward_and_one_that_is_cut_off_has_none(
    settings: dict[str, int], reason: str, reward: float
) -> None:
    sample = talk_in(stepped(["?", 1.0, False], ["?", 2.0, False]), Policies("1", "22222"), **settings)
    assert (sample.finish_reason, sample.environment_reward) == (reason, reward)
    assert sample.loss_mask[-1] and sample.num_tokens <= settings.get("max_new_tokens", 99)


THOUGHT = "<think>\nhm\n</think>\n\n"


class OfTemplate:
    """A conversation of three turns, by a published template; the policy ends its turns as that does."""

    def __init__(self, name: str, thoughts: str, **settings: Any) -> None:
        self.tokenizer = byte_tokenizer()
        self.tokenizer.chat_template = PUBLISHED[name]
        written = self.tokenizer.apply_chat_template(self.messages("CALL", 2), tokenize=False).partition("CALL")[2]
        end = TURN_END.match(written)
        assert end is not None
        self.end = self.tokenizer.convert_tokens_to_ids(end[0])
        self.thoughts, self.asked, self.said = thoughts, list[list[int]](), list[list[int]]()
        (query,) = render_all([Row(id="q", prompt="QUESTION", columns={})], self.tokenizer, queries=QueriesConfig())
        policy = object.__new__(Policy)
        vars(policy).update(tokenizer=self.tokenizer, stop_ids=(self.end,))
        tools = stepped(["a", 1.0, False], ["b<|im_end|>", 1.0, False], ["", 1.0, True], first="")
        tools = replace(tools, bridge=Bridge(self.tokenizer, QueriesConfig(), as_user=True))
        query = replace(query, prompt_ids=query.prompt_ids[: -len(tools.bridge.opened)])  # as runs have it
        conversation = Conversation(policy, RolloutConfig(**{"max_new_tokens": 999, **settings}), tools)
        self.sample = loop.run(conversation(query, self.generate))

    @staticmethod
    def messages(turn: str, num: int) -> list[dict[str, str]]:
        """The first so many messages."""
        said = ["QUESTION", turn.format(0), "a", turn.format(1), "b<|im_end|>"]
        return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said[:num])]

    async def generate(self, ids: Any, is_complete: Any, *, turn: int, max_new_tokens: int) -> Completion:
        self.asked.append([*ids])
        text = self.tokenizer(f"{self.thoughts}turn {turn}", add_special_tokens=False)["input_ids"]
        self.said.append([*text, self.end][:max_new_tokens])
        tokens = torch.tensor(self.said[-1])
        reason: Any = "stop" if tokens[-1] == self.end else "length"
        given: Any = {"full_logprobs": None, "versions": ((0, len(tokens)),), "experts": None}
        return Completion(token_ids=tokens, logprobs=-tokens.float(), finish_reason=reason, **given)

    def template_writes(self, turn: int) -> str:
        """The prompt of a turn, rendered anew, from the question on: a date may stand before it."""
        messages = self.messages(self.thoughts + "turn {}", 2 * turn + 1)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return "".join(text.partition("QUESTION")[1:])

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.tokenizer.decode([*ids]).partition("QUESTION")[1:])


THOUGHT = "<think>\nhm\n</think>\n\n"


@pytest.mark.parametrize("thoughts", ["", THOUGHT])
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_turn_stands_behind_what_the_template_writes_or_behind_what_was_sampled(name: str, thoughts: str) -> None:
    branched, kept = OfTemplate(name, thoughts), OfTemplate(name, thoughts, history="append")
    assert [branched.text(ids) for ids in branched.asked] == [*map(branched.template_writes, range(3))]
    mark = branched.tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain = [branched.template_writes(turn).replace("b<|im_end|>", "") for turn in range(3)]
    counts = [ids.count(mark) for ids in branched.asked]
    assert [count - counts[0] for count in counts] == [
        text.count("<|im_end|>") - plain[0].count("<|im_end|>") for text in plain
    ]
    sampled = [[*ids, *said] for ids, said in zip(branched.asked, branched.said, strict=True)]
    goes_on = [branched.template_writes(turn + 1).startswith(branched.text(sampled[turn])) for turn in range(2)]
    assert [branched.asked[turn + 1][: len(sampled[turn])] == sampled[turn] for turn in range(2)] == goes_on
    assert len(branched.sample.starts) == goes_on.count(False)
    for before, said, after in zip(kept.asked, kept.said, kept.asked[1:], strict=False):
        assert after[: len(before) + len(said)] == [*before, *said]
    assert kept.sample.starts == () and branched.sample.environment_reward == kept.sample.environment_reward == 3.0
    for made in (branched, kept):
        assert made.sample.token_ids[made.sample.loss_mask].tolist() == [token for own in made.said for token in own]
        assert sum(turn.num_tokens for turn in made.sample.turns) == made.sample.num_tokens
        assert [turn.role for turn in made.sample.turns] == ["user", "assistant"] * 3


def test_each_context_of_its_own_is_what_its_first_turn_was_sampled_behind() -> None:
    made = OfTemplate("qwen3", THOUGHT)
    spans = pairwise([0, *made.sample.starts, made.sample.num_tokens])
    prompts = [made.sample.query.prompt_ids, (), ()]
    pieces = [
        (*ids, *made.sample.token_ids[start:end].tolist()) for ids, (start, end) in zip(prompts, spans, strict=True)
    ]
    assert pieces == [(*ids, *said) for ids, said in zip(made.asked, made.said, strict=True)]


def test_a_template_that_forgets_thoughts_is_refused_on_request_with_the_place() -> None:
    with pytest.raises(UserError, match=r'"turn 0<\|im_end\|>.* in place of "<think>'):
        OfTemplate("qwen3", THOUGHT, history="refuse")
    assert OfTemplate("qwen3", "", history="refuse").sample.starts == ()


@pytest.mark.parametrize("most", range(20, 90, 3))
@pytest.mark.parametrize(("name", "thoughts"), [("qwen3", THOUGHT), ("longer", "")])
def test_branches_keep_the_limit_of_tokens(
    name: str, thoughts: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No context has more tokens behind the prompt than one response may have, whatever a template adds to turns."""
    added = "('Of before: ' if message['role'] == 'assistant' else '') + message['content']"
    monkeypatch.setitem(PUBLISHED, "longer", PUBLISHED["chatml"].replace("message['content']", added))
    made = OfTemplate(name, thoughts, max_new_tokens=most)
    assert made.sample.num_written <= most and made.sample.loss_mask[-1]
    for ids, said in zip(made.asked, made.said, strict=True):
        assert len(ids) + len(said) - len(made.sample.query.prompt_ids) <= most
    assert made.sample.finish_reason == ("stop" if len(made.said) == 3 and made.said[2][-1] == made.end else "length")
    assert made.sample.num_limited <= most
    if made.said[-1][-1] != made.end:  # cut off in the middle of a turn: all that it may have is taken
        assert made.sample.num_limited == most


def test_a_branch_takes_as_much_of_the_limit_as_what_goes_on() -> None:
    """The contexts that are read again are not as long here, and so add nothing; what is said does."""
    branched, kept = OfTemplate("qwen3", THOUGHT), OfTemplate("qwen3", THOUGHT, history="append")
    assert branched.sample.starts and branched.sample.num_limited == kept.sample.num_limited == kept.sample.num_tokens


def test_an_environment_that_gives_no_answer_masks_the_response() -> None:
    failure = Failure(kind="timed_out", message="tool game: it ran over its time limit of 1 s")
    sample = talk_in(stepped(["?", 1.0, False], failure), Policies("1", "2"))
    assert sample.failure == failure and [turn.reward for turn in sample.turns] == [None, 1.0, None, None]


def test_what_an_environment_says_is_cut_as_a_tools_result_is() -> None:
    sample = talk_in(stepped(["12345", 1.0, False], ["", 0.0, True]), Policies("1", "2"), tool_characters=3)
    assert "§123" in sample.text and "4" not in sample.text


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> Callable[[Policy], Sampler]:
    """A sampler whose untrained policy calls a tool by some of its tokens."""
    monkeypatch.setattr("gspo.rollout.dialects.CALL", re.compile(r"([0-9])"))

    async def answer(self: Tools, session: str, call: str) -> Result:
        return Result(text=f"{call} + {call} = {2 * int(call)}")

    monkeypatch.setattr(Tools, "answer", answer)

    def make(policy: Policy) -> Sampler:
        bridge = Bridge(policy.tokenizer, QueriesConfig())
        bridge.role = "user"
        return Sampler(EmbeddedEngine(policy), policy, replace(tools_of(tokenizer=policy.tokenizer), bridge=bridge))

    return make


SETTINGS = RolloutConfig(max_new_tokens=60, group_size=16, max_turns=4)


@pytest.mark.parametrize(("family", "said"), [("qwen3", None), ("qwen3_moe", None), ("qwen3_moe", "a cat")])
def test_a_conversations_likelihoods_and_experts_are_those_of_one_plain_pass(
    family: str,
    said: str | None,
    new_policy: Any,
    talkative: Any,
    plain_logprobs: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def begin(*_: Any) -> str | None:
        return said  # of an environment, before the first turn

    monkeypatch.setattr(Tools, "begin", begin)
    policy = new_policy(family)
    queries = [query_of([4, 5, 6], 0), query_of([7], 1)]
    key = SamplingKey(seed=0, step=1)
    groups = talkative(policy).sample(queries, SETTINGS, key, record_experts=True)
    samples = [sample for group in groups for sample in group.samples]
    assert sum(len(sample.turns) > 2 for sample in samples) >= 3
    plain = plain_logprobs(policy, [sequence_of(sample) for sample in samples])
    expected = plain[torch.cat([sample.loss_mask for sample in samples])]
    torch.testing.assert_close(torch.cat([sample.sampler_logprobs for sample in samples]), expected, atol=1e-4, rtol=0)
    again = sampler_of(policy)
    for sample in samples if family == "qwen3_moe" else ():
        assert sample.experts is not None and len(sample.experts.row) == sample.num_tokens
        whole = Query(
            id="w",
            prompt="",
            text="",
            prompt_ids=(*sample.query.prompt_ids, *sample.token_ids[:-1].tolist()),
            columns={},
        )
        one = RolloutConfig(max_new_tokens=1, group_size=1)
        (read,) = again.sample([whole], one, key, record_experts=True)[0].samples
        assert read.experts is not None
        both = torch.cat([read.experts.prefix, read.experts.row])
        assert torch.equal(torch.cat([sample.experts.prefix, sample.experts.row]), both)


def test_each_turn_has_random_numbers_of_its_own(new_policy: Any, talkative: Any) -> None:
    sampler, asked = talkative(new_policy()), list[Any]()
    submit = sampler.engine.submit

    def noted(prompts: Sequence[Any], sampling: Any) -> Any:
        asked.extend(prompts)
        return submit(prompts, sampling)

    sampler.engine.submit = noted
    groups = sampler.sample([query_of([4, 5, 6], 0)], SETTINGS, SamplingKey(seed=0, step=1))
    num_turns = [sum(turn.role == "assistant" for turn in sample.turns) for sample in groups[0].samples]
    keys = [prompt.key for prompt in asked]
    first, later = keys[: len(num_turns)], keys[len(num_turns) :]
    assert len({*keys}) == len(keys) == sum(num_turns) > len(first)
    assert {*later} <= {key_of_turn(key, turn) for key in first for turn in range(1, SETTINGS.max_turns)}
    own = {prompt.session: prompt.key for prompt in asked[: len(first)]}
    assert [*own.values()] == first  # and turns of a response have its session
    for prompt in asked[len(first) :]:
        assert prompt.key in {key_of_turn(own[prompt.session], turn) for turn in range(1, SETTINGS.max_turns)}


def test_what_an_engine_keeps_of_a_conversation_goes_with_it(new_policy: Any, talkative: Any) -> None:
    policy, read = new_policy(), list[int]()
    policy.model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: read.append(inputs[0].numel()))
    sampler = talkative(policy)
    read.clear()
    (group,) = sampler.sample([query_of([4, 5, 6] * 20, 0)], SETTINGS, SamplingKey(seed=0, step=1))
    num_later = sum(turn.role != "assistant" for sample in group.samples for turn in sample.turns)
    num_tokens = sum(sample.num_tokens for sample in group.samples)
    assert num_later >= 5 and sum(read) < 60 + 1.1 * num_tokens < 60 * num_later + num_tokens
    assert not sampler.engine._decoder.kept._by_session


def test_a_conversation_does_not_depend_on_what_is_sampled_beside_it(new_policy: Any, talkative: Any) -> None:
    policy = new_policy()
    queries = [query_of([4, 5, 6], 0), query_of([7], 1)]
    key = SamplingKey(seed=0, step=1)
    both = talkative(policy).sample(queries, SETTINGS, key)
    for query, expected in zip(queries, both, strict=True):
        (alone,) = talkative(policy).sample([query], SETTINGS, key)
        for one, other in zip(alone.samples, expected.samples, strict=True):
            assert torch.equal(one.token_ids, other.token_ids) and one.turns == other.turns
