"""A whole run on rewards of tokens and segments: the trial before it, what it trains on and writes, what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gspo import cli
from gspo.errors import UserError
from gspo.reward.calls import RewardFunction
from gspo.reward.functions import JUNK, probe
from gspo.types import Query

TINY = Path(__file__).parents[1] / "tiny.yaml"


@pytest.mark.parametrize("separator", [None, " "])
def test_the_trial_has_tokens_and_turns_to_give_numbers_for(fitted_tokenizer: Any, separator: str | None) -> None:
    ids: list[list[int]] = []
    texts: list[list[str]] = []

    def each(completion_ids: list[list[int]], **columns: Any) -> list[list[float]]:
        ids.extend(completion_ids)
        return [[1.0] * (len(row) - 1) + [4.0] for row in completion_ids]

    def by_segment(segments: list[list[str]]) -> list[list[int]]:
        texts.extend(segments)
        return [[len(segment) for segment in its] for its in segments]

    functions = [RewardFunction(name="each", call=each, per="token")]
    if separator is not None:
        functions.append(RewardFunction(name="by_segment", call=by_segment, per="segment", segment_separator=separator))
    query = Query(id="data:1", prompt="", text="", prompt_ids=(1,), columns={"answer": "1 + 2"})
    (gold, its), (junk, _) = probe([query], [], functions, fitted_tokenizer, segment_separator=separator)
    assert (gold, junk) == ("1 + 2", JUNK)
    assert all(row[-1] == fitted_tokenizer.eos_token_id and len(row) > 1 for row in ids)
    assert its.parts["each"] == len(ids[0]) + 3
    if separator is not None:  # "1 ", "+ ", "2" and the end token, a token each but the last
        assert texts == [["1 ", "+ ", "2"], ["I ", "do ", "not ", "know."]]
        assert its.parts["by_segment"] == 2 + 2 + 1
    with pytest.raises(UserError, match="it returns 2 numbers for a response of"):
        short = RewardFunction(name="short", call=lambda **columns: [[1.0, 2.0]] * 2, per="token")
        probe([query], [], [short], fitted_tokenizer, segment_separator=separator)


MINE = """
def digits(completion_ids, **columns):
    return [[float(token % 2) for token in ids] for ids in completion_ids]

def lines(completions, segments, **columns):
    return [[float(len(segment) % 3) for segment in its] for its in segments]
"""
SETTINGS = (
    "actor.importance_sampling_level=sequence_token",
    'rollout.segment_separator=" "',
    "reward=[{function: format, options: {pattern: '7'}}, {function: mine.py:digits, per: token}, "
    "{function: mine.py:lines, per: segment, weight: 0.5}]",
)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE, encoding="utf-8")


def test_a_run_trains_on_rewards_of_tokens_and_turns_and_writes_their_means(mine: None) -> None:
    assert cli.main(["train", str(TINY), *SETTINGS]) == 0
    lines = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["policy/grad_norm"] > 0 and line["group/zero_variance_fraction"] == 0 for line in lines[1:])
    (first, *_) = sorted(Path("runs/tiny/rollouts").iterdir())
    written = [json.loads(line) for line in first.read_text().splitlines()]
    assert len(written) == 32
    for one in written:
        parts = one["rewards"]
        assert 0 <= parts["digits"] <= one["tokens"] and 0 <= parts["lines"] <= 2 * one["tokens"]
        assert one["reward"] == pytest.approx(parts["format"] + parts["digits"] + 0.5 * parts["lines"])
        assert math.isfinite(one["advantage"])
    for start in range(0, 32, 4):  # all of a response is still to go at its first token
        of_first_tokens = [one["token_advantages"][0] for one in written[start : start + 4]]
        assert sum(of_first_tokens) == pytest.approx(0, abs=2e-3)


def test_check_says_what_a_number_is_for_and_shows_the_mean(mine: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(TINY), *SETTINGS]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")]
    assert said[0].startswith("reward      format: gold")
    assert said[1].startswith("reward      digits, a number per token, in all: gold")
    assert said[2].startswith("reward      lines, a number per segment, in all: gold")


@pytest.mark.parametrize("command", ["check", "train"])
def test_rewards_per_segment_are_refused_where_nothing_ends_a_segment(
    command: str, mine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(TINY), SETTINGS[0], SETTINGS[2]]) == 2
    error = capsys.readouterr().err
    assert "tiny.yaml" in error and "per: segment needs" in error and "segment_separator" in error
    assert cli.main([command, str(TINY), *SETTINGS, 'rollout.segment_separator=""']) == 2
    assert "rollout.segment_separator" in capsys.readouterr().err
    assert not Path("runs").exists()
