"""Which responses `gspo show` shows, and what it says where they are not there."""

import json
from typing import Any

import pytest
from tests.report.shown import RUN, json_lines, sample, shown, write

from gspo import cli

pytestmark = pytest.mark.usefixtures("plain_terminal")


def test_by_default_it_is_the_last_steps_first_query() -> None:
    write(s1=[sample("a")], s3=[sample("b"), sample("a")], s2=[sample("c")])
    assert "step 3 of 5 · query b\n" in shown()
    assert "step 1 of 5 · query a\n" in shown(1)
    assert "step 3 of 5 · query a\n" in shown(3, "a")


def test_without_a_name_it_is_the_last_group_of_different_rewards_that_a_later_mini_batch_trained() -> None:
    def group(query: str, *rewards: float, **changes: Any) -> list[dict[str, Any]]:
        return [sample(query, reward=reward, **changes) for reward in rewards]

    first = {"mini_batch": 0, "sequence_ratio": 1.0}
    write(s1=group("moved", 0.0, 1.0), s2=group("first", 0.0, 1.0, **first) + group("equal", 1.0, 1.0))
    assert "step 1 of 5 · query moved\n" in shown() and "query first\n" in shown(2)
    write(s3=group("early", 0.0, 1.0, mini_batch=1) + group("late", 0.0, 1.0, mini_batch=3), s4=group("e", 1.0, 1.0))
    assert "step 3 of 5 · query late\n" in shown() and "query e\n" in shown(4)


def test_a_query_alone_is_shown_as_the_last_step_has_it() -> None:
    write(s1=[sample("a")], s2=[sample("b"), sample("a")], s3=[sample("b")])
    assert "step 2 of 5 · query a\n" in shown(query="a")


def test_a_query_that_is_only_part_of_another_or_of_a_text_is_not_it() -> None:
    write(s1=[sample("q:1")], s2=[sample("q:11", completion='"query":"q:1"'), sample("xq:1", prompt="q:1")])
    assert "step 1 of 5" in shown(query="q:1")
    assert "this query in other steps" not in shown(1)


def test_a_column_that_is_called_query_is_not_the_query() -> None:
    other = sample("z", columns={"query": "q:1"})
    write(s1=[sample("q:1")], s2=[other], s3=[sample("a"), {**other, "query": "z"}])
    assert "step 1 of 5" in shown(query="q:1") and "this query in other steps" not in shown(query="q:1")
    assert "this query in other steps: 2\n" in shown(query="z")


def test_the_end_of_an_id_names_the_query_where_one_alone_ends_so(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample("a.jsonl:3"), sample("a.jsonl:13"), sample("b.jsonl:7")], s2=[sample("a.jsonl:7"), sample("7")])
    assert "step 1 of 5 · query a.jsonl:3\n" in shown(query="3")
    assert "step 2 of 5 · query 7\n" in shown(query="7")  # a whole id goes before an end
    assert "step 1 of 5 · query b.jsonl:7\n" in shown(1, "7")
    write(s3=[sample("a.jsonl:5"), sample("b.jsonl:5")])
    assert cli.main(["show", str(RUN), "--query", "5"]) == 2
    assert "several queries end with 5\n  fix: name one of a.jsonl:5, b.jsonl:5\n" in capsys.readouterr().err


@pytest.mark.parametrize("query", ['a"b\\', "größe:1", "with space", "\x1b[2J", "[bold]"])
def test_a_query_of_any_name_is_found_and_named(query: str) -> None:
    write(s1=[sample(query)], s2=[sample("z"), sample(query)], s3=[sample("z")])
    assert json_lines(shown(query=query, as_json=True)) == [{**sample(query), "step": 2}]
    said = shown(2)
    assert f"1 more queries in this step: {query}\n".replace("\x1b", "␛") in said
    assert "this query in other steps: 1\n" in shown(query=query) and "\x1b" not in said


def test_the_footer_says_how_to_see_the_steps_other_queries_and_the_querys_other_steps() -> None:
    write(s1=[sample("a")], s2=[sample("a")], s3=[sample(query) for query in "abcdefgh"])
    said = shown()
    assert "7 more queries in this step: b, c, d, e, f and 2 more\n  gspo show runs/a --step 3 --query b\n" in said
    assert "this query in other steps: 2, 1\n  gspo show runs/a --step 2 --query a\n" in said


