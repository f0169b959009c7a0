"""The samples of a page: all where they fit, else whole groups, as many in each step, and the truth about it."""

import math
import random
import re
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import groups_in, size_of
from tests.report.page.made_runs import Line, recipe, rollouts, sample, write_run

from gspo.report.page.sample_data import SampleData, sample_data
from gspo.report.run_files import RunFiles, read_run

PLENTY = 10**7
THINNED = re.compile(r"Thinned to fit a page: (up to )?(\d+) of (\d+) queries of (every step|(\d+) of (\d+) steps)")


def written(path: Path, samples: Mapping[int, Sequence[Line]] | None, **changes: Any) -> RunFiles:
    return read_run(write_run(path / "run", settings=recipe(**changes), samples=samples))


def random_groups(rng: random.Random, step: int, count: int, letters: int = 60) -> list[Line]:
    """Groups of two of random text, which hardly compresses; each query is in every step that has so many."""
    words = ["".join(rng.choices("abcdefghijklmnop", k=letters)) for _ in range(2 * count)]
    return [sample(f"q:{place // 2}", f"prompt {place // 2}", words=[word]) for place, word in enumerate(words)]


def random_run(path: Path, *counts: int, **more: Any) -> RunFiles:
    """A run with so many groups in each step."""
    rng = random.Random(1)
    return written(path, {step: random_groups(rng, step, count, **more) for step, count in enumerate(counts, start=1)})


def queries_in(data: SampleData) -> dict[int, list[str]]:
    return {step: [group["query"] for group in groups] for step, groups in groups_in(data).items()}


def check_is_true(run: RunFiles, data: SampleData) -> None:
    """The sentence says what the page has."""
    counts = {step: len(queries) for step, queries in queries_in(data).items()}
    num_steps = len(run.rollout_files)
    if data.told.startswith("All samples"):
        which = f"all {num_steps} steps" if num_steps > 1 else "its one step"
        assert len(counts) == num_steps and data.told == f"All samples of {which}."
    elif not counts:
        assert data.told.startswith("No group is small enough") and f"gspo show {run.path}" in data.told
    else:
        found = THINNED.match(data.told)
        assert found and data.told.endswith(f"all samples are in {run.path / 'rollouts'}.")
        assert max(counts.values()) == int(found[2]) < int(found[3]) or len(counts) < num_steps
        assert bool(found[1]) == (len(set(counts.values())) > 1)
        assert (len(counts) == num_steps) == (found[4] == "every step")
        assert found[5] is None or (int(found[5]), int(found[6])) == (len(counts), num_steps)


def test_where_all_fits_all_is_kept_and_said_to_be(tmp_path: Path) -> None:
    lines = {step: rollouts(step) for step in (1, 2, 3)}
    data = sample_data(written(tmp_path, lines), PLENTY)
    assert data.told == "All samples of all 3 steps."
    assert [one.step for one in data.steps] == [1, 2, 3]
    for step, groups in groups_in(data).items():
        read = [
            {**shown, "query": group["query"], "prompt": group["prompt"]}
            for group in groups
            for shown in group["samples"]
        ]
        for shown, line in zip(read, lines[step], strict=True):
            ratios, known = shown.pop("token_log_ratios"), line.pop("token_log_ratios")
            assert shown == line
            assert ratios == known == None or ratios == pytest.approx(known, rel=5.1e-3, abs=0)  # noqa: E711
            assert ratios is None or all(float(f"{one:.3g}") == one for one in ratios)
    assert [list(one.queries) for one in data.steps] == list(queries_in(data).values())


def test_steps_of_any_number_of_groups_are_all_kept_where_they_fit(tmp_path: Path) -> None:
    counts = [1] * 60
    counts[7], counts[31] = 5, 9  # dynamic sampling: as many as had a signal
    run = random_run(tmp_path, *counts)
    data = sample_data(run, PLENTY)
    assert [len(queries) for queries in queries_in(data).values()] == counts
    check_is_true(run, data)


