"""Environments: a state for each response, what they say first, their reward, and what becomes of one that breaks."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import REWARD, SAMPLING, differing, recipe_of, result, train
from tests.small_model import save_small_model
from transformers import AutoTokenizer

from gspo.check import check
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.errors import UserError
from gspo.run.plain_files import read_json_lines

GAME = '''
import os

class Game:
    """Adds up what it is given."""

    def reset(self, answer, **row):
        self.total, self.calls = 0, 0
        return f" {answer}"

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What is added.
        """
        self.total, self.calls = self.total + number, self.calls + 1
        return f"{self.calls}: {self.total}"

    async def wait(self) -> str:
        """Wait."""
        return "waited"

    def close(self) -> str:
        """Close the door."""
        return "closed"

    def get_reward(self):
        return self.total / 10

class Silent(Game):
    def reset(self, **row):
        Game.reset(self, **row)

class Broken(Game):
    def reset(self, **row):
        raise KeyError("no such row")

class Mortal(Game):
    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What is added.
        """
        if number == 7:
            os._exit(1)
        return str(number)

class Odd(Game):
    def get_reward(self):
        return "much"

class Judgeless:
    def reset(self, **row): ...

class Demanding(Game):
    def __init__(self, level): ...

def double(prompts, completions, environment_rewards, **columns):
    assert all(completion[0]["role"] == "assistant" for completion in completions)
    return [2 * reward for reward in environment_rewards]

def no_class(): ...
'''
DOUBLE = '''
def double(number: int) -> str:
    """Double a number.

    Args:
        number: What is doubled.
    """
    return f"doubled {2 * number}"
'''
KEYS = ("cold_start.steps=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=100", "reward=environment")


class _Digits:
    """Each digit that an untrained policy writes is a call."""

    others = ""  # digits that call double

    @classmethod
    def findall(cls, text: str) -> list[str]:
        digits = [digit for digit in text if digit.isdecimal() and digit.isascii()]
        names = ["double" if digit in cls.others else "add" for digit in digits]
        arguments = [{"number": int(digit)} for digit in digits]
        return [json.dumps({"name": name, "arguments": own}) for name, own in zip(names, arguments, strict=True)]


@pytest.fixture(autouse=True)
def _game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gspo.rollout.dialects.CALL", _Digits)
    (tmp_path / "game.py").write_text(GAME)


def lines_of(name: str, step: int = 1) -> list[dict[str, Any]]:
    return list(read_json_lines(Path(f"runs/{name}/rollouts/step_{step:06d}.jsonl"))[0])


def check_sums(lines: list[dict[str, Any]]) -> None:
    """Each response has the total of its own calls, and of no other's."""
    for line in lines:
        said = [text for role, text, _ in line["turns"] if role == "tool"]
        totals = [entry.split(": ") for text in said for entry in text.split("\n")]
        assert [int(count) for count, _ in totals] == list(range(1, len(totals) + 1))
        if line["finish_reason"] == "stop":  # else the last results may not have fitted
            assert line["reward"] == (int(totals[-1][1]) if totals else 0) / 10


def test_each_response_has_a_state_of_its_own_and_the_environments_reward() -> None:
    outcome = train(recipe_of("game", *KEYS, "steps=1", "rollout.environment=game.py:Game", "evaluation.num_queries=4"))
    lines = lines_of("game")
    check_sums(lines)
    assert len({line["reward"] for line in lines}) > 2 and outcome.metrics[1]["tools/calls_mean"] > 0.5
    for line in lines:
        role, text, size = line["turns"][0]
        assert (role, text) == ("user", f" {line['columns']['answer']}") and size >= 1


@pytest.mark.parametrize(
    "others", [(), ("rollout.max_staleness=1", "rollout.in_turn=true", "actor.old_logprobs=engine")]
)
def test_a_run_broken_off_is_the_unbroken_one(others: tuple[str, ...], broken_off: Callable[..., Any]) -> None:
    keys = [*KEYS, *others, "rollout.environment=game.py:Game", "steps=2"]
    train(recipe_of("unbroken", *keys))
    broken_off(recipe_of("broken", *keys), SAMPLING, 25)
    if not others:
        broken_off(recipe_of("broken", *keys), REWARD, 1, resume=True)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