def test_of_very_many_steps_the_last_ones_are_named() -> None:
    steps_of: dict[str, Any] = {f"s{step}": [sample()] for step in range(1, 23)}
    write(**steps_of)
    assert "this query in other steps: 21, 20, 19, 18, 17, 16, 15, 14 and 13 more\n" in shown()


def test_responses_of_a_group_need_not_be_side_by_side() -> None:
    write(s1=[sample("a"), sample("b"), sample("a", reward=0.25)])
    assert "rewards 1, 0.25: mean 0.625" in shown(1, "a")


def test_a_step_that_is_being_written_is_shown_as_far_as_it_goes() -> None:
    write(s1=[sample("old")], s2=[sample("a"), sample("a", reward=0.0)])
    file = RUN / "rollouts" / "step_000002.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    said = shown()
    assert "step 2 of 5" in said and "1/1  reward 1" in said and "not written to its end" in said
    assert "not written to its end" not in shown(1)
    file.write_bytes(file.read_bytes()[:20])  # nothing is whole yet: the step before
    assert "step 1 of 5" in shown() and "step 1 of 5" in shown(query="old")
    write(s2=[sample("old")])
    file.write_bytes(file.read_bytes()[:-1])
    assert "step 1 of 5" in shown(query="old") and "this query in other steps" not in shown(query="old")


def test_a_file_that_a_resumed_run_removes_meanwhile_is_as_if_it_had_not_been() -> None:
    write(s1=[sample()], s2=[sample()])
    (RUN / "rollouts" / "step_000003.jsonl").symlink_to("gone")  # listed, and not there when it is read
    assert "step 2 of 5" in shown() and "step 2 of 5" in shown(query="q:1")
    assert "this query in other steps: 1\n" in shown()


REFUSALS = [
    (["--step", "9"], ["step 9 has no rollouts", "such as 4\n"]),
    (["--step", "-1"], ["step -1 has no rollouts", "such as 1\n"]),
    (["--query", "chain:77"], ["no step has the query chain:77", "name one of b\n"]),
    (["--step", "1", "--query", "b"], ["step 1 has no query b", "name one of a\n"]),
    (["--step", "2", "--query", "cain:3"], ["step 2 has no query cain:3", "fix: did you mean chain:3?\n"]),
    (["--step", "2", "--query", "x"], ["fix: name one of b, chain:0, chain:1, chain:2, chain:3 and 4 more\n"]),
    (["--query", "x\x1b[2J"], ["no step has the query x␛[2J"]),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSALS, ids=[" ".join(ids) for ids, _ in REFUSALS])
def test_what_is_not_there_is_refused_with_what_is(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    others = [sample(f"chain:{number}") for number in range(8)]
    write(s1=[sample("a")], s2=[sample("b"), *others], s4=[sample("b")])
    for form in ([], ["--json"]):
        assert cli.main(["show", str(RUN), *arguments, *form]) == 2
        said, error = capsys.readouterr()
        assert said == "" and error.startswith("error: runs/a/rollouts") and len(error.splitlines()) == 2
        assert [part for part in named if part not in error] == [], error


@pytest.mark.parametrize("arguments", [[], ["--step", "1"], ["--query", "a"]])
def test_rollouts_without_a_whole_line_are_none_yet(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[])
    assert cli.main(["show", str(RUN), *arguments]) == 2
    error = capsys.readouterr().err
    assert "no response is written whole" in error and "fix: wait for the end of the step\n" in error


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample()])
    for path, named in [("runs", "runs/a"), ("runs/b", "there are: runs/a"), ("runs/a/recipe.yaml", "runs/a\n")]:
        assert cli.main(["show", path]) == 2
        assert named in capsys.readouterr().err


def test_rollouts_of_a_run_that_writes_none_are_shown_where_it_has_some() -> None:
    write("report: {rollouts: false}\n", s1=[sample()])  # the batch that a run that has diverged leaves
    assert "step 1 of 5" in shown()


def test_a_run_without_rollouts_says_how_to_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    write("report: {rollouts: false}")
    assert cli.main(["show", str(RUN)]) == 2
    error = capsys.readouterr().err
    assert "no rollouts yet" in error and "report.rollouts=true" in error


def test_lines_with_spaces_between_their_parts_are_found_too() -> None:
    write(s1=[sample("a"), sample("b")], s2=[sample("b")])
    file = RUN / "rollouts" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(json.loads(line)) + "\n" for line in file.read_text().splitlines()))
    assert "step 1 of 5" in shown(query="a") and "this query in other steps: 1\n" in shown(query="b")
