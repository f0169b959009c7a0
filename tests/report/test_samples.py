"""Rollouts read back: group by group, while they are being written, and cut into their tokens."""

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.report.samples import cut_into_tokens, passes, read_groups
from gspo.run.plain_files import read_json_lines


def lines(*samples: dict[str, Any]) -> str:
    return "".join(json.dumps(sample) + "\n" for sample in samples)


def test_the_responses_are_by_query_both_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    path.write_text(lines(*({"query": query, "n": n} for n, query in enumerate(["b", "b", "a", "a", "b"]))))
    groups = read_groups(path)
    assert list(groups) == ["b", "a"]
    assert [[sample["n"] for sample in group] for group in groups.values()] == [[0, 1, 4], [2, 3]]


def test_a_file_that_is_being_written_has_the_lines_that_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    whole = lines({"query": "a"}, {"query": "b"})
    for size, count in [(0, 0), (5, 0), (len(whole) - 1, 1), (len(whole), 2)]:
        path.write_text(whole[:size])
        assert len(read_groups(path)) == count
    path.write_bytes(whole.encode() + b'{"query": "\xc3')  # in the middle of a character
    assert len(read_groups(path)) == 2


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    assert read_groups(tmp_path / "absent.jsonl") == {}
    assert read_json_lines(tmp_path / "absent.jsonl") == ([], 0)


def test_what_is_no_object_is_counted_and_an_empty_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    path.write_bytes(b'{"query": 1}\n\n  \n3\nnull\n"x"\n{\n\xff\xfe\n\x00\x00\x00\x00\n{"query": 2}\nnot counted')
    found, num_unreadable = read_json_lines(path)
    assert [line["query"] for line in found] == [1, 2]
    assert num_unreadable == 6


def test_an_end_of_line_inside_of_a_text_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    text = "one\u2028two\x85three\x0cfour\r\nfive"
    path.write_text(json.dumps({"query": "a", "completion": text}, ensure_ascii=False) + "\n", newline="")
    assert read_groups(path)["a"][0]["completion"] == text


def test_the_texts_of_the_tokens_are_the_completion_in_pieces() -> None:
    assert cut_into_tokens({"completion": "7+4 = 11", "token_characters": [1, 1, 1, 3, 2, 0]}) == [
        *("7", "+", "4", " = ", "11", "")
    ]
    assert cut_into_tokens({"completion": "", "token_characters": [0]}) == [""]


@pytest.mark.parametrize("known", [{}, {"token_characters": None}])
def test_where_the_file_does_not_say_there_are_no_pieces(known: dict[str, Any]) -> None:
    assert cut_into_tokens({"completion": "ab", **known}) is None


@pytest.mark.parametrize("lengths", [[], [1], [1, 2]])
def test_lengths_that_do_not_make_the_completion_are_not_believed(lengths: Any) -> None:
    assert cut_into_tokens({"completion": "ab", "token_characters": lengths}) is None


@pytest.mark.parametrize(
    ("sample", "passed"),
    [
        ({"rewards": {"f": 0.5, "g": 0.0}}, True),
        ({"rewards": {"f": 0.49, "g": 1.0}}, False),
        ({"rewards": {"f": None, "g": 1.0}}, True),  # f does not apply
        ({"rewards": {"f": None, "g": 1.0}, "failure": "reward function f: no"}, False),
        ({"rewards": {"f": None}, "reward": 1.0}, None),
        ({"reward": 1.0}, True),
        ({"reward": None}, None),
        ({}, None),
    ],
)
def test_the_first_function_that_applies_decides_whether_a_response_passes(
    sample: dict[str, Any], passed: bool | None
) -> None:
    assert passes(sample, 0.5) is passed
