"""What the page of evaluations shows of their numbers, questions and responses, and which responses it has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.report.page.lines import data_in, sets_in
from tests.report.page.made_evaluations import response, responses, suite, write_evaluation

from gspo.errors import UserError
from gspo.report import evaluation
from gspo.report.evaluation import write_evaluation_page

FIRST = responses({"a": [True, False], "b": [False, False], "c": [None, None], "d": [True, True]})
SECOND = responses({"a": [True, True], "b": [False, False], "d": [True, False, True]})


def page_of(path: Path, *suites: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The page's data of the suite `sums`, of a model for each, and the sets of responses in it."""
    paths = [write_evaluation(path / str(number), sums=one) for number, one in enumerate(suites)]
    page = write_evaluation_page(paths, path / "page.html").read_text(encoding="utf-8")
    (sums,) = data_in(page)["suites"]
    return sums, sets_in(page)


def test_each_model_has_a_set_of_what_each_question_got(tmp_path: Path) -> None:
    numbers: dict[str, Any] = {"pass_at_1": 0.25, "pass_at_k": {"1": 0.25, "2": 0.5, "4": None}}
    sums, (first, second) = page_of(tmp_path, suite(FIRST, **numbers), suite(SECOND))
    assert (first["name"], second["name"]) == (f"small ({tmp_path / '0'})", f"small ({tmp_path / '1'})")
    assert first["kind"] == second["kind"] == "sums" and first["prompts"]["b"] == "You are asked: what is b?"
    assert sums["numbers"][0].items() > numbers.items()
    groups = {query: row for query, *row in first["steps"][0]["groups"]}
    assert groups == {"a": [2, 2, 1, 0.5, 1], "b": [2, 2, 0, 0, 0], "c": [2, 0, 0, None, 0], "d": [2, 2, 2, 1, 0]}
    assert [row[:4] for row in second["steps"][0]["groups"]] == [["a", 2, 2, 2], ["b", 2, 2, 0], ["d", 3, 3, 2]]


def test_a_suite_that_a_model_was_not_asked_is_empty_for_it(tmp_path: Path) -> None:
    paths = [write_evaluation(tmp_path / "a", sums=suite(FIRST)), write_evaluation(tmp_path / "b", name="large")]
    page = write_evaluation_page(paths, tmp_path / "page.html").read_text(encoding="utf-8")
    (sums,), (_, empty) = data_in(page)["suites"], sets_in(page)
    assert sums["numbers"][1] is sums["settings"][1] is sums["differences"][1] is None
    assert empty["steps"] == [{"step": 0, "carried": 0, "groups": []}]


def test_models_are_compared_with_the_first_or_it_is_said_why_not(tmp_path: Path) -> None:
    other = suite(SECOND, settings={"temperature": 0.6})
    sums, sets = page_of(tmp_path, suite(FIRST), suite(SECOND), other)
    _, same, differing = sums["differences"]
    assert (same["won"], same["lost"], same["num_questions"]) == (["a"], ["d"], 3)
    assert same["mean"] == pytest.approx((0.5 - 1 / 3) / 3, abs=1e-5)
    assert differing == {"why": "the settings differ: temperature 1.0 and 0.6"}
    assert [one["difference"] for one in sets] == sums["differences"]


def test_where_all_fits_all_is_there_whole_and_in_place(tmp_path: Path) -> None:
    long = response("e", True, completion="x" * 20_000, extra={"log": "y"})
    _, (page,) = page_of(tmp_path, suite([*FIRST, long]))
    assert page["coverage"] == "All responses." and page["steps"][0]["carried"] == 5
    groups = {group["query"]: group for group in page["contents"][0]}
    assert list(groups) == list("abcde") and groups["a"]["columns"] == "answer: 42"
    assert [one["texts"] for one in groups["d"]["samples"]] == [["It is 0."], ["It is 1."]]
    assert [one["passed"] for one in groups["a"]["samples"]] == [True, False]
    assert groups["e"]["samples"][0]["texts"] == ["x" * 20_000]


def test_of_too_much_the_first_responses_to_each_question_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def carried(max_bytes: int) -> tuple[list[int], str]:
        monkeypatch.setattr(evaluation, "MAX_BYTES", max_bytes)
        _, (page,) = page_of(tmp_path, suite(lines))
        return [len(group["samples"]) for group in page["contents"].get(0, ())], page["coverage"]

    texts = {"completion": "x" * 1_000}
    lines = [response(f"q:{place // 8}", True, number=place % 8, **texts) for place in range(80)]
    page = "This page has the first {} response(s) to each of {} questions; evaluation.json has all."
    assert carried(120_000) == ([8] * 10, "All responses.")
    assert carried(60_000) == ([4] * 10, page.format(4, 10))
    assert carried(9_000) == ([1] * 6, page.format(1, 6))
    assert carried(0) == ([], page.format(1, 0))


@pytest.mark.parametrize(
    ("content", "words"), [(None, "No such file"), ("{", "cannot be read"), ('{"format": 2}', "format is 2, not 1")]
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
