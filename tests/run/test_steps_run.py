"""Runs in an environment that answers each turn: its rewards are written down, and become each turn's credit."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.breaking_off import SAMPLING, differing, recipe_of, result, train
from tests.small_model import CHAT_TEMPLATE, save_small_model

from gspo.check import check
from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from gspo.run.plain_files import read_json_lines

OWN = '''
class Digits:
    """Gives a reward for each digit, until a 4, or three times."""

    def reset(self, row):
        self.turns = 0
        return " 7"

    def step(self, text):
        self.turns += 1
        return " 8", float(sum(letter.isdigit() for letter in text)), "4" in text or self.turns == 3
'''
KEYS = (
    "cold_start.steps=0",
    "steps=2",
    "rollout.queries_per_step=4",
    "rollout.max_new_tokens=60",
    "rollout.environment=own.py:Digits",
    'rollout.stop_strings=["1", "4"]',
    "reward=[{function: environment, weight: 2}]",
    "actor.importance_sampling_level=sequence_token",
    "actor.turn_credit=return_to_go",
    "actor.advantage=leave_one_out",
    "actor.length_norm=turns",
)


@pytest.fixture(autouse=True)
def _own() -> None:
    Path("own.py").write_text(OWN)


def test_each_turns_reward_is_written_down_and_is_its_credit() -> None:
    train(recipe_of("credited", *KEYS))
    groups: dict[str, list[Any]] = {}
    for line in read_json_lines(Path("runs/credited/rollouts/step_000001.jsonl"))[0]:
        groups.setdefault(line["query"], []).append(line)
    num_turns = set[int]()
    for group in groups.values():
        returns = [_returns(line) for line in group]
        num_turns |= {*map(len, returns)}
        for place, line in enumerate(group):
            given = [turn[3] for turn in line["turns"] if len(turn) > 3]
            assert line["reward"] == pytest.approx(2 * sum(given))
            if line["token_advantages"] is None:  # one turn of one token
                continue
            written = [own for own in line["token_advantages"] if own is not None]
            others = [own for number, own in enumerate(returns) if number != place]
            expected = []
            for turn, (size, value) in enumerate(zip(_sizes(line), returns[place], strict=True)):
                live = [own[turn] for own in others if len(own) > turn]
                expected += [value - (sum(live) / len(live) if live else 0.0)] * size
            assert written == pytest.approx(expected, rel=1e-3)  # of four digits
    assert num_turns == {1, 2, 3}


def _sizes(line: Any) -> list[int]:
    return [turn[2] for turn in line["turns"] if turn[0] == "assistant"]


def _returns(line: Any) -> list[float]:
    """What a response gets from each of its turns on; one that was cut off has nothing for its last."""
    own = [2 * (turn[3] if len(turn) > 3 else 0.0) for turn in line["turns"] if turn[0] == "assistant"]
    sums = [sum(own[place:]) for place in range(len(own))]
    assert all(before >= after for before, after in pairwise(sums))
    return sums


@pytest.mark.parametrize("history", ["branch", "append"])
def test_a_template_that_rewrites_turns_gives_them_contexts_of_their_own(history: str) -> None:
    """Their likelihoods and experts are those that they were sampled with, as the trainer computes them."""
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"norm_topk_prob": True, "model_type": "qwen3_moe", "initializer_range": 0.5}
    forgets = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] | replace('!', '') }}")
    save_small_model(Path("model"), chat_template=forgets, **experts)
    keys = [*KEYS, "steps=1", "model={path: model, device: cpu}", "actor.routing_replay=engine"]
    keys += ['rollout.stop_strings=["!", "4"]', "rollout.max_new_tokens=200", f"rollout.history={history}"]
    outcome = train(recipe_of(history, *keys))
    assert outcome.metrics[1]["mismatch/logprob_gap_max"] < 1e-3
    lines = list(read_json_lines(Path(f"runs/{history}/rollouts/step_000001.jsonl"))[0])
    for line in lines:
        sizes = [turn[2] for turn in line["turns"]]
        assert {*line.get("starts", ())} <= {sum(sizes[:place]) for place in range(1, len(sizes))}
        earlier = "".join(turn[1] for turn in line["turns"][1:-1:2])
        if "\ufffd" not in earlier:  # parts of characters, which a template cannot write as they were sampled
            assert ("starts" in line) == (history == "branch" and "!" in earlier)
    assert any("starts" in line for line in lines) == (history == "branch")


def test_a_run_broken_off_in_an_environment_is_the_unbroken_one(broken_off: Callable[..., Any]) -> None:
    train(recipe_of("unbroken", *KEYS))
    for number, count in enumerate([5, 30]):
        broken_off(recipe_of("broken", *KEYS), SAMPLING, count, resume=number > 0)
    train(recipe_of("broken", *KEYS), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_check_says_how_what_an_environment_says_is_written() -> None:
    lines = "\n".join(check(load_recipe(Path(__file__).parents[2] / "recipes" / "quiz.yaml")))
    assert 'environment as plain text, which are not trained on: "ANSWER"' in lines


def test_tools_beside_an_environment_that_answers_each_turn_are_refused() -> None:
    with pytest.raises(UserError, match=r"step of .* answers each turn, and nobody calls"):
        list(check(recipe_of("tools", *KEYS, "rollout.tools=[calculator]")))
