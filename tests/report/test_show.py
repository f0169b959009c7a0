"""`gspo show`: what is said of responses, in which colours; nothing of theirs is obeyed."""

import io
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.report.shown import RUN, UNTRAINED, coloured, json_lines, sample, shown, write

from gspo import cli
from gspo.report.show import show

GSPO = Path(sys.executable).with_name("gspo")
HOSTILE = "[bold]x[/] [/] [link=http://a]y :smile: \x1b[2J\x1b]0;t\x07\x9b2J\r\b\t\x00\x7f\u202e\u2028\x0c €"

pytestmark = pytest.mark.usefixtures("plain_terminal")


def test_a_group_is_shown_whole_as_plain_text() -> None:
    write(s2=[sample(), sample(reward=0.0, rewards={"verifier": 0.0}, completion="5", **UNTRAINED)])
    assert shown().splitlines() == [
        "mine · step 2 of 5 · query q:1",
        "│ 2 + 2 =",
        "rewards 1, 0: mean 0.5, 1 of 2 pass",
        "log ratio of each token, the largest ±0.004: not shown without colours; --json has the numbers",
        "",
        "1/2  reward 1 (verifier 1, format 0.5)  advantage +0.750  s 1.00125  clipped 50%  mini-batch 2"
        "  4 tokens, stop  policy version 8",
        "│ it is 4",
        "",
        "2/2  reward 0 (verifier 0)  advantage +0.000  s –  clipped –  mini-batch –  4 tokens, stop  policy version 8",
        "not trained: advantage 0",
        "│ 5",
        "",
    ]


def test_the_first_function_that_applies_decides_what_passes_from_the_recipes_threshold_on() -> None:
    parts = [0.5, 0.49, None, 1.0]
    write("evaluation: {pass_threshold: 0.5}\n", s1=[sample(rewards={"f": part, "g": 1.0}) for part in parts])
    assert "3 of 4 pass" in shown()
    write(s1=[sample(rewards={"f": None, "g": 1.0}, failure=f"reward function {name}: no") for name in "fg"])
    assert "1 of 2 pass" in shown()
    write("", s1=[sample(rewards={"f": 0.99}), sample(rewards={})])
    assert "0 of 2 pass" in shown()


def test_a_failure_is_said_and_what_was_not_scored_has_no_part_in_the_mean() -> None:
    write(s1=[sample(), sample(reward=None, rewards={"f": None}, failure="f raised \x1b[1mE", **UNTRAINED)])
    said = shown()
    assert "rewards 1, –: mean 1, 1 of 2 pass" in said
    assert "\nfailed: f raised ␛[1mE\nnot trained: no reward\n" in said
    assert "2/2  reward – (f –)  advantage –  s –" in said
    write(s1=[sample(reward=None, rewards={"f": None}, **UNTRAINED)])
    said = shown()
    assert "rewards –: none scored, 0 of 1 pass" in said
    assert "\nnot trained: no reward\n" in said and "advantage –" in said


@pytest.mark.parametrize(
    ("clipped", "told"), [(0, "no"), (0.0, "no"), (1, "yes"), (1.0, "yes"), (0.25, "25%"), (None, "–")]
)
def test_a_sequence_is_clipped_or_not_or_in_part(clipped: float | None, told: str) -> None:
    write(s1=[sample(clipped=clipped)])
    assert f"  clipped {told}  mini-batch" in shown()


def test_the_columns_are_below_the_prompt_and_no_more_obeyed_than_it() -> None:
    columns = {"answer": "4", "level": 2, "odd": None, "a\x1b[2J": "[bold]\n2/2"}
    write(s1=[sample(columns=columns), sample("b", columns={})])
    lines = shown(1, "q:1").splitlines()
    assert lines[1:4] == ["│ 2 + 2 =", "│ answer: 4; level: 2; odd: None; a␛[2J: [bold]␊", "│ 2/2"]
    assert shown(1, "b").splitlines()[2].startswith("rewards 1")


