"""Functions that give a number for each token or segment: who earns it, its sum, its faults, its advantages."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from tests.samples import sample_of, scores_of

from gspo.errors import UserError
from gspo.learner.advantages import with_advantages
from gspo.recipe.sections import ActorConfig, Per, RewardConfig
from gspo.reward.builtin import find_function
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.score import score
from gspo.rollout.segments import split_segments
from gspo.run.progress import decode, encode
from gspo.types import Group, Query


def group_of(texts: Sequence[str], number: int = 1, **columns: Any) -> Group:
    """Rollouts with one token a character, segments that end with a bar, and an end token."""
    query = Query(id=f"data:{number}", prompt="", text="", prompt_ids=(1,), columns=columns)
    samples = []
    for text in texts:
        segments = [len(segment) for segment in split_segments(text, "|")]
        segments[-1] += 1
        ids = [*map(ord, text), 0]
        samples.append(sample_of(query, ids, text=text, finish_reason="stop", segments=tuple(segments)))
    return Group(samples=tuple(samples))


SOURCE = """
def bars(completion_ids, **columns):
    return [
        None if ids[0] == ord("n") else [place + 10.0 * (token == ord("|")) for place, token in enumerate(ids)]
        for ids in completion_ids
    ]


def lengths(completions, segments):
    assert list(completions) == ["".join(its) for its in segments]
    return [[len(segment) for segment in its] for its in segments]


async def later(completions, segments):
    return lengths(completions, segments)


def size(completions, **columns):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(SOURCE, encoding="utf-8")


def in_threads(*rewards: RewardConfig) -> tuple[RewardFunction, ...]:
    """SOURCE's functions as Python would give them, had it a way to say what they are for."""
    return tuple(
        RewardFunction(
            name=one.function,
            call=find_function(f"mine.py:{one.function}"),
            weight=one.weight,
            per=one.per,
            segment_separator="|",
        )
        for one in rewards
    )


@pytest.fixture
def in_processes() -> Iterator[Any]:
    """The same as a recipe names them."""
    made: list[RewardFunction] = []

    def build(*rewards: RewardConfig) -> tuple[RewardFunction, ...]:
        changes = [{"function": f"mine.py:{one.function}", "concurrent_calls": 1} for one in rewards]
        named = [one.model_copy(update=change) for one, change in zip(rewards, changes, strict=True)]
        made.extend(load_functions(named, segment_separator="|"))
        return tuple(made)

    yield build
    close_functions(made)


def rows(scored: Any) -> list[list[float] | None]:
    return [None if one.token_rewards is None else one.token_rewards.tolist() for one in scores_of(scored)]


def check_token_and_segment(load: Any, second: str = "lengths") -> None:
    functions = load(
        RewardConfig(function="bars", per="token"), RewardConfig(function=second, per="segment", weight=-0.5)
    )
    scored = score([group_of(["a|bcd", "|"]), group_of(["n|", "x"], 2)], functions)
    assert rows(scored) == [
        [0.0, 11 - 1.0, 2.0, 3.0, 4.0, 5 - 1.5],  # a segment's by its last token
        [10.0, 1 - 0.5],
        [0.0, 0.0, -1.0],
        [0.0, 1 - 0.5],
    ]
    assert [one.places for one in scores_of(scored)] == [None] * 4
    assert [dict(one.parts) for one in scores_of(scored)] == [
        {"bars": 25.0, second: 5.0},
        {"bars": 11.0, second: 1.0},
        {"bars": None, second: 2.0},
        {"bars": 1.0, second: 1.0},
    ]
    for one in scores_of(scored):
        assert one.token_rewards is not None and one.reward == pytest.approx(float(one.token_rewards.sum()), abs=1e-12)


def test_tokens_and_turns_are_rewarded_one_by_one_from_threads() -> None:
    check_token_and_segment(in_threads)


