"""Runs with tools: resumed, evaluated and judged as others are, on one rank and on two."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import GRADIENT, REWARD, SAMPLING, differing, logged, recipe_of, result, train

from gspo.check import check
from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from gspo.rollout.tools import Result, Tools
from gspo.run.plain_files import read_json_lines

FAST = ("cold_start.steps=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=100", "rollout.tools=[calculator]")


@pytest.fixture
def _talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each digit that the untrained policy writes is a call, which is answered with its double."""

    async def answer(self: Tools, session: str, call: str) -> Result:
        return Result(text=str(2 * int(call)), is_error=call == "7")

    monkeypatch.setattr("gspo.rollout.dialects.CALL", re.compile(r"([0-9])"))
    monkeypatch.setattr(Tools, "answer", answer)


pytestmark = pytest.mark.usefixtures("_talkative")


@pytest.mark.parametrize(
    "others", [(), ("rollout.max_staleness=1", "rollout.in_turn=true", "actor.old_logprobs=engine")]
)
def test_a_run_broken_off_is_the_unbroken_one(others: tuple[str, ...], broken_off: Callable[..., Any]) -> None:
    keys = [*FAST, *others, "steps=2"]
    train(recipe_of("unbroken", *keys))
    for number, (place, count) in enumerate([(SAMPLING, 5), (REWARD, 1), (GRADIENT, 1), (SAMPLING, 30)]):
        if others and place == REWARD:  # groups ahead are scored elsewhere
            continue
        broken_off(recipe_of("broken", *keys), place, count, resume=number > 0)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_turns_are_counted_written_down_and_evaluated() -> None:
    seen = list[Any]()

    def judged(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(text)) for text in completions]

    outcome = train(
        recipe_of("counted", *FAST, "steps=1", "evaluation.num_queries=4", "actor.observation_loss=0.1"), reward=judged
    )
    first, line = outcome.metrics
    assert "evaluation/held_out/pass_at_1" in first
    lines = read_json_lines(Path("runs/counted/rollouts/step_000001.jsonl"))[0]
    turns = [turn for each in lines for turn in each["turns"]]
    assert line["turns/mean"] == sum(role == "assistant" for role, *_ in turns) / len(lines) > 1
    assert 0 < line["turns/observation_loss"] < 20  # nats
    assert 0 < line["tools/error_fraction"] < 0.5 and line["tools/calls_mean"] > 0
    for each in lines:
        assert sum(size for *_, size in each["turns"]) == each["tokens"]
        assert each["turns"][-1][1] in seen  # the last turn's text is what is judged
        masks = [number is not None for number in each["token_log_ratios"] or ()]
        assert len(masks) in (0, each["tokens"])


def test_check_says_which_tools_there_are_and_how_results_are_written() -> None:
    few = ["queries.procedural.size=64", "evaluation.num_queries=8"]
    lines = "\n".join(check(load_recipe(Path(__file__).parents[2] / "recipes" / "calculator.yaml", few)))
    assert "tool        calculator(expression): Compute an arithmetic expression." in lines
    assert r'results     as plain text, which are not trained on: "\n<tool_response>\nRESULT\n' in lines


def test_tools_and_segments_exclude_each_other() -> None:
    with pytest.raises(UserError, match=r"rollout\.segment_separator with rollout\.tools"):
        recipe_of("both", *FAST, 'rollout.segment_separator="x"')


def test_a_run_with_tools_is_the_same_again() -> None:
    for name in ("one", "two"):
        train(recipe_of(name, *FAST, "steps=2"))
    assert logged(Path("runs/one/metrics.jsonl")) == logged(Path("runs/two/metrics.jsonl"))