def test_what_a_function_logged_is_below_the_response_and_no_more_obeyed_than_it() -> None:
    write(s1=[sample(extra={"f/answer": "4\x1b[2J", "f/right": True})])
    assert "\n│ f/answer: 4␛[2J; f/right: True\n" in shown(1, "q:1")


def test_a_ratio_that_was_not_finite_was_trained_all_the_same() -> None:
    write(s1=[sample(sequence_ratio=None, token_log_ratios=[None, 0.5, 0.0, 0.0])])
    assert "not trained" not in shown() and "the largest ±0.5:" in shown()


BLUE, ORANGE = "\x1b[38;2;0;0;0;48;2;86;180;233m", "\x1b[38;2;0;0;0;48;2;230;159;0m"
PALE_ORANGE = "\x1b[38;2;0;0;0;48;2;211;194;154m"


def test_tokens_are_blue_where_less_likely_and_orange_where_more_on_a_scale_that_never_changes() -> None:
    ratios = [[0.0, 0.6, -0.5, 0.0], [0.003, -0.0009, 0.0, 0.0], [1.7e-6, -1.2e-6, 0.0, 0.0]]
    write(s1=[sample(token_log_ratios=own, mini_batch=number) for number, own in enumerate(ratios)])
    said = coloured()
    assert f"│ it{ORANGE} is\x1b[0m{BLUE} 4\x1b[0m\n" in said
    assert f"│ {PALE_ORANGE}it\x1b[0m is 4\n" in said
    assert "│ it is 4\n" in said  # the noise of rounding is plain
    legend = re.sub("\x1b\\[[0-9;]*m", "", said)
    assert "the largest ±0.6: less likely than before  -0.5  -0.1  -0.01  -0.001  +0.001  +0.01  +0.1  +0.5" in legend
    write(s1=[sample(token_log_ratios=ratios[1])])
    assert f"│ {PALE_ORANGE}it\x1b[0m is 4\n" in coloured()  # as beside larger ones


def test_where_every_log_ratio_is_0_nothing_is_coloured() -> None:
    write(s1=[sample(token_log_ratios=[0.0] * 4)])
    assert "48;2" not in coloured() and "no token is coloured: no log ratio reaches 0.001\n" in coloured()
    write(s1=[sample(token_log_ratios=[0.0] * 4, mini_batch=0)])
    assert "in the first mini-batch the policy had not changed yet" in coloured()


def test_equal_responses_are_shown_once_by_the_one_that_changed_most() -> None:
    small = sample(token_log_ratios=[0.0, 0.002, 0.0, 0.0], sequence_ratio=1.1)
    write(s1=[small, sample(completion="5"), sample(sequence_ratio=1.5), sample(mini_batch=0), sample(reward=0.0)])
    said = shown()
    heads = [line.split("  ")[0] for line in said.splitlines() if "/5" in line]
    assert heads == ["1, 3/5 (2 equal responses)", "2/5", "4/5", "5/5"]
    assert "s 1.50000" in said and "s 1.10000" not in said
    assert len(json_lines(shown(as_json=True))) == 5


@pytest.mark.parametrize("odd", ['{"query":"q:1","rew', "\x00\x00", "7"])
def test_a_line_that_is_no_response_is_skipped_and_counted(odd: str) -> None:
    write(s1=[sample()])
    file = RUN / "rollouts" / "step_000001.jsonl"
    file.write_text(f"{file.read_text()}{odd}\n")
    said = shown()
    assert "\n1 line(s) of the step's file could not be read\n" in said and "1, 1 of 1 pass" in said
    assert json_lines(shown(as_json=True)) == [{**sample(), "step": 1}]


def test_a_token_that_ends_a_line_shows_its_colour() -> None:
    write(s1=[sample(completion="a\nb\n", token_characters=[1, 1, 1, 1], token_log_ratios=[0.0, 1.0, 0.0, 0.0])])
    assert f"│ a{ORANGE}␊\x1b[0m\n│ b␊\n│ \n" in coloured()