@pytest.mark.parametrize("second", ["lengths", "later"])
def test_tokens_and_turns_are_rewarded_one_by_one_from_processes(in_processes: Any, second: str) -> None:
    check_token_and_segment(in_processes, second)


def test_numbers_of_tokens_come_out_of_a_process_to_the_last_bit(named: Any) -> None:
    source = (
        "def f(completion_ids, **columns):\n    return [[0.1 * 3 ** (7 * n) for n in ids] for ids in completion_ids]\n"
    )
    (scored,) = scores_of(score([group_of(["\x01\x05\x09"])], [named(source, per="token")]))
    assert scored.token_rewards is not None
    assert scored.token_rewards.tolist() == [0.1 * 3 ** (7 * n) for n in (1, 5, 9, 0)]


def test_where_turns_are_the_finest_they_are_the_places_of_their_tokens() -> None:
    both = in_threads(RewardConfig(function="lengths", per="segment"), RewardConfig(function="size"))
    (scored, other) = scores_of(score([group_of(["a|bc", "x|"])], both))
    assert scored.token_rewards is not None and scored.token_rewards.tolist() == [0, 2, 0, 0, 2 + 4]
    assert scored.places is not None and scored.places.tolist() == [0, 0, 1, 1, 1]
    assert other.places is not None and other.places.tolist() == [0, 0, 0]


def test_a_turn_without_a_token_is_earned_by_the_token_before() -> None:
    group = group_of(["a||b"])
    sample = dataclasses.replace(group.samples[0], segments=(3, 0, 2))  # one token has made both bars
    function = RewardFunction(name="f", call=lambda **columns: [[1.0, 2.0, 4.0]], per="segment", segment_separator="|")
    (scored,) = scores_of(score([Group(samples=(sample,))], [function]))
    assert scored.reward == 7 and scored.token_rewards is not None and scored.places is not None
    assert scored.token_rewards.tolist() == [0, 0, 3, 0, 4] and scored.places.tolist() == [0, 0, 0, 2, 2]


def test_a_response_level_function_is_earned_by_the_last_token() -> None:
    both = in_threads(RewardConfig(function="size", weight=2.0), RewardConfig(function="bars", per="token", weight=0.1))
    scored = score([group_of(["ab", "nab"])], both)
    assert scores_of(scored)[0].reward == pytest.approx(4.3) and scores_of(scored)[0].parts == {
        "size": 2.0,
        "bars": 3.0,
    }
    assert rows(scored) == [pytest.approx([0.0, 0.1, 4.2]), [0.0] * 3 + [6.0]]
    assert scores_of(scored)[1].reward == 6.0


def test_a_response_to_which_nothing_applies_has_no_reward_of_any_kind() -> None:
    scored = score([group_of(["nab", "x"])], in_threads(RewardConfig(function="bars", per="token")))
    assert [one.reward for one in scores_of(scored)] == [None, 1.0] and rows(scored) == [None, [0.0, 1.0]]
    assert scores_of(scored)[0].failure is None


@pytest.mark.parametrize("rewards", [[("size", "response", 1.0)], [("size", "response", 1.0), ("bars", "token", 0.0)]])
def test_tokens_have_no_rewards_of_their_own_where_no_function_of_weight_gives_any(rewards: Any) -> None:
    given = [RewardConfig(function=name, per=per, weight=weight) for name, per, weight in rewards]
    scored = score([group_of(["a|b", "x"])], in_threads(*given))
    assert rows(scored) == [None, None] and [one.reward for one in scores_of(scored)] == [3.0, 1.0]
    assert scores_of(scored)[0].parts.get("bars") in (None, 16.0)


@pytest.mark.parametrize(
    "value", [(1, 2.5, True), np.array([1.0, 2.5, 1.0], dtype=np.float32), torch.tensor([1, 2.5, 1])]
)
def test_numbers_are_taken_from_every_kind_of_list(value: Any) -> None:
    function = RewardFunction(name="f", call=lambda **columns: [value], per="token")
    assert rows(score([group_of(["ab"])], [function])) == [[1.0, 2.5, 1.0]]


