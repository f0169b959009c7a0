"""What is written of each rollout, and of each of its tokens."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from gspo.learner.item import Trained
from tests.report.steps import batch, trained

from gspo.report.samples import cut_into_tokens
from gspo.run.rollout_lines import rollout_lines
from gspo.run.token_text import TokenText
from gspo.types import Batch, Failure, Query, Score

WORDS = {4: "", 5: "ab", 6: " c", 7: "€"}


def decode(ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in ids)


def step() -> Batch:
    """Two groups of two responses, each of its own tokens; the last one failed."""
    made = batch([[1, 3], [2, 2]], [[1.0, 0.0], [0.5, 0.0]], advantages=(0.7, -0.7, 0.0, 0.0))
    tokens = iter([[4], [5, 6, 4], [7, 5], [6, 6]])
    groups = []
    for number, group in enumerate(made.groups):
        rollouts = []
        for rollout in group.rollouts:
            ids = next(tokens)
            rollouts.append(replace(rollout, response_ids=torch.tensor(ids), text=decode(ids), policy_version=9))
        query = Query(id=f"q:{number}", prompt="raw", text=f"rendered {number}", prompt_ids=(1,), columns={})
        groups.append(replace(group, query=query, rollouts=tuple(rollouts)))
    failed = Score(reward=None, parts={"f": None}, failure=Failure(kind="raised", message="f: no"))
    return replace(made, groups=tuple(groups), scores=(*made.scores[:3], failed))


def item(index: int, log_ratios: Sequence[float], **given: Any) -> Trained:
    made = trained(index, mini_batch=2, tokens=len(log_ratios), clipped=given.pop("clipped", 0), ratio=1.0, **given)
    return replace(made, log_ratios=torch.tensor(log_ratios))


def lines(items: Sequence[Trained] = (), made: Batch | None = None) -> list[dict[str, Any]]:
    return [dict(line) for line in rollout_lines(made or step(), items, TokenText(decode))]


def test_there_is_a_line_a_rollout_in_the_order_of_the_batch() -> None:
    found = lines()
    assert [line["query"] for line in found] == ["q:0", "q:0", "q:1", "q:1"]
    assert [line["prompt"] for line in found] == ["rendered 0"] * 2 + ["rendered 1"] * 2  # what the model reads
    assert [line["completion"] for line in found] == ["", "ab c", "€ab", " c c"]
    assert [line["tokens"] for line in found] == [1, 3, 2, 2]
    assert [line["advantage"] for line in found] == [0.7, -0.7, 0.0, 0.0]
    assert [line["reward"] for line in found] == [1.0, 0.0, 0.5, None]
    assert [line["rewards"] for line in found] == [{"f": 1.0}, {"f": 0.0}, {"f": 0.5}, {"f": None}]
    assert [line["failure"] for line in found] == [None, None, None, "f: no"]
    assert {(line["finish_reason"], line["policy_version"]) for line in found} == {("stop", 9)}


def test_what_the_update_saw_is_with_its_own_rollout_whatever_its_order() -> None:
    found = lines([item(1, [0.1, 0.2, 0.3], clipped=1), item(0, [-0.5], clipped=1)])
    assert [line["clipped"] for line in found] == [1, pytest.approx(1 / 3), None, None]
    assert [line["mini_batch"] for line in found] == [2, 2, None, None]
    assert [line["sequence_ratio"] for line in found] == [1.0, 1.0, None, None]
    assert [line["token_log_ratios"] for line in found] == [[-0.5], [0.1, 0.2, 0.3], None, None]


def test_the_numbers_of_a_token_have_four_significant_digits() -> None:
    torch.manual_seed(0)
    ratios, advantages = torch.randn(200) * 10.0 ** torch.randint(-9, 1, (200,)), torch.randn(200)
    ratios[:3] = torch.tensor([0.0, -0.0, 12.34567])
    made = batch([[200]], [[1.0]], advantages=(0.3,), token_advantages={0: advantages})
    (line,) = rollout_lines(made, [item(0, ratios.tolist())], TokenText(lambda ids: ""))
    for name, exact in (("token_log_ratios", ratios), ("token_advantages", advantages)):
        assert line[name] == [float(f"{number:.4g}") for number in exact.tolist()]
        assert json.loads(json.dumps(line[name])) == line[name]


def test_only_where_tokens_have_their_own_are_there_token_advantages() -> None:
    made = replace(step(), token_advantages={1: torch.tensor([1.0, 0.5, -2.0])})
    assert [line["token_advantages"] for line in lines(made=made)] == [None, [1.0, 0.5, -2.0], None, None]


def test_a_number_that_is_not_finite_is_null_and_the_others_are_there() -> None:
    assert lines([item(1, [math.inf, math.nan, -math.inf])])[1]["token_log_ratios"] == [None, None, None]
    made = replace(step(), token_advantages={1: torch.tensor([1.23456, math.nan, -2.0])})
    line = lines([item(1, [math.inf, -0.5, 0.0])], made)[1]
    assert (line["token_log_ratios"], line["token_advantages"]) == ([None, -0.5, 0.0], [1.235, None, -2.0])


def test_the_columns_are_those_that_can_be_read_beside_a_response() -> None:
    kept = {"answer": "5", "level": 3, "share": 0.5, "hard": True, "source": None, "long": "x" * 1000}
    columns = {**kept, "longer": "x" * 1001, "list": [1], "tree": {"a": 1}, "bytes": b"x", "metadata": object()}
    made = step()
    groups = (replace(made.groups[0], query=replace(made.groups[0].query, columns=columns)), made.groups[1])
    found = [line["columns"] for line in lines(made=replace(made, groups=groups))]
    assert found == [kept, kept, {}, {}] and list(found[0]) == list(kept)


def test_the_characters_of_the_tokens_add_up_to_the_completion_trained_or_not() -> None:
    found = lines([item(0, [0.0])])
    assert [line["token_characters"] for line in found] == [[0], [2, 2, 0], [1, 2], [2, 2]]
    for line in found:
        assert sum(line["token_characters"]) == len(line["completion"])
        assert len(line["token_characters"]) == line["tokens"]
    assert cut_into_tokens(found[1]) == ["ab", " c", ""]


def test_a_text_that_is_not_its_tokens_has_no_characters_but_its_ratios() -> None:
    made = step()
    rollout = replace(made.groups[0].rollouts[1], text="something else")
    group = replace(made.groups[0], rollouts=(made.groups[0].rollouts[0], rollout))
    line = lines([item(1, [0.0, 0.1, 0.2])], replace(made, groups=(group, made.groups[1])))[1]
    assert line["token_characters"] is None and line["token_log_ratios"] == [0.0, 0.1, 0.2]


def test_without_the_tokens_texts_nothing_is_written_of_tokens() -> None:
    for line in rollout_lines(step(), [item(0, [0.1])]):
        assert [name for name in line if name.startswith("token_")] == []
