"""The samples of a page: an index that follows the files, and as many groups of the last steps as fit."""

import base64
import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.made_runs import Line, recipe, rollouts, sample, write_run

from gspo.report.page import sample_data
from gspo.report.page.sample_data import samples_json
from gspo.report.run_files import RunFiles, read_run
from gspo.report.sample_index import sample_sets


def written(path: Path, samples: Mapping[int, Sequence[Line]] | None, **changes: Any) -> RunFiles:
    return read_run(write_run(path / "run", settings=recipe(**changes), samples=samples))


def unpacked(letters: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(letters)))


def carried(*runs: RunFiles) -> list[dict[str, Any]]:
    """The sets of a page, each with the groups that it carries, by step, unpacked."""
    page = json.loads(samples_json(runs))
    contents = [{int(step): unpacked(groups) for step, groups in own.items()} for own in page["contents"]]
    return [{**index, "contents": own} for index, own in zip(unpacked(page["index"]), contents, strict=True)]


def shown_of(line: Line, path: Path) -> dict[str, Any]:
    (only,) = carried(written(path, {1: [line]}))
    ((group,),) = only["contents"].values()
    (shown,) = group["samples"]
    assert isinstance(shown, dict)
    return shown


def test_where_all_fits_all_is_carried_and_said_to_be(tmp_path: Path) -> None:
    lines = {step: rollouts(step) for step in (1, 2, 3)}
    (page,) = carried(written(tmp_path, lines))
    assert page["coverage"] == "All samples of all 3 steps."
    for step, groups in page["contents"].items():
        read = [
            {
                **shown,
                "query": group["query"],
                "prompt": "".join(group["prompt"]),
                "completion": "".join(shown["texts"]),
            }
            for group in groups
            for shown in group["samples"]
        ]
        for shown, line in zip(read, lines[step], strict=True):
            ratios, known = shown.pop("token_log_ratios"), {**line}.pop("token_log_ratios")
            passed, texts = shown.pop("passed"), shown.pop("texts")
            assert [*map(len, texts)] == line["token_characters"]
            assert shown == {name: line[name] for name in line if name not in ("token_log_ratios", "token_characters")}
            assert passed == (None if line["reward"] is None else line["reward"] >= 1)
            assert ratios == known == None or ratios == pytest.approx(known, rel=5.1e-3, abs=0)  # noqa: E711


def random_run(path: Path, *counts: int) -> RunFiles:
    """A run with so many groups of two in each step; each query is in every step that has so many."""
    rng = random.Random(1)
    steps = {
        step: [
            sample(f"q:{place // 2}", words=["".join(rng.choices("abcdefghijklmnop", k=60))])
            for place in range(2 * count)
        ]
        for step, count in enumerate(counts, start=1)
    }
    return written(path, steps)


def test_where_not_all_fits_those_of_the_last_steps_are_carried_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(tmp_path, 8, 8, 8, 8)
    size = run.rollout_files[4].stat().st_size
    monkeypatch.setattr(sample_data, "_MAX_BYTES", 2 * size + size // 2 + 10)
    (page,) = carried(run)
    assert {step: len(groups) for step, groups in page["contents"].items()} == {1: 0, 2: 4, 3: 8, 4: 8}
    assert page["coverage"].startswith("This page carries 20 of 32 groups, those of the last 3 of 4 steps;")
    assert page["coverage"].endswith(f"gspo view {run.path} shows all.")
    for one in page["steps"]:  # each group says where in the page it is; the others that it is not there
        kept = [group["query"] for group in page["contents"][one["step"]]]
        places = {page["queries"][group[0]][0]: group[4] for group in one["groups"]}
        assert len(places) == 8
        assert {query: place for query, place in places.items() if place is not None} == {
            query: place for place, query in enumerate(kept)
        }


def test_without_room_for_a_group_the_table_is_there_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_data, "_MAX_BYTES", 10)
    (page,) = carried(random_run(tmp_path, 3, 0, 3))
    assert not any(page["contents"].values()) and [len(one["groups"]) for one in page["steps"]] == [3, 0, 3]
    assert page["coverage"].startswith("This page carries 0 of 6 groups")


def test_a_table_of_very_many_groups_has_the_last_steps_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_data, "_MAX_GROUPS", 7)
    run = random_run(tmp_path, 5, 3, 4)
    (page,) = carried(run)
    assert len(page["queries"]) == 4 and [one["step"] for one in page["steps"]] == sorted(page["contents"]) == [2, 3]
    assert page["coverage"].endswith("The table begins with step 2.") and page["rewards"]["steps"] == [1, 2, 3]
    (whole,) = sample_sets([run])
    whole.look()
    assert len(whole.index()["queries"]) == 5  # gspo view has all
    monkeypatch.setattr(sample_data, "_MAX_GROUPS", 1)
    assert [one["step"] for one in carried(run)[0]["steps"]] == [3]  # a step is never cut


def test_the_samples_of_evaluations_are_a_set_of_their_own(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample("a")]})
    (run.path / "evaluation").mkdir()
    (run.path / "evaluation" / "step_000000.jsonl").write_text(json.dumps(sample("held out", reward=1.0)) + "\n")
    training, evaluation = carried(run)
    assert (training["kind"], evaluation["kind"]) == ("training", "evaluation")
    assert evaluation["queries"][0][0] == "held out" and list(evaluation["contents"]) == [0]