@pytest.mark.parametrize(("name", "said"), [("Game", True), ("Silent", False)])
def test_what_it_says_first_is_a_part_of_the_last_message(
    name: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model(Path("model"))
    Path("other.jsonl").write_text('{"prompt": "7 + 8 =", "answer": "15"}\n')
    suite = "{name: other, queries: {path: other.jsonl}, samples: 1, reward: environment}"
    keys = [*KEYS, "steps=1", f"rollout.environment=game.py:{name}", "evaluation.num_queries=2"]
    keys += ["model={path: model, device: cpu}", "rollout.max_new_tokens=40", "rollout.max_turns=1"]
    read, submit = list[str](), EmbeddedEngine.submit
    tokenizer = AutoTokenizer.from_pretrained("model")

    def noted(self: EmbeddedEngine, prompts: Sequence[Any], sampling: Any) -> Any:
        read.extend(tokenizer.decode(prompt.ids) for prompt in prompts)
        return submit(self, prompts, sampling)

    monkeypatch.setattr(EmbeddedEngine, "submit", noted)
    train(recipe_of("chat", *keys, f"evaluation.suites=[{suite}]"))
    assert any("7 + 8" in text for text in read) and len({*read}) > 4
    for text in read:  # also of held-out queries and suites
        assert text.count("\nassistant: ") == 1 and text.endswith("\nassistant: ")
        assert bool(re.search(r" -?\d+\nassistant: $", text)) == said
    for line in lines_of("chat"):
        text = line["turns"][0][1]
        assert text == (f" {line['columns']['answer']}" if said else "")
        assert line["completion"].startswith(f"{text}\nassistant: ")
        assert line["prompt"].endswith("\nassistant: ")  # as it is without one


def test_a_function_judges_by_the_environments_reward_what_the_policy_wrote_behind_its_message() -> None:
    save_small_model(Path("model"))
    rows = [{"prompt": [{"role": "user", "content": f"{n} + {n} ="}], "answer": 2 * n} for n in range(9)]
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    keys = [*KEYS, "steps=1", "rollout.environment=game.py:Game", "evaluation.num_queries=0", "rollout.max_turns=3"]
    keys += ["model={path: model, device: cpu}", "queries={path: rows.jsonl}", "reward=game.py:double"]
    train(recipe_of("own", *keys))
    lines = lines_of("own")
    assert any(line["reward"] for line in lines)
    for line in lines:
        said = [entry for role, text, _ in line["turns"] if role == "tool" for entry in text.split("\n")]
        if line["finish_reason"] == "stop":
            assert line["reward"] == pytest.approx((int(said[-1].split(": ")[1]) if said else 0) / 5)


def test_tools_stand_beside_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Digits, "others", "456789")
    Path("others.py").write_text(DOUBLE)
    keys = [*KEYS, "steps=1", "rollout.environment=game.py:Game", "evaluation.num_queries=0"]
    recipe = recipe_of("beside", *keys, "rollout.tools=['others.py:double']")
    named = [line.split()[1].partition("(")[0] for line in check(recipe) if line.startswith("tool ")]
    assert sorted(named) == ["add", "close", "double", "wait"]
    train(recipe)
    answers = [text.split("\n") for line in lines_of("beside") for role, text, _ in line["turns"] if role == "tool"]
    assert any("doubled" in said for answer in answers for said in answer)
    for line in lines_of("beside"):  # doubling has no part in an environment's state
        said = [entry for role, text, _ in line["turns"] if role == "tool" for entry in text.split("\n")]
        totals = [entry.split(": ") for entry in said if "doubled" not in entry]
        assert [int(count) for count, _ in totals] == [*range(1, len(totals) + 1)]
    Path("others.py").write_text(DOUBLE.replace("def double", "def add"))
    with pytest.raises(UserError, match=r"rollout\.tools or rollout\.environment: two tools are named add"):
        list(check(recipe_of("twice", *keys, "rollout.tools=['others.py:add']")))


def test_a_wrong_class_is_refused_by_check_too() -> None:
    recipe = recipe_of("check", *KEYS, "rollout.environment=game.py:Demanding", "evaluation.num_queries=0")
    with pytest.raises(UserError, match=r"Demanding\.__init__ raises TypeError"):
        list(check(recipe))


def test_an_environment_whose_process_ends_masks_the_responses_in_it(tmp_path: Path) -> None:
    keys = [*KEYS, "steps=1", "rollout.environment=game.py:Mortal", "evaluation.num_queries=0"]
    with pytest.raises(
        UserError, match=r"tool Mortal: its process (has ended|ended with exit status 1)(.|\n)*have no reward"
    ):
        train(recipe_of("mortal", *keys))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Broken", r"Broken\.reset raises KeyError: 'no such row', at .*game\.py:\d+"),
        ("Odd", r"Odd\.get_reward returns 'much', which is no finite number"),
        ("Demanding", r"Demanding\.__init__ raises TypeError: .*missing 1 required positional argument: 'level'"),
        ("Judgeless", r"game\.py:Judgeless has no method get_reward, which reward: environment asks for"),
        ("no_class", r"game\.py:no_class is no environment"),
        ("Nothing", r"has no function 'Nothing'"),
    ],
)
def test_an_environment_that_cannot_be_is_one_message(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        train(recipe_of("broken", *KEYS, "steps=1", f"rollout.environment=game.py:{name}", "evaluation.num_queries=0"))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["reward=environment"], "reward: environment is what rollout.environment gives"),
        (
            ["evaluation.suites=[{name: s, queries: {path: s.jsonl}, reward: environment}]"],
            "reward: environment is what rollout.environment gives",
        ),
        (
            ["rollout.environment=game.py:Game", 'rollout.segment_separator="x"'],
            "rollout.segment_separator with rollout.tools",
        ),
    ],
)
def test_keys_that_exclude_each_other(keys: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        recipe_of("both", *keys)
