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
    assert "no other step has this query" in shown(1)


def test_a_column_that_is_called_query_is_not_the_query() -> None:
    other = sample("z", columns={"query": "q:1"})
    write(s1=[sample("q:1")], s2=[other], s3=[sample("a"), {**other, "query": "z"}])
    assert "step 1 of 5" in shown(query="q:1") and "no other step has this query" in shown(query="q:1")
    assert "step 2 has this query too\n" in shown(query="z")


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
    assert f"1 more query in this step: {query}\n".replace("\x1b", "␛") in said
    assert "step 1 has this query too\n" in shown(query=query) and "\x1b" not in said


def test_the_footer_says_how_to_see_the_steps_other_queries_and_the_querys_other_steps() -> None:
    write(s1=[sample("a")], s2=[sample("a")], s3=[sample(query) for query in "abcdefgh"])
    said = shown()
    assert "7 more queries in this step: b, c, d, e, f, …\n  gspo show runs/a --step 3 --query b\n" in said
    assert "steps 1, 2 have this query too\n  gspo show runs/a --step 2 --query a\n" in said


def test_of_very_many_steps_the_last_ones_are_named() -> None:
    steps_of: dict[str, Any] = {f"s{step}": [sample()] for step in range(1, 23)}
    write(**steps_of)
    steps = ", ".join(map(str, range(2, 22)))
    assert f"21 steps, the last of them {steps} have this query too\n" in shown()


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
    assert "step 1 of 5" in shown(query="old") and "no other step has this query" in shown(query="old")


def test_a_file_that_a_resumed_run_removes_meanwhile_is_as_if_it_had_not_been() -> None:
    write(s1=[sample()], s2=[sample()])
    (RUN / "rollouts" / "step_000003.jsonl").symlink_to("gone")  # listed, and not there when it is read
    assert "step 2 of 5" in shown() and "step 2 of 5" in shown(query="q:1")
    assert "step 1 has this query too" in shown()


REFUSALS = [
    (["--step", "9"], ["step 9 has no rollouts", "the nearest: 2, 4\n"]),
    (["--step", "3"], ["step 3 has no rollouts", "the nearest: 2, 4\n"]),
    (["--step", "-1"], ["step -1 has no rollouts", "the nearest: 1, 2\n"]),
    (["--query", "chain:77"], ["no step has the query chain:77", "name one of chain:7, "]),
    (["--step", "1", "--query", "b"], ["step 1 has no query b", "steps 2, 4 have it; or name one of a\n"]),
    (["--step", "2", "--query", "cain:3"], ["step 2 has no query cain:3", "fix: name one of chain:3, ", ", …\n"]),
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


def test_at_most_five_queries_are_named_and_the_nearest_first(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample(query) for query in ("aa", "bb", "cc", "dd", "ee", "query:2", "query:123")])
    for arguments in (["--step", "1"], []):
        assert cli.main(["show", str(RUN), "--query", "query:1", *arguments]) == 2
        assert "name one of query:123, query:2, aa, bb, cc, …\n" in capsys.readouterr().err


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize(
    ("how", "fix"), [(None, "wait for the end of the step"), ("failed", "name another step, if there is")]
)
def test_rollouts_without_a_whole_line_are_none_yet(
    how: str | None, fix: str, step: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(s1=[])
    (RUN / "history.jsonl").write_text("" if how is None else json.dumps({"event": "ended", "how": how}) + "\n")
    assert cli.main(["show", str(RUN), *([] if step is None else ["--step", str(step)])]) == 2
    error = capsys.readouterr().err
    assert "no response is written whole" in error and f"fix: {fix}\n" in error


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample()])
    for path, named in [("runs", "runs/a"), ("runs/b", "there are: runs/a"), ("runs/a/recipe.yaml", "runs/a\n")]:
        assert cli.main(["show", path]) == 2
        assert named in capsys.readouterr().err


def test_rollouts_of_a_run_that_writes_none_are_shown_where_it_has_some() -> None:
    write("report: {rollouts: false}\n", s1=[sample()])  # the batch that a run that has diverged leaves
    assert "step 1 of 5" in shown()


@pytest.mark.parametrize(
    ("recipe", "history", "named"),
    [
        ("", "", ["no rollouts yet", "wait for the end of its first step"]),
        ("", '{"event": "ended", "how": "failed"}\n', ["no rollouts yet", "gspo resume runs/a"]),
        ("report: {rollouts: true}", "", ["no rollouts yet"]),
        ("report: {rollouts: false}", "", ["report.rollouts is false", "gspo resume runs/a report.rollouts=true"]),
        ("report: nothing", "", ["no rollouts yet"]),
    ],
)
def test_a_run_without_rollouts_says_why(
    recipe: str, history: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(recipe)
    (RUN / "history.jsonl").write_text(history)
    assert cli.main(["show", str(RUN)]) == 2
    error = capsys.readouterr().err
    assert [part for part in named if part not in error] == [], error


def test_lines_with_spaces_between_their_parts_are_found_too() -> None:
    write(s1=[sample("a"), sample("b")], s2=[sample("b")])
    file = RUN / "rollouts" / "step_000001.jsonl"
    file.write_text("".join(json.dumps(json.loads(line)) + "\n" for line in file.read_text().splitlines()))
    assert "step 1 of 5" in shown(query="a") and "step 1 has this query too" in shown(query="b")
