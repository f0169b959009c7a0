"""The index of a run's samples: it follows the files, and every group is read from its own bytes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.made_runs import Line, recipe, sample, write_run

from gspo.errors import UserError, printable
from gspo.report.run_files import RunFiles, read_run
from gspo.report.sample_index import SampleSet, sample_sets


def written(path: Path, samples: Mapping[int, Sequence[Line]] | None, **changes: Any) -> RunFiles:
    return read_run(write_run(path / "run", settings=recipe(**changes), samples=samples))


def looked_at(run: RunFiles) -> SampleSet:
    (samples,) = sample_sets([run])
    assert samples.look() == 0
    return samples


def test_the_index_has_what_each_query_got_in_each_step(tmp_path: Path) -> None:
    groups = {
        3: [sample("a", reward=1.0), sample("b", "other prompt", reward=0.5), sample("a", reward=0.0)],
        7: [sample("b", "other prompt", reward=None), sample("c", reward=1.0)],
    }
    index = looked_at(written(tmp_path, groups)).index()
    assert [query for query, _ in index["queries"]] == ["a", "b", "c"]
    assert index["queries"][1][1] == "other prompt"
    assert index["steps"] == [
        {"step": 3, "groups": [[0, 2, 1, 0.5, 0, 1], [1, 1, 0, 0.5, 1, 0]]},
        {"step": 7, "groups": [[1, 1, 0, None, 0, 0], [2, 1, 1, 1.0, 1, 0]]},
    ]


def test_a_response_passes_from_the_recipes_threshold_on(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample(reward=0.5), sample(reward=0.4)]}, evaluation={"pass_threshold": 0.5})
    assert looked_at(run).index()["steps"][0]["groups"][0][:3] == [0, 2, 1]


def test_rewards_are_shares_by_value_or_of_many_values_by_range(tmp_path: Path) -> None:
    few = written(tmp_path / "a", {1: [sample(reward=r) for r in (0, 0, 1, None)], 4: [sample(reward=1)]})
    assert looked_at(few).index()["rewards"] == {
        "steps": [1, 4],
        "series": {"reward 0": [0.5, 0.0], "reward 1": [0.25, 1.0], "reward none": [0.25, 0.0]},
    }
    rewards = [0.0, 0.01, 0.1, 0.25, 0.3, 0.6, 0.8, 0.99, 1.0, 1.0]
    many = looked_at(written(tmp_path / "b", {1: [sample(reward=r) for r in rewards]})).index()["rewards"]
    labels = ["0", "up to 0.25", "up to 0.5", "up to 0.75", "below 1", "1"]
    assert list(many["series"]) == [f"reward {label}" for label in labels]
    assert list(many["series"].values()) == [[share] for share in (0.1, 0.3, 0.1, 0.1, 0.2, 0.2)]


def test_the_index_reads_a_file_once_and_again_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, {1: [sample("a")], 2: [sample("b")]})
    samples = looked_at(run)
    read: list[int] = []
    monkeypatch.setattr(SampleSet, "_read", lambda self, step, path: read.append(step))
    assert samples.look() == 0 and read == []
    os.utime(run.rollout_files[2], ns=(1, 1))
    assert samples.look() == 0 and read == [2]


def test_a_long_runs_files_are_read_bit_by_bit_the_last_steps_first(tmp_path: Path) -> None:
    (samples,) = sample_sets([written(tmp_path, {step: [sample()] for step in (1, 2, 3)})])
    for left, steps in [(2, [3]), (1, [2, 3]), (0, [1, 2, 3])]:
        assert samples.look(seconds=-1) == left
        index = samples.index(left=left)
        assert [one["step"] for one in index["steps"]] == steps
        assert (f"{left} files of steps are still to be read" in index["coverage"]) == bool(left)


def test_steps_that_a_resumed_run_takes_back_go_and_a_half_line_waits(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample("a")], 2: [sample("b"), sample("c")]})
    file = run.rollout_files[2]
    file.write_bytes(file.read_bytes()[:-5])
    samples = looked_at(run)
    assert [len(one["groups"]) for one in samples.index()["steps"]] == [1, 1]
    file.unlink()
    with pytest.raises(UserError, match="samples of step 2 are no longer there"):
        samples.group(2, 0)
    samples.look()
    assert [one["step"] for one in samples.index()["steps"]] == [1]


@pytest.mark.parametrize(("step", "place"), [(9, 0), (1, 1), (1, 10**9)])
def test_a_group_that_is_not_there_is_refused(step: int, place: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no longer there"):
        looked_at(written(tmp_path, {1: [sample()]})).group(step, place)


def test_a_group_is_read_from_its_own_bytes_wherever_its_lines_are(tmp_path: Path) -> None:
    words = ["é" * 40, "\U0001f600", "\u2028"]  # the last is written out
    lines = [sample(query, words=[word]) for word in words for query in ("a", "b")]
    samples = looked_at(written(tmp_path, {1: lines}))
    for place, query in enumerate("ab"):
        group = samples.group(1, place)
        assert group["query"] == query and ["".join(one["texts"]) for one in group["samples"]] == [
            *words[:2],
            r"\u2028",
        ]


def test_a_file_that_is_another_one_now_gives_none_of_its_samples_under_an_old_name(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample("a"), sample("b")]})
    samples = looked_at(run)
    lines = run.rollout_files[1].read_text().splitlines(keepends=True)
    run.rollout_files[1].write_text("".join(lines[::-1]))  # as a resumed run may write it again
    assert samples.group(1, 0)["samples"] == []
    samples.look()
    assert samples.group(1, 0)["query"] == "b" and len(samples.group(1, 0)["samples"]) == 1


def test_a_file_that_cannot_be_read_has_no_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(13, "no")

    monkeypatch.setattr("gspo.report.sample_index.for_reading", refused)
    assert looked_at(written(tmp_path, {1: [sample()]})).index()["steps"] == [{"step": 1, "groups": []}]


def test_the_table_begins_with_the_users_words_and_the_group_tells_them_from_the_template(tmp_path: Path) -> None:
    system, words = "You are a helpful assistant. " * 9, f"What is {'9' * 200}?"
    prompt = f"<|im_start|>system\n{system}<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    start = prompt.index(words)
    lines = [{**sample("a", prompt), "prompt_words": [start, start + len(words)]}, sample("older", prompt)]
    samples = looked_at(written(tmp_path, {1: lines}))
    shown = dict(samples.index()["queries"])
    assert shown["a"] == words[:120] and shown["older"] == printable(prompt[-120:])
    before, own, behind = samples.group(1, 0)["prompt"]
    assert own == words and before.endswith("user\n") and behind.startswith("<|im_end|>")
    assert "".join(samples.group(1, 1)["prompt"]) == prompt
