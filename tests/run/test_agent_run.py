"""Runs with an agent: an unchanged program that speaks OpenAI's protocol, or Anthropic's, is trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import SAMPLING, differing, recipe_of, result, train
from tests.needs import needs
from tests.small_model import save_small_model

from gspo.check import check
from gspo.errors import UserError
from gspo.run.plain_files import read_json_lines

pytestmark = needs("uvicorn")
AGENTS = '''
import asyncio
import httpx
import ssl

_unread = ssl.create_default_context()  # each client would read the system's certificates anew

async def solve(row, *, base_url, api_key):
    """Asks, asks again about the answer, and then something else."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60, verify=_unread) as client:
        async def ask(*messages):
            reply = await client.post(f"{base_url}/chat/completions", json={
                "model": "m", "messages": [*messages], "max_tokens": 12})
            return reply.raise_for_status().json()["choices"][0]["message"]
        question = {"role": "user", "content": row["prompt"]}
        first = await ask(question)
        if len(first["content"] or "") % 2:
            await ask(question, first, {"role": "user", "content": "Sure?"})
        last = await ask({"role": "user", "content": "And " + row["answer"]})
        return len(last["content"] or "") / 10

def slow(row, *, base_url, api_key):
    """Not async."""
    reply = httpx.post(f"{base_url}/messages", headers={"x-api-key": api_key}, timeout=60, json={
        "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": row["prompt"]}]})
    return float(reply.json()["usage"]["output_tokens"] > 2)

class Agent:
    """As AReaL has them."""

    async def run(self, data, **extra):
        return await solve(data, base_url=extra["base_url"], api_key=extra["api_key"])

async def keyless(row):
    return 1.0

class Misspelt:
    def runn(self, data, **extra):
        return 1.0

async def wrong(row, *, base_url, api_key):
    raise ValueError("no such tool")