@pytest.mark.parametrize("counts", [[1], [3, 3], [4] * 5, [8] * 30, [2, 5, 3, 5], [1] * 40, [6, 1, 6, 0, 6]])
def test_it_never_takes_more_than_it_may_and_what_it_tells_is_true(counts: list[int], tmp_path: Path) -> None:
    run = random_run(tmp_path, *counts)
    whole = size_of(sample_data(run, PLENTY))
    steps = list(run.rollout_files)
    budgets = [0, 1, 10, 22, 50, *(int(whole * share) for share in (0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.5))]
    shown = []
    for budget in budgets:
        data = sample_data(run, budget)
        assert size_of(data) <= budget
        check_is_true(run, data)
        kept = [one.step for one in data.steps]
        assert not kept or (kept[0], kept[-1]) == (steps[0], steps[-1])
        shown.append(sum(map(len, queries_in(data).values())))
    assert shown == sorted(shown)  # more room, no less to see
    assert shown[-1] == sum(counts)


def test_where_there_is_room_for_half_about_half_is_shown(tmp_path: Path) -> None:
    run = random_run(tmp_path, *[8] * 30)
    whole = size_of(sample_data(run, PLENTY))
    data = sample_data(run, whole // 2)
    assert 0.35 * whole < size_of(data) <= 0.5 * whole


def test_groups_are_whole_and_as_many_of_the_same_queries_in_every_step(tmp_path: Path) -> None:
    rng = random.Random(2)
    lines = {}
    for step in range(1, 20):
        groups = [random_groups(rng, step, 8)[2 * place : 2 * place + 2] for place in range(8)]
        rng.shuffle(groups)
        lines[step] = [line for group in groups for line in group]
    run = written(tmp_path, lines)
    data = sample_data(run, size_of(sample_data(run, PLENTY)) // 3)
    found = queries_in(data)
    assert len(found) == 19 and {len(queries) for queries in found.values()} in [{1}, {2}]
    assert len({frozenset(queries) for queries in found.values()}) == 1  # one can be followed
    for step, shown in groups_in(data).items():
        assert all(len(group["samples"]) == 2 for group in shown)
        in_order = [line["query"] for line in lines[step] if line["query"] in found[step]]
        assert list(dict.fromkeys(in_order)) == found[step]


def test_of_changing_queries_those_that_come_again_are_chosen_again(tmp_path: Path) -> None:
    rng = random.Random(3)
    lines = {}
    for step in range(1, 9):
        some = rng.sample(range(12), 6)
        lines[step] = [line for line in random_groups(rng, step, 12) if int(line["query"].split(":")[1]) in some]
    run = written(tmp_path, lines)
    data = sample_data(run, size_of(sample_data(run, PLENTY)) // 2)
    found = queries_in(data)
    (count,) = {len(queries) for queries in found.values()}
    assert 1 <= count < 6
    preferred = {
        (one, line["query"])
        for step, queries in found.items()
        for one in queries
        for line in lines[step]
        if line["query"] not in queries
    }
    assert preferred and not any((other, one) in preferred for one, other in preferred)  # in every step alike


def test_with_room_for_less_than_a_group_a_step_the_steps_are_evenly_spread(tmp_path: Path) -> None:
    run = random_run(tmp_path, *[2] * 41)
    whole = size_of(sample_data(run, PLENTY))
    data = sample_data(run, whole // 10)
    steps = [one.step for one in data.steps]
    assert 3 <= len(steps) < 41 and steps[0] == 1 and steps[-1] == 41
    gaps = [after - before for before, after in pairwise(steps)]
    assert len(set(gaps[:-1])) == 1 and gaps[-1] <= gaps[0]
    assert f"1 of 2 queries of {len(steps)} of 41 steps, evenly spread" in data.told


def test_twice_is_the_same_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, times = random_run(tmp_path, *[4] * 6), count(0, 3600)
    monkeypatch.setattr("time.time", lambda: next(times))
    for budget in (PLENTY, 2000):
        assert sample_data(run, budget) == sample_data(run, budget)


def test_without_samples_it_is_said_why(tmp_path: Path) -> None:
    assert sample_data(written(tmp_path / "a", None), PLENTY) == SampleData(steps=[], told="There are no samples yet.")
    off = sample_data(written(tmp_path / "b", None, report={"rollouts": False}), PLENTY)
    assert off.told == "The recipe has report.rollouts: false: no samples were kept." and not off.steps
    odd: list[Any] = [None, "none", [], {}]
    for report in odd:
        assert sample_data(written(tmp_path / "c", None, report=report), PLENTY).told == "There are no samples yet."


@pytest.mark.parametrize("budget", [0, 30, PLENTY])
def test_a_file_that_has_no_line_yet_has_no_groups(budget: int, tmp_path: Path) -> None:
    assert queries_in(sample_data(written(tmp_path, {1: []}), budget)) in [{}, {1: []}]
    assert size_of(sample_data(written(tmp_path, {1: [], 2: [], 3: []}), budget)) <= max(budget, 0)


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    run = written(tmp_path, {1: rollouts(1), 2: rollouts(2)})
    path = run.rollout_files[1]
    path.write_text("{broken\n[1]\n" + path.read_text() + '{"query": "cut')
    data = sample_data(run, PLENTY)
    assert [len(group["samples"]) for group in groups_in(data)[1]] == [4, 4]


def test_files_without_tokens_are_read(tmp_path: Path) -> None:
    old = {key: value for key, value in sample().items() if not key.startswith("token_")}
    (group,) = groups_in(sample_data(written(tmp_path, {1: [old]}), PLENTY))[1]
    assert group["samples"] == [{key: value for key, value in old.items() if key not in ("query", "prompt")}]


def test_the_numbers_of_tokens_have_three_significant_digits_however_small(tmp_path: Path) -> None:
    numbers = [0.00012345, -1234.5, None]
    shown = shown_of(sample(token_log_ratios=numbers, token_advantages=[1.0, 0.0, -0.66666]), tmp_path)
    assert shown["token_log_ratios"] == [0.000123, -1230.0, None]
    assert shown["token_advantages"] == [1.0, 0.0, -0.667]


def test_each_step_says_how_far_its_scale_of_colours_reaches_at_least(tmp_path: Path) -> None:
    lines: list[Line] = [{"step": 1, "clip/low": 0.0003, "clip/high": 0.0004}, {"step": 2}]
    path = write_run(tmp_path / "run", lines=lines, samples={step: [sample()] for step in (1, 2, 3)})
    assert [one.colour_floor for one in sample_data(read_run(path), PLENTY).steps] == [0.0003, 0, 0]


def test_what_a_line_should_not_have_is_left_out_and_named(tmp_path: Path) -> None:
    odd = {"reward": True, "rewards": {}, "tokens": -1, "completion": None, "token_log_ratios": [0.1, "x", None]}
    columns = {"answer": "5", "deep": [[[["x"]]]], "odd": math.inf}
    (group,) = groups_in(sample_data(written(tmp_path, {1: [{**sample(columns=columns), **odd}]}), PLENTY))[1]
    (shown,) = group["samples"]
    assert group["columns"] == {"answer": "5"}
    assert shown["not_read"] == "reward, tokens, token_log_ratios, columns"
    assert (shown["reward"], shown["tokens"], shown["completion"], shown["token_log_ratios"]) == (None, 0, "", None)


def test_what_a_line_does_not_say_is_filled_with_what_means_that(tmp_path: Path) -> None:
    assert shown_of({"query": "q"}, tmp_path) == {
        **dict.fromkeys(["reward", "failure", "advantage", "sequence_ratio", "clipped", "mini_batch"]),
        **{"policy_version": None, "completion": "", "rewards": {}, "tokens": 0, "finish_reason": "unknown"},
    }
    some = shown_of({"query": "q", "reward": 0.0, "completion": "x", "finish_reason": "stop"}, tmp_path)
    assert (some["reward"], some["completion"], some["finish_reason"], some["clipped"]) == (0.0, "x", "stop", None)


def test_the_columns_are_the_groups_and_not_the_samples(tmp_path: Path) -> None:
    columns = {"answer": "5", "level": 3, "odd": None}
    lines = [sample("a", columns=columns), sample("b"), sample("a", columns=columns)]
    with_columns, without = groups_in(sample_data(written(tmp_path, {1: lines}), PLENTY))[1]
    assert with_columns["columns"] == columns and without["columns"] is None
    assert [len(group["samples"]) for group in (with_columns, without)] == [2, 1]
    assert not any("columns" in shown for group in (with_columns, without) for shown in group["samples"])


@pytest.mark.parametrize("lengths", [None, [1, 2, 3], [4, 3, 1], [-1, 8, 0], [4.0, 3, 0], "4 3 0"])
def test_numbers_of_tokens_whose_places_are_not_known_are_left_out(lengths: Any, tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"token_log_ratios": [0.1, 0.2, 0.3], "token_advantages": [1.0, 2.0, 3.0]}
    assert shown_of(sample(**numbers), tmp_path)["token_log_ratios"] == [0.1, 0.2, 0.3]
    shown = shown_of(sample(**numbers, token_characters=lengths), tmp_path)
    assert shown["completion"] == "The sum" and shown["tokens"] == 3
    assert {name: shown[name] for name in shown if name.startswith("token_")} == dict.fromkeys(
        ["token_characters", "token_log_ratios", "token_advantages"]
    )


def long_sample(num_tokens: int, **changes: Any) -> Line:
    words = [f"{place:x} " for place in range(num_tokens - 1)]
    ratios = [round(place / 10**4, 4) for place in range(num_tokens)]
    return {**sample(words=words, token_log_ratios=ratios, token_advantages=ratios[::-1]), **changes}


def shown_of(line: Line, path: Path) -> dict[str, Any]:
    (group,) = groups_in(sample_data(written(path, {1: [line]}), PLENTY))[1]
    (shown,) = group["samples"]
    assert isinstance(shown, dict)
    return shown


def test_a_response_of_four_thousand_tokens_is_whole(tmp_path: Path) -> None:
    line = long_sample(4000)
    assert shown_of(line, tmp_path)["completion"] == line["completion"]


def test_a_longer_one_loses_its_middle_and_says_so_token_by_token(tmp_path: Path) -> None:
    line = long_sample(5000)
    shown = shown_of(line, tmp_path)
    lengths = shown["token_characters"]
    assert len(lengths) == len(shown["token_log_ratios"]) == len(shown["token_advantages"]) == 4001
    assert sum(lengths) == len(shown["completion"])
    first, last = (sum(part) for part in (lengths[:2000], lengths[2001:]))
    assert shown["completion"][:first] == line["completion"][:first]
    assert shown["completion"][-last:] == line["completion"][-last:]
    left_out = f"\n[… {len(line['completion']) - first - last:,} characters are left out here …]\n"
    assert shown["completion"][first:-last] == left_out
    for name in ("token_log_ratios", "token_advantages"):
        numbers = [float(f"{one:.3g}") for one in line[name]]
        assert shown[name] == [*numbers[:2000], None, *numbers[-2000:]]
    assert shown["tokens"] == 5000


@pytest.mark.parametrize("lengths", [None, [1, 2], "absent"])
def test_a_long_one_whose_tokens_are_not_known_loses_its_middle_too(lengths: Any, tmp_path: Path) -> None:
    line = long_sample(9000, token_characters=lengths, completion="0123456789" * 2500, tokens=9000)
    if lengths == "absent":
        del line["token_characters"], line["token_log_ratios"]
    shown = shown_of(line, tmp_path)
    assert shown["completion"][:8000] == ("0123456789" * 800) and shown["completion"][-8000:] == "0123456789" * 800
    assert shown["completion"][8000:-8000] == "\n[… 9,000 characters are left out here …]\n"
    assert not shown.get("token_characters") and not shown.get("token_log_ratios")


def test_a_long_one_that_was_not_trained_has_no_ratios(tmp_path: Path) -> None:
    shown = shown_of(long_sample(5000, token_log_ratios=None, token_advantages=None), tmp_path)
    assert len(shown["token_characters"]) == 4001
    assert shown["token_log_ratios"] is None and shown["token_advantages"] is None
