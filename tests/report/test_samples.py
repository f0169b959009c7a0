"""The samples of the page: an index that follows the files, groups as they are read, and as many as fit into a page."""

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import sets_in
from tests.report.page.made_runs import Line, recipe, rollouts, sample, write_run

from gspo.report import samples as module
from gspo.report.page import write
from gspo.report.page.write import document
from gspo.report.run_files import RunFiles, read_run
from gspo.report.samples import SampleSet, cut_into_tokens, passes, read_groups, sample_sets


def written(path: Path, samples: Mapping[int, Sequence[Line]] | None, **changes: Any) -> RunFiles:
    return read_run(write_run(path / "run", settings=recipe(**changes), samples=samples))


def with_evaluation(run: RunFiles, step: int, sets: Mapping[str, Sequence[Line]]) -> RunFiles:
    """The run with evaluated sets of these responses."""
    (run.path / "evaluation").mkdir(exist_ok=True)
    lines = [{"set": name, **line} for name, own in sets.items() for line in own]
    file = run.path / "evaluation" / f"step_{step:06d}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (run.path / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": step, **{f"evaluation/{name}/pass_at_1": 0.5 for name in sets}}) + "\n")
    return read_run(run.path)


def only_set(run: RunFiles) -> SampleSet:
    (samples,) = sample_sets([run])
    return samples


def carried(*runs: RunFiles) -> list[dict[str, Any]]:
    return sets_in(document(runs))


def test_the_index_has_what_each_query_got_in_each_step(tmp_path: Path) -> None:
    groups = {
        3: [sample("a", reward=1.0), sample("b", "other prompt", reward=0.5), sample("a", reward=0.0)],
        7: [sample("b", "other prompt", reward=None), sample("c", reward=1.0)],
    }
    index = only_set(written(tmp_path, groups)).index()
    assert index["prompts"] == {"a": "2 + 3 =", "b": "other prompt", "c": "2 + 3 ="}
    assert index["steps"] == [
        {"step": 3, "carried": 2, "groups": [["a", 2, 2, 1, 0.5, 1], ["b", 1, 1, 0, 0.5, 0]]},
        {"step": 7, "carried": 2, "groups": [["b", 1, 0, 0, None, 0], ["c", 1, 1, 1, 1.0, 0]]},
    ]
    assert index["coverage"] == "All samples."


@pytest.mark.parametrize(
    ("rewards", "failure", "passed"),
    [
        ({"f": 0.5, "g": 0.0}, None, True),
        ({"f": 0.49, "g": 1.0}, None, False),
        ({"f": None, "g": 1.0}, None, True),  # f does not apply
        ({"f": None, "g": 1.0}, "reward function f: no", False),
        ({"f": None}, None, None),
        ({}, None, None),
    ],
)
def test_the_first_function_that_applies_decides_whether_a_response_passes(
    rewards: dict[str, Any], failure: str | None, passed: bool | None, tmp_path: Path
) -> None:
    line = sample(rewards=rewards, failure=failure)
    assert passes(line, 0.5) is passed
    run = written(tmp_path, {1: [line]}, evaluation={"pass_threshold": 0.5})
    assert only_set(run).group(1, 0)["samples"][0]["passed"] is passed


def test_rewards_are_shares_by_value_or_of_many_values_by_range(tmp_path: Path) -> None:
    few = written(tmp_path / "a", {1: [sample(reward=r) for r in (0, 0, 1, None)], 4: [sample(reward=1)]})
    assert only_set(few).index()["rewards"] == {
        "steps": [1, 4],
        "series": {"reward 0": [0.5, 0.0], "reward 1": [0.25, 1.0], "reward none": [0.25, 0.0]},
    }
    rewards = [0.0, 0.01, 0.1, 0.25, 0.3, 0.6, 0.8, 0.99, 1.0, 1.0]
    many = only_set(written(tmp_path / "b", {1: [sample(reward=r) for r in rewards]})).index()["rewards"]["series"]
    shares = {"0": 0.1, "below 0.25": 0.2, "below 0.5": 0.2, "below 0.75": 0.1, "below 1": 0.2, "1": 0.2}
    assert list(many) == [f"reward {label}" for label in shares]
    assert list(many.values()) == [[pytest.approx(share)] for share in shares.values()]