def test_no_colours_outside_of_a_terminal_or_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    write(s1=[sample()])
    assert "\x1b" not in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "48;2" not in coloured() and "not shown without colours" in coloured()


def test_nothing_that_a_model_or_a_prompt_says_is_obeyed() -> None:
    hostile: dict[str, Any] = {
        "completion": HOSTILE,
        "token_characters": [1] * len(HOSTILE),
        "token_log_ratios": [0.1] * len(HOSTILE),
    }
    ratio: dict[str, Any] = {"token_log_ratios": None, "token_characters": None}
    write(s1=[sample(prompt=HOSTILE), sample(**hostile), sample(**{**hostile, **ratio})])
    visible = "[bold]x[/] [/] [link=http://a]y :smile: ␛[2J␛]0;t␇\\x9b2J␍␈␉␀␡\\u202e\\u2028␌ €"
    lines = shown().splitlines()
    assert lines[1] == f"│ {visible}" and lines.count(f"│ {visible}") == 2
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u202e]", shown())
    rest = re.sub("\x1b\\[[0-9;]*m", "", coloured())
    assert "\x1b" not in rest and "\x9b" not in rest and rest.count(visible) == 2


def test_half_a_character_is_shown_in_its_written_form() -> None:
    write(s1=[sample()])
    file = RUN / "rollouts" / "step_000001.jsonl"
    file.write_text(file.read_text().replace("it is 4", "it \\ud800 4"))
    assert "│ it \\ud800 4\n" in shown()
    assert "it \\ud800 4" in shown(as_json=True)


def test_a_response_cannot_pass_for_a_line_of_the_page() -> None:
    write(s1=[sample(completion="x\n\n2/2  reward 9", token_characters=None)])
    assert "│ x␊\n│ ␊\n│ 2/2  reward 9\n" in shown()


def test_a_long_line_is_not_cut_into_several() -> None:
    write(s1=[sample(completion="word " * 100 + "end", prompt="y" * 300, **UNTRAINED)])
    assert "│ " + "word " * 100 + "end\n" in shown() and "│ " + "y" * 300 + "\n" in shown()


def test_a_terminal_of_few_letters_has_the_others_written_out() -> None:
    write(s1=[sample(completion="€ \x1b")])
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(RUN, step=None, query=None, as_json=False, console=Console(file=file))
    file.seek(0)
    assert "\\u2502 \\u20ac \\u241b" in file.read()


def test_json_is_the_files_lines_and_their_step() -> None:
    samples = [sample(completion=HOSTILE), sample("b"), sample(reward=0.1 + 0.2, **UNTRAINED)]
    write(s3=samples, s4=[sample("b")])
    said = shown(3, "q:1", as_json=True)
    assert json_lines(said) == [{"step": 3, **samples[0]}, {"step": 3, **samples[2]}]
    assert said.isascii() and "\x1b" not in said and len(said.split("\n")) == 3
    assert json_lines(shown(3, as_json=True, force_terminal=True, color_system="truecolor")) == [
        {"step": 3, **samples[0]},
        {"step": 3, **samples[2]},
    ]


def test_the_command_prints_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample("a"), sample("b")])
    assert cli.main(["show", str(RUN), "--step", "1", "--query", "b"]) == 0
    assert capsys.readouterr().out == shown(1, "b")
    assert cli.main(["show", str(RUN), "--json"]) == 0
    assert capsys.readouterr() == (shown(as_json=True), "")


def test_in_a_terminal_what_is_waited_for_is_named_and_elsewhere_nothing_is_among_the_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(s1=[sample()])
    waited: list[str] = []

    @contextmanager
    def waiting(name: str) -> Iterator[None]:
        waited.append(name)
        yield
        assert capsys.readouterr().out == "", "a line of its own would be in the middle of the live one"

    monkeypatch.setattr(cli, "_waiting", waiting)
    assert cli.main(["show", str(RUN)]) == 0 and waited == []
    capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["show", str(RUN)]) == 0 and waited == ["reading the run's responses"]
    assert "query q:1" in capsys.readouterr().out