def open_ai(row, *, base_url, api_key):
    from openai import OpenAI
    client = OpenAI(base_url=base_url, api_key=api_key)
    stream = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": row["prompt"]}], max_tokens=5, stream=True)
    chunks = [*stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reply = client.chat.completions.create(model="m", messages=[
        {"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": text},
        {"role": "user", "content": "Sure?"}], max_tokens=5)
    return {reply.id: reply.usage.completion_tokens / 10, chunks[0].id: -0.5}

def anthropic(row, *, base_url, api_key):
    from anthropic import Anthropic
    client = Anthropic(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": row["prompt"]}]
    with client.messages.stream(model="m", messages=messages, max_tokens=5) as stream:
        message = stream.get_final_message()
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Sure?"}]
    return client.messages.create(model="m", messages=messages, max_tokens=5).usage.output_tokens / 10

_few = asyncio.Semaphore(3)

async def waiting(row, **given):
    """Some wait for others, which the sampler does not know."""
    async with _few:
        return await solve(row, **given)

def odd(row, *, base_url, api_key):
    slow(row, base_url=base_url, api_key=api_key)
    return 10**400

async def of_one(row, *, base_url, api_key):
    slow(row, base_url=base_url, api_key=api_key)
    return {"one": "1"}

def judged(prompts, completions, environment_rewards, **columns):
    assert len(environment_rewards) == len(completions)
    return [float(len(text) % 2) for text in completions]
'''
KEYS = ("cold_start.steps=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=60", "reward=agent")
# The template writes no mark at the end of a turn, where the policy has written one.
HISTORY = "rollout.history=append"
SMALL = ("model={path: model, device: cpu}", "rollout.max_context=600", "evaluation.num_queries=2")


@pytest.fixture(autouse=True)
def _agents() -> None:
    Path("my_agent.py").write_text(AGENTS)
    save_small_model(Path("model"))


def lines_of(name: str, step: int = 1) -> list[dict[str, Any]]:
    return list(read_json_lines(Path(f"runs/{name}/rollouts/step_{step:06d}.jsonl"))[0])


@pytest.mark.parametrize("agent", ["solve", "Agent"])
def test_an_agents_response_has_all_its_requests_and_its_reward(agent: str) -> None:
    outcome = train(recipe_of(agent, *KEYS, *SMALL, "steps=1", f"rollout.agent=my_agent.py:{agent}"))
    metrics = outcome.metrics[1]
    # What is trained is what was sampled, behind what it was sampled behind.
    assert metrics["mismatch/logprob_gap_max"] < 1e-4
    assert metrics["turns/mean"] > 1 and metrics["reward/unscored_fraction"] == 0
    lines = lines_of(agent)
    assert len({line["reward"] for line in lines}) > 2
    for line in lines:
        turns = line["turns"]
        assert [role for role, _, _ in turns] == ["user", "assistant"] * (len(turns) // 2)
        assert turns[-2][1].endswith(f"And {line['columns']['answer']}\nassistant: ")
        assert line["finish_reason"] == "length" or line["reward"] == len(turns[-1][1]) / 10
        assert sum(size for _, _, size in turns) == line["tokens"]


def test_experts_that_the_engine_chose_are_replayed_in_the_piece_that_they_belong_to() -> None:
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    }
    save_small_model(Path("model"), **experts, model_type="qwen3_moe", initializer_range=0.5)
    keys = ["steps=1", "rollout.agent=my_agent.py:solve", "actor.routing_replay=engine"]
    outcome = train(recipe_of("experts", *KEYS, *SMALL, *keys))
    assert outcome.metrics[1]["mismatch/logprob_gap_max"] < 1e-3
    assert any(len(line["turns"]) > 4 for line in lines_of("experts"))  # of several pieces


def test_a_run_broken_off_is_the_unbroken_one(broken_off: Callable[..., Any]) -> None:
    keys = [*KEYS, *SMALL, "rollout.agent=my_agent.py:solve", "steps=2"]
    train(recipe_of("unbroken", *keys))
    broken_off(recipe_of("broken", *keys), SAMPLING, 25)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


@pytest.mark.parametrize("others", [("rollout.max_staleness=1",), ("rollout.dynamic_sampling=true", "reward=judged")])
def test_agents_that_are_not_async_are_under_way_together(others: tuple[str, ...]) -> None:
    """Sampled while the policy is trained, too, and judged by a function where they return nothing."""
    keys = [*KEYS, *SMALL, *others, "rollout.agent=my_agent.py:slow"]
    if "reward=judged" in others:
        (path := Path("my_agent.py")).write_text(AGENTS.replace("return float(reply.json()", "(reply.json()"))
        keys[keys.index("reward=judged")] = f"reward={path}:judged"
    outcome = train(recipe_of("slow", *keys))
    assert outcome.metrics[-1]["step"] == 3


def test_agents_that_wait_for_each_other_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.rollout.sampler.GRACE_SECONDS", 0.1)
    outcome = train(recipe_of("waiting", *KEYS, *SMALL, "steps=1", "rollout.agent=my_agent.py:waiting"))
    assert outcome.metrics[1]["reward/unscored_fraction"] == 0


@pytest.mark.parametrize("package", [pytest.param(name, marks=needs(name)) for name in ("openai", "anthropic")])
def test_their_own_clients_are_served(package: str) -> None:
    name = {"openai": "open_ai"}.get(package, package)
    outcome = train(recipe_of(name, *KEYS, *SMALL, "steps=1", f"rollout.agent=my_agent.py:{name}", HISTORY))
    assert outcome.metrics[1]["turns/mean"] == 2 and outcome.metrics[1]["mismatch/logprob_gap_max"] < 1e-4
    for line in lines_of(name):  # one conversation: what came back is what was sampled
        (_, _, _), first, asked, last = line["turns"]
        assert asked[1].strip().startswith("user: Sure?")
        if package == "openai":  # whose agent gives each completion its own reward
            assert (first[3:], last[3:]) == ([-0.5], [last[2] / 10]) and line["reward"] == last[2] / 10 - 0.5


def test_check_says_what_an_agent_is_and_what_is_wrong_is_one_message() -> None:
    said = "\n".join(check(recipe_of("check", *KEYS, *SMALL, "rollout.agent=my_agent.py:solve")))
    assert "reward      agent: what it returns" in said and "shows the model no tools" in said
    faults: tuple[tuple[list[str], str], ...] = (
        (["rollout.agent=my_agent.py:none"], "has no function 'none'"),
        (["rollout.agent=my_agent.py:keyless"], r"keyless cannot be called with a row: .*'base_url'"),
        (["rollout.agent=my_agent.py:Misspelt"], "the class my_agent.py:Misspelt has no method run"),
        (["rollout.agent=my_agent.py:solve", "rollout.tools=[calculator]"], "rollout.agent has tools of its own"),
        ([], "reward: agent is what rollout.agent returns"),
        (["rollout.agent=my_agent.py:wrong", "steps=1"], r"wrong raises ValueError: no such tool, at .*my_agent\.py:"),
        (["rollout.agent=my_agent.py:odd", "steps=1"], "odd returns 1000.*, which is no finite number"),
        (["rollout.agent=my_agent.py:of_one", "steps=1"], "of_one, for a completion, returns '1', which is no finite"),
        (["rollout.agent=my_agent.py:solve", "rollout.max_context=2049"], "the model has 2048 positions"),
        (["rollout.agent=my_agent.py:solve", "queries.system=s"], "rollout.agent writes its own messages"),
        (["rollout.agent=my_agent.py:solve", "queries.chat=false"], "need a chat template"),
    )
    for number, (keys, sentence) in enumerate(faults):
        with pytest.raises(UserError, match=sentence):
            train(recipe_of(f"wrong-{number}", *KEYS, *SMALL, *keys))
