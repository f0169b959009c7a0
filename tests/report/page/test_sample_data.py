"""The samples of a page: an index that follows the files, and groups as many as fit, the same ones in each step."""

import base64
import gzip
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.made_runs import Line, recipe, rollouts, sample, write_run

from gspo.errors import UserError
from gspo.report.page import sample_data
from gspo.report.page.sample_data import SampleSet, sample_sets, samples_json
from gspo.report.run_files import RunFiles, read_run


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


def looked_at(run: RunFiles) -> SampleSet:
    (samples,) = sample_sets([run])
    assert samples.look() == 0
    return samples


def test_where_all_fits_all_is_carried_and_said_to_be(tmp_path: Path) -> None:
    lines = {step: rollouts(step) for step in (1, 2, 3)}
    (page,) = carried(written(tmp_path, lines))
    assert page["told"] == "All samples of all 3 steps."
    for step, groups in page["contents"].items():
        read = [
            {**shown, "query": group["query"], "prompt": group["prompt"]}
            for group in groups
            for shown in group["samples"]
        ]
        for shown, line in zip(read, lines[step], strict=True):
            ratios, known = shown.pop("token_log_ratios"), {**line}.pop("token_log_ratios")
            passed = shown.pop("passed")
            assert shown == {name: value for name, value in line.items() if name != "token_log_ratios"}
            assert passed == (None if line["reward"] is None else line["reward"] >= 1)
            assert ratios == known == None or ratios == pytest.approx(known, rel=5.1e-3, abs=0)  # noqa: E711


def test_the_index_has_what_each_query_got_in_each_step(tmp_path: Path) -> None:
    groups = {
        3: [sample("a", reward=1.0), sample("b", "other prompt", reward=0.5), sample("a", reward=0.0)],
        7: [sample("b", "other prompt", reward=None), sample("c", reward=1.0)],
    }
    index = looked_at(written(tmp_path, groups)).index()
    assert [query for query, _ in index["queries"]] == ["a", "b", "c"]
    assert index["queries"][1][1] == "other prompt"
    assert index["steps"] == [
        {"step": 3, "groups": [[0, 2, 1, 0.5, 0], [1, 1, 0, 0.5, 1]]},
        {"step": 7, "groups": [[1, 1, 0, None, 0], [2, 1, 1, 1.0, 1]]},
    ]


def test_a_response_passes_from_the_recipes_threshold_on(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample(reward=0.5), sample(reward=0.4)]}, evaluation={"pass_threshold": 0.5})
    assert looked_at(run).index()["steps"][0]["groups"][0][:3] == [0, 2, 1]


def test_rewards_are_shares_by_value_or_of_many_values_by_range(tmp_path: Path) -> None:
    few = written(tmp_path / "a", {1: [sample(reward=r) for r in (0, 0, 1, None)], 4: [sample(reward=1)]})
    assert looked_at(few).index()["rewards"] == {
        "steps": [1, 4],
        "labels": ["reward 0", "reward 1", "reward none"],
        "shares": [[0.5, 0.0], [0.25, 1.0], [0.25, 0.0]],
    }
    rewards = [0.0, 0.01, 0.1, 0.25, 0.3, 0.6, 0.8, 0.99, 1.0, 1.0]
    many = looked_at(written(tmp_path / "b", {1: [sample(reward=r) for r in rewards]})).index()["rewards"]
    labels = ["0", "up to 0.25", "up to 0.5", "up to 0.75", "below 1", "1"]
    assert many["labels"] == [f"reward {label}" for label in labels]
    assert many["shares"] == [[share] for share in (0.1, 0.3, 0.1, 0.1, 0.2, 0.2)]


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
        assert (f"{left} files of steps are still to be read" in index["told"]) == bool(left)


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
    words = ["é" * 40, "\U0001f600", "\u2028"]
    lines = [sample(query, words=[word]) for word in words for query in ("a", "b")]
    samples = looked_at(written(tmp_path, {1: lines}))
    for place, query in enumerate("ab"):
        group = samples.group(1, place)
        assert group["query"] == query and [one["completion"] for one in group["samples"]] == words


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


def test_where_not_all_fits_the_same_queries_of_every_step_are_carried_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(tmp_path, *[8] * 20)
    total = sum(path.stat().st_size for path in run.rollout_files.values())
    monkeypatch.setattr(sample_data, "_MAX_BYTES", total // 4 + 10)
    (page,) = carried(run)
    kept = {step: [group["query"] for group in groups] for step, groups in page["contents"].items()}
    assert len({tuple(queries) for queries in kept.values()}) == 1 and len(kept[1]) == 2
    assert page["told"].startswith("This page carries 40 of 160 groups, from 20 of 20 steps, chosen by a hash")
    assert f"gspo view {run.path} shows all" in page["told"]
    for one in page["steps"]:  # each group says where in the page it is; the others that it is not there
        places = {page["queries"][group[0]][0]: group[4] for group in one["groups"]}
        assert [query for query, place in sorted(places.items()) if place is not None] == sorted(kept[one["step"]])
        assert all(kept[one["step"]][place] == query for query, place in places.items() if place is not None)


def test_with_room_for_less_than_a_group_a_step_the_steps_are_spread_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = random_run(tmp_path, *[1] * 33)
    monkeypatch.setattr(sample_data, "_MAX_BYTES", 9 * (max(p.stat().st_size for p in run.rollout_files.values()) + 2))
    (page,) = carried(run)
    assert sorted(step for step, groups in page["contents"].items() if groups) == [1, *range(5, 33, 4), 33]


def test_a_table_of_very_many_queries_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_data, "_MAX_QUERIES", 3)
    run = random_run(tmp_path, 5, 5)
    (page,) = carried(run)
    assert len(page["queries"]) == 3 and [len(one["groups"]) for one in page["steps"]] == [3, 3]
    assert page["told"].endswith("The table leaves out 2 queries.")
    assert len(looked_at(run).index()["queries"]) == 5  # gspo view has all