def test_the_libraries_of_training_are_not_loaded() -> None:
    write(s1=[sample()])
    heavy = ("torch", "transformers", "datasets", "numpy", "pydantic", "safetensors", "reasoning_gym")
    code = f"""
import sys
from gspo.cli import main
assert main(["show", "runs/a"]) == main(["show", "runs/a", "--json"]) == 0
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[]"


def test_by_default_it_is_the_last_steps_query_that_shows_most() -> None:
    def group(query: str, *rewards: float, **changes: Any) -> list[dict[str, Any]]:
        return [sample(query, reward=reward, **changes) for reward in rewards]

    early, late = group("early", 0.0, 1.0, mini_batch=1), group("late", 0.0, 1.0, mini_batch=3)
    write(s1=early + late, s3=[sample("b"), sample("a")], s2=group("equal", 1.0, 1.0) + early)
    assert "step 3 of 5 · query b\n" in shown()
    assert "step 2 of 5 · query early\n" in shown(2) and "step 1 of 5 · query late\n" in shown(1)
    assert "step 3 of 5 · query a\n" in shown(3, "a") and "step 2 of 5 · query equal\n" in shown(query="equal")


def test_a_query_that_is_only_part_of_another_or_of_a_text_is_not_it() -> None:
    other = sample("z", columns={"query": "q:1"}, prompt="q:1", completion='"query":"q:1"')
    write(s1=[sample("q:1")], s2=[sample("q:11"), sample("xq:1"), other])
    assert "step 1 of 5" in shown(query="q:1") and "this query in other steps" not in shown(1)


def test_the_end_of_an_id_names_the_query_where_one_alone_ends_so(capsys: pytest.CaptureFixture[str]) -> None:
    write(s1=[sample("a.jsonl:3"), sample("a.jsonl:13"), sample("b.jsonl:7")], s2=[sample("a.jsonl:7"), sample("7")])
    assert "step 1 of 5 · query a.jsonl:3\n" in shown(query="3")
    assert "step 2 of 5 · query 7\n" in shown(query="7")  # a whole id goes before an end
    write(s3=[sample("a.jsonl:5"), sample("b.jsonl:5")])
    assert cli.main(["show", str(RUN), "--query", "5"]) == 2
    assert "several queries end with 5\n  fix: name one of a.jsonl:5, b.jsonl:5\n" in capsys.readouterr().err


@pytest.mark.parametrize("query", ['a"b\\', "größe:1", "with space", "\x1b[2J", "[bold]"])
def test_a_query_of_any_name_is_found_and_named(query: str) -> None:
    write(s1=[sample(query)], s2=[sample("z"), sample(query)], s3=[sample("z")])
    assert json_lines(shown(query=query, as_json=True)) == [{**sample(query), "step": 2}]
    said = shown(2)
    assert f"other queries in this step (1): {query}\n".replace("\x1b", "␛") in said
    assert "this query in other steps: 1\n" in shown(query=query) and "\x1b" not in said


def test_the_footer_says_how_to_see_the_steps_other_queries_and_the_querys_other_steps() -> None:
    steps: dict[str, Any] = {f"s{step}": [sample("a")] for step in range(1, 12)}
    write(**steps, s12=[sample("a")] * 3 + [sample(query) for query in "bcdefgh"])
    said = shown(query="a")
    assert "other queries in this step (7): b, c, d, e, f and 2 more\n  gspo show runs/a --step 12 --query b\n" in said
    others = "11, 10, 9, 8, 7, 6, 5, 4 and 3 more\n  gspo show runs/a --step 11 --query a\n"
    assert f"this query in other steps: {others}" in said


def test_a_step_that_is_being_written_is_shown_as_far_as_it_goes() -> None:
    write(s1=[sample("old")], s2=[sample("a"), sample("a", reward=0.0)])
    file = RUN / "rollouts" / "step_000002.jsonl"
    file.write_bytes(file.read_bytes()[:-5])
    assert "step 2 of 5" in shown() and "1/1  reward 1" in shown()
    file.write_bytes(file.read_bytes()[:20])  # nothing is whole yet: the step before
    assert "step 1 of 5" in shown() and "step 1 of 5" in shown(query="old")


REFUSALS = [
    (["--step", "9"], ["step 9 has no rollouts", "such as 4\n"]),
    (["--query", "chain:77"], ["no step has the query chain:77", "name one of b\n"]),
    (["--step", "1", "--query", "b"], ["step 1 has no query b", "name one of a\n"]),
    (["--step", "2", "--query", "cain:3"], ["step 2 has no query cain:3", "fix: did you mean chain:3?\n"]),
    (["--query", "x\x1b[2J"], ["no step has the query x␛[2J"]),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSALS, ids=[" ".join(ids) for ids, _ in REFUSALS])
def test_what_is_not_there_is_refused_with_what_is(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    others = [sample(f"chain:{number}") for number in range(8)]
    write(s1=[sample("a")], s2=[sample("b"), *others], s4=[sample("b")])
    assert cli.main(["show", str(RUN), *arguments]) == 2
    said, error = capsys.readouterr()
    assert said == "" and error.startswith("error: runs/a/rollouts") and len(error.splitlines()) == 2
    assert [part for part in named if part not in error] == [], error


def test_a_run_without_rollouts_says_how_to_have_some(capsys: pytest.CaptureFixture[str]) -> None:
    write("report: {rollouts: false}")
    assert cli.main(["show", str(RUN)]) == 2
    error = capsys.readouterr().err
    assert "no rollouts yet" in error and "report.rollouts=true" in error
    write(s1=[])
    assert cli.main(["show", str(RUN)]) == 2 and "no rollouts yet" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_it_without_a_traceback() -> None:
    write(s1=[sample(prompt="x" * 5000) for _ in range(100)])
    process = subprocess.Popen([GSPO, "show", RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 128 + signal.SIGPIPE


def test_a_response_of_several_turns_is_told_turn_by_turn() -> None:
    turns = [["user", "it", 1], ["assistant", " is", 1, 0.25], ["tool", " 4", 1], ["assistant", "", 1]]
    write(s1=[sample(turns=turns, token_log_ratios=[None, 0.5, None, -0.25], token_advantages=[None, 2.0, None, -1.0])])
    said = shown()
    assert said[said.index("user · ") :].splitlines() == [
        "user · 1 token",
        "│ it",
        "policy · 1 token · reward 0.25 · advantage +2.000 · mean log ratio +0.5",
        "│  is",
        "tool · 1 token",
        "│  4",
        "policy · 1 token · advantage -1.000 · mean log ratio -0.25",
        "│ ",
        "",
    ]


@pytest.mark.parametrize("starts", [[2], [0, 2]])
@pytest.mark.parametrize("token_characters", [None, [2, 3, 2, 0]])
def test_contexts_of_a_response_are_counted(starts: list[int], token_characters: list[int] | None) -> None:
    turns = [["user", "it", 1], ["assistant", " is", 1], ["user", " 4", 1], ["assistant", "", 1]]
    write(s1=[sample(turns=turns, starts=starts, token_characters=token_characters)])
    titles = [line for line in shown().splitlines() if " token" in line and not line.startswith(("│", " "))]
    titles = [" · ".join(title.split(" · ")[:2]) for title in titles if title.split(" · ")[0] != "blue"]
    assert [title for title in titles if "context" in title] == ["context 1 of 2 · user", "context 2 of 2 · user"]


def test_turns_need_neither_tokens_nor_training() -> None:
    write(s1=[sample(turns=[["assistant", "it is 4", 4]], token_characters=None)])
    assert "\npolicy · 4 tokens\n│ it is 4\n" in shown()
    untrained = sample(turns=[["assistant", "it", 1], ["user", "is", 1], ["assistant", " 4", 2]], **UNTRAINED)
    write(s1=[untrained])
    assert [line for line in shown().splitlines() if " · " in line][1:] == [
        "policy · 1 token",
        "user · 1 token",
        "policy · 2 tokens",
    ]