def test_evaluated_sets_share_one_half_of_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, {1: [sample(f"q:{number:02}") for number in range(40)]})
    (run.path / "evaluation").mkdir()
    lines = [{"set": name, **sample(f"{name}:{number:02}")} for name in "abcd" for number in range(40)]
    (run.path / "evaluation" / "step_000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    size = len(json.dumps(lines[0])) + 1
    monkeypatch.setattr(sample_data, "_MAX_BYTES", 80 * size)
    numbers = [sum(map(len, own["contents"].values())) for own in carried(run)]
    assert numbers == [40, 10, 10, 10, 10]


def test_each_set_that_a_run_is_evaluated_on_is_its_own_with_its_own_threshold(tmp_path: Path) -> None:
    suites = [{"name": "codes", "pass_threshold": 0.5}, {"name": "sums"}]
    run = written(tmp_path, {1: [sample()]}, evaluation={"pass_threshold": 0.75, "suites": suites})
    (run.path / "evaluation").mkdir()
    lines = [{"set": name, **sample("same id", reward=0.6, words=(name,))} for name in ("sums", "codes", "held_out")]
    (run.path / "evaluation" / "step_000000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, *evaluated = carried(run)
    assert [own["kind"] for own in evaluated] == [f"evaluation on {name}" for name in ("sums", "codes", "held_out")]
    for own, name, passed in zip(evaluated, ("sums", "codes", "held_out"), (False, True, False), strict=True):
        ((group,),) = own["contents"].values()
        (shown,) = group["samples"]
        assert shown["texts"] == [name, ""] and shown["passed"] is passed and "set" not in shown
        assert own["rewards"]["steps"] == [0] and own["steps"][0]["groups"][0][:2] == [0, 1]


def test_runs_that_share_a_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, {1: [sample()]}) for name in ("a", "b")]
    assert [one["name"] for one in carried(*runs)] == [str(run.path) for run in runs]


def test_without_samples_it_is_said_why(tmp_path: Path) -> None:
    (none,) = carried(written(tmp_path, None, report={"rollouts": False}))
    assert none["coverage"].startswith("There are no samples yet, or report.rollouts is false") and not none["steps"]


def test_lines_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    run = written(tmp_path, {1: rollouts(1), 2: []})
    path = run.rollout_files[1]
    path.write_text("{broken\n[1]\n" + path.read_text() + '{"query": "cut')
    (page,) = carried(run)
    assert [len(group["samples"]) for group in page["contents"][1]] == [4, 4] and page["contents"][2] == []
    assert page["coverage"].endswith("2 line(s) could not be read.")


def test_files_without_tokens_are_read_and_what_they_do_not_say_is_unknown(tmp_path: Path) -> None:
    old = {key: value for key, value in sample().items() if not key.startswith("token_")}
    shown = shown_of(old, tmp_path)
    own = {key: value for key, value in old.items() if key not in ("query", "prompt", "completion")}
    no_tokens = {"token_log_ratios": None, "token_advantages": None}
    assert shown == {**own, **no_tokens, "texts": ["The sum"], "passed": False}
    assert shown_of({"query": "q"}, tmp_path) == {
        **dict.fromkeys(["reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch"]),
        **{"policy_version": None, "rewards": {}, "tokens": 0, "finish_reason": "unknown", "passed": None},
        **{**no_tokens, "texts": [""]},
    }


def test_the_numbers_of_tokens_have_three_significant_digits_however_small(tmp_path: Path) -> None:
    numbers = [0.00012345, -1234.5, None]
    shown = shown_of(sample(token_log_ratios=numbers, token_advantages=[1.0, 0.0, -0.66666]), tmp_path)
    assert shown["token_log_ratios"] == [0.000123, -1230.0, None]
    assert shown["token_advantages"] == [1.0, 0.0, -0.667]


def test_a_line_that_gspo_cannot_have_written_is_skipped_and_counted(tmp_path: Path) -> None:
    odd: list[Line] = [{"tokens": -1}, {"completion": None}, {"token_log_ratios": ["x"]}, {"new": [float("nan")]}]
    (page,) = carried(written(tmp_path, {1: [sample(), *({**sample(), **one} for one in odd)], 2: [sample()]}))
    assert [len(group["samples"]) for groups in page["contents"].values() for group in groups] == [1, 1]
    assert page["coverage"] == "All samples of all 2 steps. 4 line(s) could not be read."


@pytest.mark.parametrize("lengths", [None, [1, 2, 3], [4, 3, 1]])
def test_numbers_of_tokens_whose_places_are_not_known_are_left_out(lengths: Any, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"token_log_ratios": [0.1, 0.2, 0.3], "token_advantages": [1.0, 2.0, 3.0]}
    assert shown_of(sample(**numbers), tmp_path)["token_log_ratios"] == [0.1, 0.2, 0.3]
    shown = shown_of(sample(**numbers, token_characters=lengths), tmp_path)
    assert shown["texts"] == ["The sum"] and shown["tokens"] == 3
    assert shown["token_log_ratios"] is shown["token_advantages"] is None
