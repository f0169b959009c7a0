"""The directory of an evaluation: what was added is never lost or counted twice, and other files are left alone."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError, writing
from gspo.evaluation.journal import NO_ROOM, Journal

MODEL = {"path": "runs/a", "name": "a", "sha256": "A"}
SECONDS = [2.0, 0.5]


def about(num_rows: int = 3, **settings: Any) -> dict[str, Any]:
    data = {"path": "rows.jsonl", "num_rows": num_rows, "sha256": "d1"}
    return {"settings": {"samples": 2, "temperature": 1.0, "code": {"judge": "c1"}, **settings}, "data": data}


def lines_of(*queries: str, samples: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """Two responses to each query, of which the first passes."""
    return [
        {"query": query, "sample": number, "prompt": query, "columns": {}, "completion": f"{query}{number}"}
        | {"passed": number == 0, "judge": "judge", "reward": 1.0, "rewards": {"judge": 1.0}, "extra": {}}
        | {"failure": None, "is_masked": False, "tokens": 3, "finish_reason": "stop", **changes}
        for query in queries
        for number in range(samples)
    ]


def added(directory: Path, *queries: str, suite: str = "sums") -> Journal:
    """A journal to which these questions were added, as by a process that is killed then."""
    journal = Journal(directory, MODEL)
    journal.begin(suite, about())
    for query in queries:
        journal.add(suite, lines_of(query), SECONDS)
    return journal


def append(directory: Path, records: Sequence[Any], torn: str = "") -> None:
    with (directory / "unfinished.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records) + torn)


def test_nothing_that_was_added_is_lost_and_the_end_is_that_of_an_unbroken_evaluation(tmp_path: Path) -> None:
    unbroken, directory = tmp_path / "unbroken", tmp_path / "broken"
    unbroken.mkdir()
    directory.mkdir()
    whole = added(unbroken, "q1", "q2", "q3").finish({"engine": "embedded"}, {})
    added(directory, "q1")
    # The process was killed while it wrote: a part of a question, and a part of a line.
    append(directory, [{"suite": "sums", "line": lines_of("q3")[0]}], '{"suite": "su')
    assert added(directory, "q2").judged("sums") == {"q1", "q2"}
    journal = Journal(directory, MODEL)
    assert journal.begin("sums", about()) == {"q1", "q2"}
    journal.add("sums", lines_of("q3"), SECONDS)
    assert journal.finish({"engine": "embedded"}, {}) == whole
    assert json.loads((directory / "evaluation.json").read_text()) == whole
    assert whole["suites"]["sums"]["numbers"]["seconds_sampling"] == 6.0
    assert not (directory / "unfinished.jsonl").exists()


def test_a_question_that_is_judged_again_has_its_responses_side_by_side(tmp_path: Path) -> None:
    added(tmp_path, "q1")
    append(tmp_path, [{"suite": "sums", "line": lines_of("q3")[0]}])
    added(tmp_path, "q2", "q3")
    tree = Journal(tmp_path, MODEL).finish({}, {})
    places = [(line["query"], line["sample"]) for line in tree["suites"]["sums"]["responses"]]
    assert places == [(query, number) for query in ("q1", "q2", "q3") for number in (0, 1)]


def test_responses_that_are_in_both_files_count_once(tmp_path: Path) -> None:
    """The process may be killed between writing the one and removing the other."""
    journal = added(tmp_path, "q1", "q2", "q3")
    content = (tmp_path / "unfinished.jsonl").read_bytes()
    whole = journal.finish({"engine": "embedded"}, {"sums": {"rating": 1500.0}})
    (tmp_path / "unfinished.jsonl").write_bytes(content)
    assert Journal(tmp_path, MODEL).finish({}, {}) == whole
    assert not (tmp_path / "unfinished.jsonl").exists()


def test_a_suite_that_is_not_judged_whole_is_kept_and_not_published(tmp_path: Path) -> None:
    added(tmp_path, "q1")
    tree = added(tmp_path, "q1", "q2", "q3", suite="others").finish({}, {})
    assert tree["suites"].keys() == {"others"} and added(tmp_path).judged("sums") == {"q1"}
    assert added(tmp_path, "q2", "q3").finish({}, {})["suites"] == tree["suites"] | {
        "sums": {**tree["suites"]["others"], **about()}
    }


def test_what_json_cannot_hold_is_written_so_that_it_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, MODEL)
    journal.begin("sums", about(num_rows=1))
    journal.add("sums", lines_of("q1", columns={"answer": math.nan}, completion="half \ud83d of a letter"), SECONDS)
    tree = journal.finish({}, {})
    assert json.loads((tmp_path / "evaluation.json").read_text()) == tree
    assert tree["suites"]["sums"]["responses"][0]["columns"] == {"answer": None}


HEADER = json.dumps({"model": MODEL}) + "\n"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("unfinished.jsonl", '{"x": 1}\n'),
        ("unfinished.jsonl", HEADER + "[]\n"),
        ("unfinished.jsonl", '{"a":' * 100_000 + "1" + "}" * 100_000 + "\n"),
        ("evaluation.json", "[]"),
        ("evaluation.json", '{"format": 2}'),
        ("evaluation.json", '{"format": 1, "model": {"sha256": "A", "path": "m"}}'),
    ],
)
def test_a_file_that_gspo_has_not_written_is_refused_and_left_alone(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match="no evaluation that gspo has written"):
        Journal(tmp_path, MODEL)
    assert (tmp_path / file).read_text() == content
    (tmp_path / file).write_text("")  # a first write that a full disk ended
    assert added(tmp_path, "q1").judged("sums") == {"q1"}


@pytest.mark.parametrize("is_finished", [True, False])
def test_another_model_and_other_settings_data_or_code_are_refused(tmp_path: Path, is_finished: bool) -> None:
    journal = added(tmp_path, "q1", "q2", "q3")
    if is_finished:
        journal.finish({}, {})
    with pytest.raises(UserError, match="another model, runs/a; this is runs/b"):
        Journal(tmp_path, {**MODEL, "path": "runs/b", "sha256": "B"})
    journal = Journal(tmp_path, MODEL)
    for other, words in (
        (about(temperature=0.5), "it has sums with settings.temperature 1.0, and now it is 0.5"),
        (about(num_rows=4), "it has sums with data.num_rows 3, and now it is 4"),
        (about(code={"judge": "c2"}), "other code of the reward function judge"),
    ):
        with pytest.raises(UserError, match=words):
            journal.begin("sums", other)
    moved = about()
    moved["data"]["path"] = "elsewhere/rows.jsonl"
    assert journal.begin("sums", moved) == {"q1", "q2", "q3"}


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as error, writing(tmp_path / "file", NO_ROOM):
        (tmp_path / "file").mkdir()
    assert error.value.where == str(tmp_path / "file") and error.value.fix