def test_an_array_of_one_number_is_that_number_or_a_list_of_it_as_is_due() -> None:
    cases: list[tuple[Per, Any]] = [("response", [None, None]), ("token", [[2.0], [3.0]])]
    for per, rewards in cases:
        function = RewardFunction(name="f", call=lambda **columns: [torch.tensor([2.0]), np.array([[3]])], per=per)
        scored = score([group_of(["", ""])], [function])
        assert [one.reward for one in scores_of(scored)] == [2.0, 3.0] and rows(scored) == rewards


def test_equal_lists_may_come_as_one_array() -> None:
    function = RewardFunction(name="f", call=lambda **columns: np.array([[1.0, 2.0], [3.0, 4.0]]), per="token")
    assert rows(score([group_of(["a", "b"])], [function])) == [[1.0, 2.0], [3.0, 4.0]]


FAULTS = [
    ("token", [1.0, 2.0, 3.0], "it returns 3 numbers for a response of 6 tokens"),
    ("token", [1.0] * 7, "it returns 7 numbers for a response of 6 tokens"),
    ("token", [], "it returns 0 numbers for a response of 6 tokens"),
    ("token", 1.0, r"it returns 1\.0 for a completion where a list is due, with a number for each token"),
    ("token", [1.0] * 5 + [math.nan], "it returns nan as number 6 of 6 for a completion"),
    ("token", [1.0, math.inf, *[0.0] * 4], "it returns inf as number 2 of 6 for a completion"),
    ("token", [None] * 6, "it returns None as number 1 of 6 for a completion"),
    ("token", [[1.0]] * 6, r"it returns \[1\.0\] as number 1 of 6 for a completion"),
    ("token", "111111", "it returns '111111' for a completion"),
    ("segment", [1.0], "it returns 1 number for a response of 2 segments"),
    ("segment", [1.0] * 6, "it returns 6 numbers for a response of 2 segments"),
    ("segment", 2, r"it returns 2\.0 for a completion where a list is due, with a number for each segment"),
    ("response", [1.0] * 6, r"it returns \[1\.0, .*\] for a completion"),
]


@pytest.mark.parametrize(("per", "value", "said"), FAULTS)
def test_what_is_not_of_the_due_form_masks_its_own_completion(per: Any, value: Any, said: str) -> None:
    good: Any = {"token": [1.0] * 6, "segment": [1.0] * 2, "response": 1.0}[per]

    def one_odd(completions: list[str], **columns: Any) -> list[Any]:
        return [value if text == "b|add" else good for text in completions]

    function = RewardFunction(name="f", call=one_odd, per=per, segment_separator="|")
    scored = score([group_of(["g|ood", "b|add", "g|ood", "g|ood", "g|ood"])], [function])
    whole = float(sum(good)) if isinstance(good, list) else good
    assert [one.reward for one in scores_of(scored)] == [whole, None, whole, whole, whole]
    odd = scores_of(scored)[1]
    assert odd.failure is not None and odd.failure.kind == "invalid" and odd.token_rewards is None
    assert odd.parts == {"f": None}
    with pytest.raises(UserError, match=said) as caught:
        score([group_of(["b|add"])], [function])
    if per != "response":
        assert caught.value.fix is not None and f"a finite number for each {per}" in caught.value.fix


def test_a_wrong_length_from_a_process_is_named_and_masks_one_completion(named: Any) -> None:
    source = """
        def f(completion_ids, **columns):
            return [[1.0] * (3 if ids[0] == ord("b") else len(ids)) for ids in completion_ids]
    """
    scored = score([group_of(["good", "bad", "good", "badbad", *["good"] * 6])], [named(source, per="token")])
    assert [one.reward for one in scores_of(scored)] == [5.0, None, 5.0, None, *[5.0] * 6]
    failure = scores_of(scored)[3].failure
    assert failure is not None
    assert failure.message == "reward function f: it returns 3 numbers for a response of 7 tokens"


