"""Where queries come from, and that nothing held out is trained on."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.row import repetition_notes
from gspo.queries.source import load_rows, query_notes, render_rows
from gspo.recipe.schema import Recipe

RecipeOf = Callable[..., Recipe]


def data(size: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(size)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def prompts(rows: Any) -> set[str]:
    return {row.prompt for row in rows}


def test_held_out_rows_are_a_tenth_fixed_and_disjoint(tmp_path: Path, recipe_of: RecipeOf) -> None:
    path = write(tmp_path / "data.jsonl", [*data(100), *data(100)])  # every prompt twice
    first, second = (load_rows(recipe_of(seed=seed, queries={"path": path})) for seed in (0, 1))
    assert first.held_out == second.held_out
    assert len(first.held_out) == 10 and len(first.train) == 90
    assert not prompts(first.train) & prompts(first.held_out)
    assert prompts(first.train) | prompts(first.held_out) == {row["prompt"] for row in data(100)}


@pytest.mark.parametrize(
    "change", [{}, {"index": 1}, {"extra_info": {"index": "9a9b", "split": "train"}}, {"uuid": "u"}]
)
def test_rows_that_repeat_others_are_one_question(
    tmp_path: Path, change: Any, recipe_of: RecipeOf, tokenizer: Any
) -> None:
    def own(number: int) -> dict[str, Any]:
        return {key: {**value, "index": number} if isinstance(value, dict) else number for key, value in change.items()}

    many = [{**row, **own(100 * copy + n)} for copy in range(32) for n, row in enumerate(data(30))]
    path = write(tmp_path / "many.jsonl", many)
    rows = load_rows(recipe_of(queries={"path": path}, evaluation={"num_queries": 2}))
    assert (len(rows.train), len(rows.held_out)) == (28, 2)
    recipe = recipe_of(queries={"path": path})
    notes = " ".join(
        query_notes(rows, render_rows(rows, tokenizer, recipe=recipe, max_positions=None), recipe, tokenizer)
    )
    assert (
        "868 rows are left out: each repeats one of the 28 training rows" in notes and "one of the 2 held-out" in notes
    )
    asked = load_rows(recipe_of(evaluation={"path": path, "num_queries": 64}), data(100))
    assert len(asked.held_out) == 30 and len(asked.train) == 70
    too_many = recipe_of(rollout={"queries_per_step": 29}, evaluation={"num_queries": 2})
    with pytest.raises(UserError, match="takes 29 different queries and the data has 28"):
        load_rows(too_many, many)


def test_rows_with_one_prompt_that_differ_elsewhere_stay_and_are_counted(recipe_of: RecipeOf) -> None:
    many = [{"prompt": f"{n % 5}?", "answer": n % 3, "source": "a", "seed": n, "bytes": b"x"} for n in range(30)]
    rows = load_rows(recipe_of(evaluation={"num_queries": 0}), many)
    assert len(rows.train) == 30
    assert repetition_notes(rows.train, "rows") == [
        "30 rows have 5 different prompts; those with the same one differ in seed, answer"
    ]
    apart = load_rows(recipe_of(evaluation={"num_queries": 0}), [*data(5), {"prompt": "0+1=", "answer": "7"}])
    assert len(apart.train) == 6 and "differ in answer" in repetition_notes(apart.train, "rows")[0]
    assert repetition_notes(load_rows(recipe_of(), data(30)).train, "rows") == []


def test_arrays_of_rows_are_never_taken_for_equal_and_a_stream_stays_as_it_comes(recipe_of: RecipeOf) -> None:
    import numpy as np

    long = [np.arange(5000), np.arange(5000)]
    long[1][2500] = 0  # which a text of it would hide
    rows = load_rows(recipe_of(evaluation={"num_queries": 0}), [{"prompt": "a", "x": x} for x in long])
    assert len(rows.train) == 2
    stream = load_rows(recipe_of(steps=9, evaluation={"num_queries": 0}), cycle(data(4)))
    assert [row.prompt for row in stream.train] == [f"{n % 4}+1=" for n in range(9)]
    assert "9 rows have 4 different prompts" in repetition_notes(stream.train, "rows")[0]


@pytest.mark.parametrize(("num_queries", "size", "held_out"), [(5, 100, 5), (512, 3, 1), (0, 100, 0)])
def test_how_many_rows_are_held_out(num_queries: int, size: int, held_out: int, recipe_of: RecipeOf) -> None:
    rows = load_rows(recipe_of(evaluation={"num_queries": num_queries}), data(size))
    assert (len(rows.held_out), len(rows.train)) == (held_out, size - held_out)


def test_an_evaluation_file_is_held_out_of_training(tmp_path: Path, recipe_of: RecipeOf) -> None:
    evaluation = {"path": write(tmp_path / "test.jsonl", data(8)), "num_queries": 6}
    rows = load_rows(recipe_of(queries={"path": write(tmp_path / "a.jsonl", data(20))}, evaluation=evaluation))
    assert [row.id for row in rows.held_out] == [f"test.jsonl:{number}" for number in range(1, 7)]
    assert len(rows.train) == 14


def test_of_the_hub_training_and_evaluation_have_their_own_splits(
    recipe_of: RecipeOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {("own/data", "easy", "train"): data(20), ("own/data", "easy", "hard"): data(8)}
    monkeypatch.setattr("datasets.load_dataset", lambda path, name, split: splits[path, name, split])
    queries, evaluation = {"path": "own/data", "config": "easy"}, {"path": "own/data", "split": "hard"}
    rows = load_rows(recipe_of(queries=queries, evaluation=evaluation))
    assert (len(rows.held_out), len(rows.train)) == (8, 12)


def test_the_limit_counts_training_rows(recipe_of: RecipeOf) -> None:
    rows = load_rows(recipe_of(queries={"limit": 7}), data(100))
    assert len(rows.train) == 7
    assert len(rows.held_out) == 10


def test_rows_from_python_stand_in_for_the_recipes(recipe_of: RecipeOf, chain_sum: dict[str, Any]) -> None:
    rows = load_rows(recipe_of(queries={"procedural": chain_sum}), data(20))
    assert prompts(rows.train) | prompts(rows.held_out) == {row["prompt"] for row in data(20)}


def test_queries_have_unique_ids_and_leave_room_for_the_response(recipe_of: RecipeOf, tokenizer: Any) -> None:
    recipe = recipe_of(rollout={"max_new_tokens": 10})
    queries = render_rows(load_rows(recipe, data(100)), tokenizer, recipe=recipe, max_positions=16)
    ids = [query.id for query in (*queries.train, *queries.held_out)]
    assert len(set(ids)) == 100
    with pytest.raises(UserError, match=r"rollout\.max_new_tokens"):
        render_rows(load_rows(recipe, data(100)), tokenizer, recipe=recipe, max_positions=14)


def of_lengths(lengths: list[int]) -> list[dict[str, Any]]:
    return [{"prompt": f"{number:02}".ljust(length, ".")} for number, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("max_positions", "queries", "words"),
    [
        (
            40,
            {},
            r"queries:38: 3 of 40 prompts have too many tokens, and this is the longest: 35; .* positions leave 30",
        ),
        (40, {"max_prompt_tokens": 34}, "3 of 40 .* positions leave 30"),
        (None, {"max_prompt_tokens": 34}, r"queries:38: 1 of 40 prompts .* 35; queries.max_prompt_tokens is 34"),
    ],
)
def test_prompts_that_are_too_long_are_counted_and_the_longest_is_named(
    max_positions: Any, queries: Any, words: str, recipe_of: RecipeOf, tokenizer: Any
) -> None:
    recipe = recipe_of(rollout={"max_new_tokens": 10}, queries=queries)
    rows = load_rows(recipe, of_lengths([10] * 36 + [30, 34, 33, 10]))  # and the start token
    with pytest.raises(UserError, match=words) as caught:
        render_rows(rows, tokenizer, recipe=recipe, max_positions=max_positions)
    assert "queries.overlong: filter" in str(caught.value)


def test_prompts_that_are_too_long_are_left_out_and_no_other_row_is_held_out(
    recipe_of: RecipeOf, tokenizer: Any
) -> None:
    recipe = recipe_of(queries={"overlong": "filter", "max_prompt_tokens": 20})
    lengths = [10 if number % 3 else 30 for number in range(100)]
    rows = load_rows(recipe, of_lengths(lengths))
    queries = render_rows(rows, tokenizer, recipe=recipe, max_positions=None)
    for part, before in ((queries.train, rows.train), (queries.held_out, rows.held_out)):
        assert [query.prompt for query in part] == [row.prompt for row in before if len(str(row.prompt)) < 20]
        assert 0 < len(part) < len(before)
    (note,) = query_notes(rows, queries, recipe, tokenizer)
    num_train, num_held_out = len(rows.train) - len(queries.train), len(rows.held_out) - len(queries.held_out)
    assert num_train + num_held_out == 34
    assert note.startswith(f"{num_train} training and {num_held_out} held-out prompts are too long")
    too_few = recipe_of(rollout={"queries_per_step": 70}, queries={"overlong": "filter", "max_prompt_tokens": 20})
    with pytest.raises(UserError, match="too few"):
        render_rows(rows, tokenizer, recipe=too_few, max_positions=None)


class Stream:
    """Rows without a length or an end, as a `datasets.IterableDataset` has them; counts those that were read."""

    num_read = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in count():
            self.num_read += 1
            yield {"prompt": f"{number}+1="}


@pytest.mark.parametrize(
    ("sections", "held_out", "train"),
    [
        ({"steps": 5}, 4, 15),
        ({"steps": 5, "evaluation": {"num_queries": 0}}, 0, 15),
        ({"steps": 5, "rollout": {"queries_per_step": 3, "dynamic_sampling": True, "max_rounds": 2}}, 4, 30),
        ({"steps": 500, "queries": {"limit": 20}}, 4, 20),
    ],
)
def test_of_a_stream_the_rows_that_a_run_can_use_are_read(
    sections: Any, held_out: int, train: int, recipe_of: RecipeOf
) -> None:
    stream, given = Stream(), {"evaluation": {"num_queries": 4}, "rollout": {"queries_per_step": 3}, **sections}
    rows = load_rows(recipe_of(**given), stream)
    assert [row.prompt for row in (*rows.held_out, *rows.train)] == [f"{n}+1=" for n in range(held_out + train)]
    assert len(rows.held_out) == held_out and rows.num_streamed == held_out + train
    assert stream.num_read == held_out + train + 1  # one more shows that it is a stream


def test_an_iterable_that_ends_is_a_list(recipe_of: RecipeOf) -> None:
    recipe = recipe_of(steps=1000, evaluation={"num_queries": 4})
    assert load_rows(recipe, iter(data(50))) == load_rows(recipe, data(50))


def test_a_stream_that_is_read_further_begins_as_before(recipe_of: RecipeOf) -> None:
    given: dict[str, Any] = {"evaluation": {"num_queries": 4}, "rollout": {"queries_per_step": 3}}
    few, more = (load_rows(recipe_of(steps=steps, **given), Stream()) for steps in (5, 9))
    assert replace(more.of_first(few.num_streamed), num_streamed=few.num_streamed) == few
    # Fewer steps: as many rows as there were; where it has ended meanwhile, it stays the stream that it was.
    again = load_rows(recipe_of(steps=2, **given), islice(Stream(), 19), num_streamed=19)
    assert again == few


@pytest.mark.parametrize(
    ("rows", "said"),
    [(None, "no queries"), ([], "no rows"), ([{"prompt": "same"}] * 9, "1 different queries and the data has 0")],
)
def test_no_queries_no_training(rows: Any, said: str, recipe_of: RecipeOf) -> None:
    with pytest.raises(UserError, match=said):
        load_rows(recipe_of(), rows)


def test_too_few_queries_for_a_step_are_refused(recipe_of: RecipeOf) -> None:
    assert len(load_rows(recipe_of(rollout={"queries_per_step": 9}), data(10)).train) == 9
    with pytest.raises(
        UserError, match=r"takes 10 different queries and the data has 9(.|\n)*rollout\.queries_per_step"
    ):
        load_rows(recipe_of(rollout={"queries_per_step": 10}), data(10))
    with pytest.raises(UserError, match="the data has 5 for training"):
        load_rows(recipe_of(rollout={"queries_per_step": 6}, queries={"limit": 5}), data(10))
