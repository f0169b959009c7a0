"""Known layouts need no mapping; anything else names the columns there are."""

import math
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.row import lay_out


def test_gsm8k_answers_are_numbers_and_the_work_is_kept(gsm8k_rows: list[dict[str, Any]]) -> None:
    rows = lay_out(gsm8k_rows, source="gsm8k.jsonl")
    assert [row.columns["answer"] for row in rows] == ["64", "5000", "-2"]
    assert [row.columns["solution"] for row in rows] == [raw["answer"] for raw in gsm8k_rows]
    assert [row.prompt for row in rows] == [raw["question"] for raw in gsm8k_rows]
    assert [row.id for row in rows] == ["gsm8k.jsonl:1", "gsm8k.jsonl:2", "gsm8k.jsonl:3"]


def test_a_gsm8k_row_without_its_number_is_named(gsm8k_rows: list[dict[str, Any]]) -> None:
    gsm8k_rows[2]["answer"] = "It is cold."
    with pytest.raises(UserError, match="data:3"):
        lay_out(gsm8k_rows, source="data")


def test_trl_rows_keep_their_columns_as_they_are() -> None:
    raw = {"prompt": "2+2?", "answer": "work\n#### 4", "level": 3}
    (row,) = lay_out([raw], source="data")
    assert (row.prompt, row.columns) == ("2+2?", {"answer": "work\n#### 4", "level": 3})


def test_verl_rows_give_their_ground_truth_as_answer() -> None:
    messages = [{"role": "user", "content": "2+2?"}]
    raw = {"prompt": messages, "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "4"}}
    (row,) = lay_out([raw], source="data")
    assert row.prompt == messages
    assert row.columns == {"data_source": "x", "reward_model": raw["reward_model"], "answer": "4"}


def test_an_answer_or_solution_of_the_datas_own_stays_beside_what_a_layout_gives() -> None:
    (verl,) = lay_out([{"prompt": "p", "reward_model": {"ground_truth": "4"}, "answer": "own"}], source="data")
    (gsm8k,) = lay_out([{"question": "p", "answer": "work\n#### 4", "solution": "own"}], source="data")
    assert verl.columns["answer"] == gsm8k.columns["solution"] == "own"


@pytest.mark.parametrize("raw", [{"problem": "p", "answer": "7"}, {"ID": 1, "Problem": "p", "Answer": "7"}])
def test_aime_rows(raw: dict[str, Any]) -> None:
    (row,) = lay_out([raw], source="data")
    assert row.prompt == "p"
    assert row.columns["answer"] == "7"


def test_plain_question_and_answer_stay_as_they_are() -> None:
    (row,) = lay_out([{"question": "capital of France?", "answer": "Paris"}], source="data")
    assert row.columns == {"answer": "Paris"}


def test_a_named_column_wins_over_known_ones() -> None:
    (row,) = lay_out([{"prompt": "no", "text": "yes"}], source="data", prompt_column="text")
    assert (row.prompt, row.columns) == ("yes", {"prompt": "no"})


@pytest.mark.parametrize("wanted", [None, "query"])
def test_a_missing_prompt_column_names_those_there(wanted: str | None) -> None:
    with pytest.raises(UserError, match="the columns there are: text, label"):
        lay_out([{"text": "x", "label": 1}], source="data", prompt_column=wanted)


@pytest.mark.parametrize("prompt", [None, 7, [], ["hi"], [{"content": "no role"}], {"role": "user"}])
def test_what_is_no_prompt_is_refused_with_its_row(prompt: Any) -> None:
    with pytest.raises(UserError, match="data, row 2: column 'prompt' holds"):
        lay_out([{"prompt": "fine"}, {"prompt": prompt}], source="data")


def test_a_row_without_a_prompt_is_refused_as_such() -> None:
    with pytest.raises(UserError, match="data, row 2: it has no 'prompt'"):
        lay_out([{"prompt": "fine"}, {"answer": "1"}], source="data")


def test_a_column_that_differs_in_case_replaces_none() -> None:
    (row,) = lay_out([{"Answer": "wrong", "prompt": "p", "Prompt": "q", "answer": "right"}], source="data")
    assert row.prompt == "p"
    assert row.columns == {"Answer": "wrong", "Prompt": "q", "answer": "right"}


@pytest.mark.parametrize("raw", [{"prompt": "p", "Answer": "1", "ANSWER": "2"}, {"Prompt": "p", "PROMPT": "q"}])
def test_columns_that_differ_in_case_alone_are_refused_where_either_could_be_meant(raw: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be told"):
        lay_out([raw], source="data")


@pytest.mark.parametrize(
    "prompt",
    ["half \ud83d", [{"role": "user", "content": "half \ud83d"}], [{"role": "user", "content": "a", "n": math.nan}]],
)
def test_a_prompt_that_no_tokenizer_reads_is_refused_with_its_row_and_column(prompt: Any) -> None:
    with pytest.raises(UserError, match=r"data, row 2: column 'prompt' holds half of a surrogate pair"):
        lay_out([{"prompt": "fine é"}, {"prompt": prompt}], source="data")


def test_a_prompt_nested_without_end_is_refused() -> None:
    deep: Any = "x"
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(UserError, match=r"data, row 1: column 'prompt'"):
        lay_out([{"prompt": deep}], source="data")


def test_functions_get_columns_as_they_can_be_written_and_a_resume_compares_them_as_they_are() -> None:
    raw = {"prompt": "p", "score": math.nan, "entry": {"a": [math.inf, 1.5]}, "te\ud800xt": "a\ud800"}
    (row,) = lay_out([raw], source="data")
    assert row.clean_columns == {"score": None, "entry": {"a": [None, 1.5]}, "te\\ud800xt": "a\\ud800"}
    assert row.columns == {name: value for name, value in raw.items() if name != "prompt"}


def test_columns_nested_without_end_are_refused_with_their_row() -> None:
    deep: Any = 1
    for _ in range(10_000):
        deep = {"a": deep}
    (row,) = lay_out([{"prompt": "p", "deep": deep}], source="data")
    with pytest.raises(UserError, match="data:1: its columns are nested too deeply"):
        _ = row.clean_columns


def test_no_rows_are_refused() -> None:
    with pytest.raises(UserError, match="data: the data has no rows"):
        lay_out([], source="data")


@pytest.mark.parametrize("raw", ["text", 7, None, ["prompt"]])
def test_a_row_that_is_no_mapping_is_refused_with_its_number(raw: Any) -> None:
    with pytest.raises(UserError, match="data:2: a row is not"):
        lay_out([{"prompt": "fine"}, raw], source="data")


def test_every_row_gets_every_column() -> None:
    first, second = lay_out([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}], source="data")
    assert first.columns == {"x": 1, "y": None}
    assert second.columns == {"x": None, "y": 2}
