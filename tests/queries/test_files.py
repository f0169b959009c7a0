"""Every kind of file gives the same rows, and a file that cannot be read says where and why."""

import csv
import errno
import json
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.row import read_rows
from gspo.recipe.sections import names_file

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": 'a "b", c', "answer": "ü"}, {"prompt": "x\ny", "answer": ""}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_rows_written(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"data{suffix}", ROWS)
    assert read_rows(path) == ROWS
    assert read_rows(path, limit=2) == ROWS[:2]


@pytest.mark.parametrize("text", ["{}\n{}\n", "\n{}\r\n\r\n{}", "\ufeff{} \n{}"])
def test_json_lines_in_a_json_file_are_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(text.format(*map(json.dumps, ROWS)).encode())
    assert read_rows(str(path)) == ROWS[:2]
    path.write_text(json.dumps(ROWS[0]) + "\n{'prompt': 1}\n")
    with pytest.raises(UserError, match=r"data\.json, line 2: not usable JSON"):
        read_rows(str(path))
    for rows in (json.dumps(ROWS, indent=1), "[" + ",\n".join(map(json.dumps, ROWS)) + "\n]"):
        path.write_text(rows)
        assert read_rows(str(path)) == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_nested_values_survive(suffix: str, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "7"}}]
    assert read_rows(write(tmp_path / f"data{suffix}", rows)) == rows


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": \n', "line 2"),
        ("a.jsonl", b'{"prompt": "x"}\n\n[1]\n', "line 3"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "\xff"}\n', "line 2"),
        ("a.json", b'{"prompt": "x"}', "list of objects"),
        ("a.json", b'{"data": [\n{"prompt": "x"}\n]}', "list of objects"),
        ("a.json", b'[{"prompt": "x"},\n {"prompt" "y"}]', "line 2"),
        ("a.csv", b"prompt,answer\n1,2\n1,2,3\n", "line 3"),
        ("a.parquet", b"not parquet", "not a readable Parquet"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "x", "a": 1, "a": 2}\n', "line 2: .*'a' is given twice"),
        ("a.jsonl", b'{"prompt": "x", "entry": {"b": 1, "b": 2}}\n', "line 1: .*'b' is given twice"),
        ("a.json", b'[{"prompt": "x", "prompt": "y"}]', "'prompt' is given twice"),
        ("a.csv", b"prompt,answer,answer\n1,2,3\n", "line 2: .*'answer' is given twice"),
        ("a.jsonl", b'{"prompt": "x", "a": ' + b"9" * 5000 + b"}\n", "line 1: not usable JSON"),
        ("a.jsonl", b'{"prompt": "x", "a": ' + b"[" * 100_000 + b"}\n", "line 1: not usable JSON: .*recursion"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_unreadable_data_says_where_and_why(name: str, content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_rows(str(tmp_path / name))
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", b"\n"), ("a.json", b"[]"), ("a.csv", b"prompt,answer\n"), ("a.csv", b"")]
)
def test_a_file_without_rows_is_read_and_gives_none(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert read_rows(str(tmp_path / name)) == []


@pytest.mark.parametrize("content", [b'prompt,answer\n1,"2\n', b'prompt,answer\n1,"2"b\n', b"prompt,answer\n1\n"])
def test_a_csv_file_with_a_quote_or_a_value_astray_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.csv, line 2?.*: not usable CSV"):
        read_rows(str(tmp_path / "a.csv"))


def test_a_line_that_is_no_json_has_one_number_and_text_of_another_encoding_says_how_to_save_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n')
    with pytest.raises(UserError) as error:
        read_rows(str(tmp_path / "a.jsonl"))
    assert (
        "line 1" not in str(error.value) and "line 3" not in str(error.value) and "a.jsonl, line 2" in str(error.value)
    )
    for name, content in {"b.jsonl": b'{"prompt": "\xe9"}', "b.csv": b"prompt\nl\xe9s\n"}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=name) as error:
            read_rows(str(tmp_path / name))
        assert error.value.fix == "save the file as UTF-8" and "line 0" not in str(error.value)


def test_a_row_is_what_its_line_says(tmp_path: Path) -> None:
    """No key of another row, no date out of text, no number out of digits in a CSV file."""
    rows: list[dict[str, Any]] = [
        {"prompt": "2024-01-01T00:00:00", "answer": 5, "entry": {"a": 1}},
        {"prompt": "NA", "answer": "007", "entry": {"b": 2.0}},
    ]
    assert read_rows(write(tmp_path / "a.jsonl", rows)) == rows
    (tmp_path / "a.csv").write_text("prompt,answer\n2024-01-01,007\nNA,\n")
    assert read_rows(str(tmp_path / "a.csv")) == [
        {"prompt": "2024-01-01", "answer": "007"},
        {"prompt": "NA", "answer": ""},
    ]


def test_a_parquet_file_with_a_column_twice_or_text_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = str(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table([["x"], ["2"], ["3"]], names=["prompt", "answer", "answer"]), path)
    with pytest.raises(UserError, match=r"a\.parquet: .*'answer' is given twice"):
        read_rows(path)
    bad = pyarrow.StringArray.from_buffers(1, pyarrow.py_buffer(b"\0\0\0\0\x01\0\0\0"), pyarrow.py_buffer(b"\xff"))
    parquet.write_table(pyarrow.table({"prompt": bad}), path)
    with pytest.raises(UserError, match=r"a\.parquet: not a readable Parquet file"):
        read_rows(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_that_may_not_be_read_says_so(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / f"a{suffix}", ROWS)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr("pyarrow.parquet.ParquetFile", forbidden)
    with pytest.raises(UserError, match=rf"a\{suffix}: .*Permission denied"):
        read_rows(path)


def test_a_name_that_no_file_can_have_is_no_file() -> None:
    with pytest.raises(UserError, match="cannot be read: File name too long"):
        read_rows(f"{'c' * 300}.jsonl")


def test_a_missing_file_lists_those_near(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(UserError, match=r"no such file(.|\n)*train\.jsonl"):
        read_rows(str(tmp_path / "trian.jsonl"))


def test_a_file_of_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.xml").write_text("<a/>")
    with pytest.raises(UserError, match=r"\.jsonl, \.json, \.csv, \.parquet"):
        read_rows(str(tmp_path / "data.xml"))


def test_hub_ids_are_told_from_files() -> None:
    assert not names_file("openai/gsm8k")
    assert all(map(names_file, ["data.jsonl", "folder/data.parquet", "./data", "/data/rows", "a/b/c"]))


def test_a_hub_set_that_does_not_load_is_one_message() -> None:
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(UserError, match="as a hub data set it does not load"):
            read_rows("no-such-owner/no-such-set")


def test_the_place_in_broken_json_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a\x01"}\n')
    with pytest.raises(UserError, match="Invalid control character at: column 14"):
        read_rows(str(path))