def test_the_index_reads_a_file_once_and_again_where_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, {1: [sample("a")], 2: [sample("b")]})
    read: list[Path] = []
    real = module.read_json_lines

    def look(path: Path) -> Any:
        read.append(path)
        return real(path)

    monkeypatch.setattr(module, "read_json_lines", look)
    for _ in range(2):
        only_set(run).index()
    assert read == [*run.rollout_files.values()]
    os.utime(run.rollout_files[2], ns=(1, 1))
    only_set(run).index()
    assert read[2:] == [run.rollout_files[2]]


def test_steps_that_a_resumed_run_takes_back_go_and_a_half_line_waits(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample("a")], 2: [sample("b"), sample("c")]})
    file = run.rollout_files[2]
    file.write_bytes(file.read_bytes()[:-5])
    samples = only_set(run)
    assert [len(one["groups"]) for one in samples.index()["steps"]] == [1, 1]
    file.unlink()
    assert [one["step"] for one in samples.index()["steps"]] == [1]
    for step, place in ((2, 0), (9, 0), (1, 1)):
        with pytest.raises(LookupError):
            samples.group(step, place)


def test_a_line_that_cannot_be_read_is_left_out_and_counted(tmp_path: Path) -> None:
    run = written(tmp_path, {1: rollouts(1), 2: []})
    path = run.rollout_files[1]
    path.write_text("{broken\n[1]\n" + path.read_text() + '{"query": "cut')
    (page,) = carried(run)
    assert [len(group["samples"]) for group in page["contents"][1]] == [4, 4]
    assert page["coverage"] == "All samples. 2 line(s) could not be read."
    assert read_groups(path, None)[1] == 2


def test_an_end_of_line_inside_of_a_text_ends_no_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0cfour\r\nfive"
    run = written(tmp_path, {1: [sample(words=[text])]})
    assert only_set(run).group(1, 0)["samples"][0]["texts"] == [text, ""]


def test_the_table_begins_with_the_users_words_and_the_group_tells_them_from_the_template(tmp_path: Path) -> None:
    system, words = "You are a helpful assistant. " * 9, f"What is {'9' * 200}?"
    prompt = f"<|im_start|>system\n{system}<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    start = prompt.index(words)
    lines = [{**sample("a", prompt), "prompt_words": [start, start + len(words)]}, sample("older", prompt)]
    samples = only_set(written(tmp_path, {1: lines}))
    assert samples.index()["prompts"] == {"a": words[:120], "older": prompt[-120:]}
    before, own, behind = samples.group(1, 0)["prompt"]
    assert own == words and before.endswith("user\n") and behind.startswith("<|im_end|>")
    assert "".join(samples.group(1, 1)["prompt"]) == prompt


def test_where_all_fits_all_is_carried(tmp_path: Path) -> None:
    lines = {step: rollouts(step) for step in (1, 2, 3)}
    (page,) = carried(written(tmp_path, lines))
    assert page["coverage"] == "All samples."
    for step, groups in page["contents"].items():
        pairs = [(group, shown) for group in groups for shown in group["samples"]]
        for (group, shown), line in zip(pairs, lines[step], strict=True):
            ratios, known = shown.pop("token_log_ratios"), line["token_log_ratios"] or []
            assert ratios == pytest.approx(known, rel=5.1e-3, abs=0) and shown.pop("token_advantages") == []
            texts, passed = shown.pop("texts"), shown.pop("passed")
            assert [*map(len, texts)] == line["token_characters"] and "".join(texts) == line["completion"]
            assert passed == (None if line["reward"] is None else line["reward"] >= 1)
            assert shown == {name: line[name] for name in shown} and set(shown) > {"reward", "clipped", "mini_batch"}
            assert (group["query"], "".join(group["prompt"])) == (line["query"], line["prompt"])