def test_the_samples_of_evaluations_are_a_set_of_their_own(tmp_path: Path) -> None:
    run = written(tmp_path, {1: [sample("a")]})
    (run.path / "evaluation").mkdir()
    (run.path / "evaluation" / "step_000000.jsonl").write_text(json.dumps(sample("held out", reward=1.0)) + "\n")
    training, evaluation = carried(run)
    assert (training["kind"], evaluation["kind"]) == ("training", "evaluation")
    assert evaluation["queries"][0][0] == "held out" and list(evaluation["contents"]) == [0]
    assert len(sample_sets([run], live=True)) == len(sample_sets([run])) == 2


def test_runs_that_share_a_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    runs = [written(tmp_path / name, {1: [sample()]}) for name in ("a", "b")]
    assert [one["name"] for one in carried(*runs)] == [str(run.path) for run in runs]


def test_without_samples_it_is_said_why(tmp_path: Path) -> None:
    assert carried(written(tmp_path / "a", None))[0]["told"] == "There are no samples yet."
    off = carried(written(tmp_path / "b", None, report={"rollouts": False}))[0]
    assert off["told"] == "The recipe has report.rollouts: false: no samples were kept." and not off["steps"]
    odd: list[Any] = [None, "none", [], {}]
    for report in odd:
        assert carried(written(tmp_path / "c", None, report=report))[0]["told"] == "There are no samples yet."


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    run = written(tmp_path, {1: rollouts(1), 2: []})
    path = run.rollout_files[1]
    path.write_text("{broken\n[1]\n" + path.read_text() + '{"query": "cut')
    (page,) = carried(run)
    assert [len(group["samples"]) for group in page["contents"][1]] == [4, 4] and page["contents"][2] == []


def test_files_without_tokens_are_read_and_what_they_do_not_say_is_unknown(tmp_path: Path) -> None:
    old = {key: value for key, value in sample().items() if not key.startswith("token_")}
    shown = shown_of(old, tmp_path)
    assert shown == {**{key: value for key, value in old.items() if key not in ("query", "prompt")}, "passed": False}
    assert shown_of({"query": "q"}, tmp_path) == {
        **dict.fromkeys(["reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch"]),
        **{"policy_version": None, "completion": "", "rewards": {}, "tokens": 0, "finish_reason": "unknown"},
        "passed": None,
    }


def test_the_numbers_of_tokens_have_three_significant_digits_however_small(tmp_path: Path) -> None:
    numbers = [0.00012345, -1234.5, None]
    shown = shown_of(sample(token_log_ratios=numbers, token_advantages=[1.0, 0.0, -0.66666]), tmp_path)
    assert shown["token_log_ratios"] == [0.000123, -1230.0, None]
    assert shown["token_advantages"] == [1.0, 0.0, -0.667]


def test_what_a_line_should_not_have_is_left_out_and_named(tmp_path: Path) -> None:
    odd = {"reward": True, "rewards": {}, "tokens": -1, "completion": None, "token_log_ratios": [0.1, "x", None]}
    columns = {"answer": "5", "deep": [[[["x"]]]], "odd": float("inf")}
    (page,) = carried(written(tmp_path, {1: [{**sample(columns=columns), **odd}]}))
    (group,) = page["contents"][1]
    (shown,) = group["samples"]
    assert group["columns"] == {"answer": "5"}
    assert shown["not_read"] == "reward, tokens, token_log_ratios, columns"
    assert (shown["reward"], shown["tokens"], shown["completion"], shown["token_log_ratios"]) == (None, 0, "", None)


@pytest.mark.parametrize("lengths", [None, [1, 2, 3], [4, 3, 1], [-1, 8, 0], [4.0, 3, 0], "4 3 0"])
def test_numbers_of_tokens_whose_places_are_not_known_are_left_out(lengths: Any, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"token_log_ratios": [0.1, 0.2, 0.3], "token_advantages": [1.0, 2.0, 3.0]}
    assert shown_of(sample(**numbers), tmp_path)["token_log_ratios"] == [0.1, 0.2, 0.3]
    shown = shown_of(sample(**numbers, token_characters=lengths), tmp_path)
    assert shown["completion"] == "The sum" and shown["tokens"] == 3
    assert {name: shown[name] for name in shown if name.startswith("token_")} == dict.fromkeys(
        ["token_characters", "token_log_ratios", "token_advantages"]
    )