def test_only_a_function_per_segment_receives_segments_and_another_is_told_how_to() -> None:
    seen: dict[str, Any] = {}

    def everything(**columns: Any) -> list[float]:
        seen.update(columns)
        return [1.0]

    def wants(segments: Any) -> list[float]:
        return [1.0]

    score([group_of(["a|b"])], [RewardFunction(name="f", call=everything, segment_separator="|")])
    assert "segments" not in seen
    score([group_of(["a|b"], segments="the data's")], [RewardFunction(name="f", call=everything)])
    assert seen["segments"] == ["the data's"]
    with pytest.raises(UserError, match=r"it needs segments(.|\n)*set per: segment"):
        score([group_of(["a|b"])], [RewardFunction(name="f", call=wants, segment_separator="|")])


def test_functions_from_python_are_per_response() -> None:
    assert [one.per for one in load_functions((), [plain_advantages, plain_advantages])] == ["response"] * 2


def plain_advantages(group: list[list[float]]) -> list[list[float]]:
    """Of rewards to go, each less the mean of all at its place, in units of the deviation, by loops."""
    to_go = [[sum(row[t:]) for t in range(len(row))] for row in group]
    means = [fmean(row[min(t, len(row) - 1)] for row in to_go) for t in range(max(map(len, to_go)))]
    variance = sum(fmean((r - means[t]) ** 2 for t, r in enumerate(row)) for row in to_go) / (len(group) - 1)
    return [[(r - means[t]) / math.sqrt(variance) for t, r in enumerate(row)] for row in to_go]


def test_every_token_has_the_advantage_of_its_reward_to_go() -> None:
    bars = find_function("mine.py:bars")
    groups = [group_of(["a|bcd", "|", "xyz"]), group_of(["nn", "ab|", "n|n", "b"], 2)]
    given = (
        RewardConfig(function="size", weight=0.3),
        RewardConfig(function="bars", per="token"),
        RewardConfig(function="lengths", per="segment"),
    )
    scored = score(groups, in_threads(*given))
    batch = with_advantages(scored, ActorConfig(importance_sampling_level="sequence_token"))
    expected = []
    for group in groups:
        rewards = []
        for sample in group.samples:
            length = sample.num_tokens
            of_segment = [len(segment) for segment in split_segments(sample.text, "|")]
            per_segment = [
                x for n, num in zip(of_segment, sample.segments, strict=True) for x in [0.0] * (num - 1) + [float(n)]
            ]
            (per_token,) = bars([sample.token_ids.tolist()])
            per_token = per_token or [0.0] * length
            own = [per_token[t] + per_segment[t] for t in range(length)]
            rewards.append([*own[:-1], own[-1] + 0.3 * len(sample.text)])
        expected += plain_advantages(rewards)
    for sample, row in zip(batch.samples, expected, strict=True):
        assert sample.token_advantages is not None
        assert sample.token_advantages.tolist() == pytest.approx(row, rel=1e-5)
        assert sample.advantage == pytest.approx(fmean(row), abs=1e-9)


def test_a_score_with_rewards_of_tokens_comes_through_a_checkpoint_whole() -> None:
    groups = (group_of(["a|bcd", "x"]),)
    scored = score(groups, in_threads(RewardConfig(function="lengths", per="segment")))
    scored_again = decode(*encode(scored), {"data:1": groups[0].query})
    assert rows(scored_again) == rows(scored)
    for one, again in zip(scores_of(scored), scores_of(scored_again), strict=True):
        assert one.places is not None and again.places is not None and torch.equal(one.places, again.places)
    assert [sample.segments for sample in scored_again.samples] == [(2, 4), (2,)]