def random_run(path: Path, *counts: int) -> RunFiles:
    """A run with so many groups of two in each step; each query is in every step that has so many."""
    rng = random.Random(1)
    steps: dict[int, list[Line]] = {step: [] for step in range(1, len(counts) + 1)}
    for step, count in enumerate(counts, start=1):
        for place in range(2 * count):
            words = "".join(rng.choices("abcdefghijklmnop", k=60))
            steps[step].append(sample(f"q:{place // 2}", words=[words]))
    return written(path, steps)


def test_where_not_all_fits_those_of_the_last_steps_are_carried_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(tmp_path, 8, 8, 8, 8)
    (whole,) = carried(run)
    size = len(json.dumps(whole["contents"][4][0]))
    monkeypatch.setattr(write, "MAX_BYTES", 20 * size + 1)
    (page,) = carried(run)
    assert {step: len(groups) for step, groups in page["contents"].items()} == {4: 8, 3: 8, 2: 4}
    assert [(one["carried"], len(one["groups"])) for one in page["steps"]] == [(0, 8), (4, 8), (8, 8), (8, 8)]
    assert page["contents"][2] == whole["contents"][2][:4]
    groups = "This page has 20 of 32 groups, those of the last steps"
    assert page["coverage"] == f"{groups}; gspo view {run.path} shows all."
    monkeypatch.setattr(write, "MAX_BYTES", 10)
    (page,) = carried(run)
    assert page["contents"] == {} and [len(one["groups"]) for one in page["steps"]] == [8] * 4


def test_each_set_that_a_run_is_evaluated_on_is_its_own_with_its_own_threshold(tmp_path: Path) -> None:
    suites, names = [{"name": "codes", "pass_threshold": 0.5}, {"name": "sums"}], ("sums", "codes", "held_out")
    run = written(tmp_path, {1: [sample()]}, evaluation={"pass_threshold": 0.75, "suites": suites})
    lines = {name: [sample("same id", reward=0.6, words=(name,))] for name in names}
    training, *evaluated = carried(with_evaluation(run, 0, lines))
    assert training["kind"] == "training" and list(training["contents"]) == [1]
    assert [own["kind"] for own in evaluated] == [f"evaluation on {name}" for name in names]
    for own, name, passed in zip(evaluated, names, (False, True, False), strict=True):
        ((group,),) = own["contents"].values()
        (shown,) = group["samples"]
        assert shown["texts"] == [name, ""] and shown["passed"] is passed and "set" not in shown
        assert own["rewards"]["steps"] == [0] and own["steps"][0]["groups"][0][:2] == ["same id", 1]


def test_sets_share_the_room_and_runs_that_share_a_name_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [random_run(tmp_path / name, 8) for name in ("a", "b")]
    size = len(json.dumps(carried(runs[0])[0]["contents"][1][0]))
    monkeypatch.setattr(write, "MAX_BYTES", 8 * size + 1)
    sets = carried(*runs)
    assert [one["name"] for one in sets] == [str(run.path) for run in runs]
    assert [len(one["contents"][1]) for one in sets] == [4, 4]


def test_without_samples_it_is_said_why(tmp_path: Path) -> None:
    (none,) = carried(written(tmp_path, None, report={"rollouts": False}))
    assert none["coverage"].startswith("There are no samples yet, or report.rollouts is false") and not none["steps"]


def test_a_run_without_the_numbers_of_tokens_is_shown_in_one_piece(tmp_path: Path) -> None:
    plain = {key: value for key, value in sample().items() if not key.startswith("token_")}
    unknown = {**sample(), "token_characters": None}
    (shown,) = only_set(written(tmp_path, {1: [plain]})).group(1, 0)["samples"]
    assert shown["texts"] == ["The sum"] and shown["token_log_ratios"] == [] and shown["tokens"] == 3
    assert cut_into_tokens(plain) is cut_into_tokens(unknown) is None


def test_the_numbers_of_tokens_have_three_significant_digits_however_small(tmp_path: Path) -> None:
    line = sample(token_log_ratios=[0.00012345, -1234.5, None], token_advantages=[1.0, 0.0, -0.66666])
    (shown,) = only_set(written(tmp_path, {1: [line]})).group(1, 0)["samples"]
    assert shown["token_log_ratios"] == [0.000123, -1230.0, None]
    assert shown["token_advantages"] == [1.0, 0.0, -0.667]
