"""What the page of evaluations shows of their numbers, questions and responses, and which responses it carries."""

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import data_in
from tests.report.page.made_evaluations import Line, response, responses, suite, write_evaluation

from gspo.errors import UserError
from gspo.report.evaluation import responses as carrying
from gspo.report.evaluation.data import evaluation_data, read_evaluation
from gspo.report.evaluation.responses import Carried, carried_responses
from gspo.report.evaluation.write import write_evaluation_page
from gspo.report.samples import by_query

FIRST = responses({"a": [True, False], "b": [False, False], "c": [None, None], "d": [True, True]})
SECOND = responses({"a": [True, True], "b": [False, False], "d": [True, False, True]})


def shown(path: Path, *suites: Mapping[str, Any]) -> dict[str, Any]:
    """The page's data of the suite `sums`, of a model for each."""
    read = [read_evaluation(write_evaluation(path / str(number), sums=one)) for number, one in enumerate(suites)]
    (sums,) = evaluation_data(read, [str(number) for number in range(len(read))])["suites"]
    assert isinstance(sums, dict)
    return sums


def carried(*lines: Sequence[Line], changed: Sequence[str] = (), max_size: int = carrying.MAX_SIZE) -> Carried:
    return carried_responses([by_query(own) for own in lines], changed, max_size)


def unpacked(chunk: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(chunk)))


def test_each_question_has_what_each_model_got(tmp_path: Path) -> None:
    lines = [*FIRST, response("e", False, reward=-0.5, tokens=100, finish_reason="length")]
    questions = shown(tmp_path, suite(lines), suite(SECOND))["questions"]
    results = {query: own for query, (_, _, own) in questions.items()}
    assert results["a"] == [[2, 2, 1, 0.5, 10.5, 0], [2, 2, 2, 1, 10.5, 0]]
    assert results["c"] == [[2, 0, 0, None, 10.5, 0], None]
    assert results["e"] == [[1, 1, 0, -0.5, 100, 1], None]
    assert questions["b"][1] == "b?"  # what its prompt has that the others have not


def test_distributions_count_questions_by_rate_and_responses_by_doubling_length(tmp_path: Path) -> None:
    lines = [response("e", None, number=number, tokens=tokens) for number, tokens in enumerate((0, 1, 3, 4, 7))]
    sums = shown(tmp_path, suite([*FIRST, *lines]), suite(SECOND))
    rates = {"0 %": [1, 1], "to 50 %": [1, 0], "to 75 %": [0, 1], "100 %": [1, 1], "not judged": [2, 0]}
    assert dict(sums["rates"]) == rates
    assert dict(sums["lengths"]) == {"0": [1, 0], "1": [1, 0], "2–3": [1, 0], "4–7": [2, 0], "8–15": [8, 7]}


def test_the_curve_of_pass_at_k_begins_with_pass_at_1_and_leaves_out_null(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"pass_at_1": 0.25, "pass_at_k": {"1": 0.25, "2": 0.5, "4": None, "16": 0.9}}
    (own,) = shown(tmp_path, suite(FIRST, **numbers))["numbers"]
    assert own["pass_at_k"] == [[1, 0.25], [2, 0.5], [16, 0.9]]


def test_models_are_compared_with_the_first_or_it_is_said_why_not(tmp_path: Path) -> None:
    other = suite(SECOND, settings={"temperature": 0.6})
    _, same, differing = shown(tmp_path, suite(FIRST), suite(SECOND), other)["differences"]
    assert (same["won"], same["lost"], same["num_questions"]) == (["a"], ["d"], 3)
    assert same["mean"] == pytest.approx((0.5 - 1 / 3) / 3, abs=1e-5)
    assert differing == {"why": "the settings differ: temperature 1.0 and 0.6"}


def test_where_all_fits_all_is_carried_whole_and_in_place() -> None:
    long = response("e", True, completion="x" * 20_000, extra={"log\x1b": "y\x07"})
    found = carried([*FIRST, long], SECOND)
    assert found.coverage == "All responses." and list(found.places) == ["a", "b", "c", "d", "e"]
    contents = {query: unpacked(found.chunks[at[0]])[at[1]] for query, at in found.places.items() if at}
    texts = {
        query: [[one["completion"] for one in own] for own in content["responses"]]
        for query, content in contents.items()
    }
    assert texts["d"] == [["It is 0.", "It is 1."], ["It is 0.", "It is 1.", "It is 2."]]
    assert texts["e"] == [["x" * 20_000], []] and contents["e"]["responses"][0][0]["extra"] == {"log␛": "y␇"}
    assert contents["a"]["prompt"] == "You are asked: what is a?" and contents["a"]["columns"] == "answer: 42"


def test_of_too_much_the_first_responses_to_each_question_come_first_and_questions_that_changed() -> None:
    size = 1_000 + 200 + 2  # of a response with an empty mapping of extras
    names = [f"q:{number}" for number in range(20)]
    lines = [
        response(query, number == 4, number=number, prompt="", completion="x" * 1_000)
        for query in names
        for number in range(6)
    ]
    every = carried(lines, max_size=30 * size)
    numbers = [len(question["responses"][0]) for chunk in every.chunks for question in unpacked(chunk)]
    assert sorted(numbers) == [1] * 10 + [2] * 10
    assert every.coverage.startswith("This page carries 30 of 120 responses, the first ones to each question;")
    few = carried(lines, changed=["q:7", "q:9"], max_size=3 * size)
    shown = {query for query, at in few.places.items() if at}
    assert {"q:7", "q:9"} < shown and len(shown) == 3 and len(few.places) == 20
    assert set(carried(lines, max_size=0).places.values()) == {None}


def test_the_prompt_of_a_question_counts_once() -> None:
    lines = [response("q", True, number=number, prompt="x" * 8_000, completion="y" * 98) for number in range(16)]
    assert carried(lines, max_size=8_000 + 16 * 300).coverage == "All responses."
    assert carried(lines, max_size=8_000 + 16 * 300 - 1).coverage.startswith("This page carries 15 of 16 responses")


def test_questions_are_found_in_the_chunk_that_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying, "_IN_CHUNK", 3)
    found = carried(FIRST, SECOND)
    assert found.places == {"a": (0, 0), "b": (0, 1), "c": (0, 2), "d": (1, 0)}
    assert unpacked(found.chunks[1])[0]["prompt"] == "You are asked: what is d?"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ("[]", "no JSON"),
        ('{"format": 2}', "format 1, but of 2"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(UserError, match=words) as error:
        write_evaluation_page([tmp_path], tmp_path / "page.html")
    assert error.value.where and error.value.fix and not (tmp_path / "page.html").exists()


def test_a_file_that_is_no_page_is_kept_and_a_page_is_written_again(tmp_path: Path) -> None:
    path, page = write_evaluation(tmp_path / "a", sums=suite(FIRST)), tmp_path / "page.html"
    page.write_text("my notes")
    with pytest.raises(UserError, match="no page that gspo has written"):
        write_evaluation_page([path], page)
    assert page.read_text() == "my notes"
    page.unlink()
    assert write_evaluation_page([path], page) == write_evaluation_page([path, path], page) == page
    assert [one["label"] for one in data_in(page.read_text(encoding="utf-8"))["models"]] == [f"small ({path})"] * 2
