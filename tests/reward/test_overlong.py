"""The penalty on responses that come near the limit of their length."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.samples import sample_of, scored, scores_of

import gspo
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RolloutConfig
from gspo.reward.overlong import PART, overlong_penalty, with_overlong_penalty, without_penalty
from gspo.run.console import Display
from gspo.types import Failure, Group, Score


def dapo(length: int, longest: int, cache: float) -> float:
    """Eq. 13 of arXiv 2503.14476, as it is printed."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


def sampling(how: Any = "penalty") -> RolloutConfig:
    return RolloutConfig(max_new_tokens=20, overlong=how, overlong_margin=0.25)


@pytest.fixture
def groups(query_of: Any) -> list[Group]:
    """Of 10, 15, 16 and 20 tokens, in two groups."""

    return [
        Group(
            samples=tuple(
                sample_of(query_of([1], number), range(length), finish_reason="length" if length == 20 else "stop")
                for length in lengths
            )
        )
        for number, lengths in enumerate(([10, 15], [16, 20]))
    ]


def test_the_penalty_is_that_of_dapo_at_every_length() -> None:
    for longest, margin in [(20, 0.25), (20, 1.0), (7, 0.2), (20480, 0.2), (5, 0.0)]:
        found = [overlong_penalty(length, longest, margin) for length in range(longest + 1)]
        assert found == pytest.approx([dapo(length, longest, margin * longest) for length in range(longest + 1)])
        assert found[-1] == (-1.0 if margin else 0.0)


def test_it_reaches_the_reward_its_parts_and_what_the_last_token_earns(groups: Any) -> None:
    rewards = [1.0, 0.5, 0.0, 2.0]
    scores = [Score(reward=reward, parts={"right": reward}) for reward in rewards[:3]]
    by_token = torch.linspace(0, 0.2, 20)
    scores.append(Score(reward=2.0, parts={"right": 2.0}, token_rewards=by_token))
    before = replace(scored(groups, scores), reward_seconds={"right": 1.5})
    batch = with_overlong_penalty(before, sampling())
    after = scores_of(batch)
    for score, was, penalty in zip(after, rewards, [0.0, 0.0, -0.2, -1.0], strict=True):
        assert score.reward == pytest.approx(was + penalty)
        assert score.parts == {"right": was, PART: pytest.approx(penalty)} and score.penalty == pytest.approx(penalty)
        assert without_penalty(score).reward == pytest.approx(was) and without_penalty(score).penalty == 0
    assert after[0].token_rewards is None
    found = after[3].token_rewards
    assert found is not None and torch.equal(found[:-1], by_token[:-1]) and found[-1] == by_token[-1] - 1
    again = without_penalty(after[3]).token_rewards
    assert again is not None and torch.allclose(again, by_token)
    assert batch.reward_seconds == before.reward_seconds
    assert scores_of(before)[3].parts == {"right": 2.0} and torch.equal(by_token, torch.linspace(0, 0.2, 20))


def test_what_is_not_scored_stays_so_and_says_why(groups: Any) -> None:
    failure = Failure(kind="raised", message="right: no")
    failed = Score(reward=None, parts={"right": None}, failure=failure)
    after = scores_of(with_overlong_penalty(scored(groups, [failed] * 4), sampling()))
    assert [score.reward for score in after] == [None] * 4
    assert all(score.parts == {"right": None, PART: None} and score.failure is failure for score in after)


@pytest.mark.parametrize("how", ["keep", "mask"])
def test_without_it_scores_are_as_they_were(how: str, groups: Any) -> None:
    before = scored(groups, [1.0] * 4)
    assert with_overlong_penalty(before, sampling(how)) is before


def test_a_run_trains_with_the_penalty_and_evaluates_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    always = "reward=[{function: format, options: {pattern: ''}}]"
    overrides = ["steps=1", always, "rollout.overlong=penalty", "rollout.overlong_margin=1"]
    tiny = Path(__file__).parents[1] / "tiny.yaml"
    before, line = gspo.train(load_recipe(tiny, overrides), display=Display(quiet=True)).metrics
    assert before["evaluation/held_out/pass_at_1"] == line["evaluation/held_out/pass_at_1"] == 1.0
    assert line["reward/format/mean"] == 1.0
    lost = line["response/mean_tokens"] / 12  # in a line from the first token on
    assert line[f"reward/{PART}/mean"] == pytest.approx(-lost) and line["reward/mean"] == pytest.approx(1 - lost)
