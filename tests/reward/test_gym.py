"""reasoning-gym's verifiers: their own right answers score as ever, no text is evaluated, and junk earns nothing."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS, create_dataset

from gspo.reward import gym
from gspo.reward.builtin import EVALUATING_TASKS
from gspo.reward.builtin import reasoning_gym as reward
from gspo.reward.gym import integer_value, parse_expression

TASKS = sorted(set(DATASETS) - {"composite"})  # which needs others
# Smaller than they come, for they take seconds to make.
SMALL: dict[str, dict[str, Any]] = {
    "futoshiki": {"min_board_size": 4, "max_board_size": 4},
    "sokoban": {"min_boxes": 3, "max_boxes": 4},
}
JUNK = (
    "",
    "nan",
    "inf",
    "-inf",
    "banana",
    "None",
    "[]",
    "{}",
    "-1",
    "I do not know.",
    "or something else",
    "[NaN]",
    "[[]]",
)


@cache
def rows(task: str, number: int = 2) -> tuple[Any, list[dict[str, Any]]]:
    data = create_dataset(task, seed=3, size=number, **SMALL.get(task, {}))
    return data, [data[index] for index in range(number)]


def scores(task: str, entry: dict[str, Any], *answers: str) -> list[float]:
    return [gym.score(task, json.dumps(SMALL.get(task, {})), entry, answer) for answer in answers]


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_answers_are_right_and_junk_is_not(task: str) -> None:
    for entry in rows(task)[1]:
        if entry["answer"] is not None:
            assert scores(task, entry, entry["answer"].strip()) == [1.0]
        assert max(scores(task, entry, *(junk for junk in JUNK if junk != entry["answer"]))) < 0.55


# Junk that the verifiers themselves give full marks, on nearly all rows.
@pytest.mark.parametrize(
    ("task", "junk"),
    [
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan + nani"),
        ("game_of_life_halting", "banana"),
        ("game_of_life_halting", "not {answer}"),
        ("coin_flip", "0"),
        ("coin_flip", "0."),
        ("number_sorting", "[{nans}]"),
        ("puzzle24", "1*4*6*1"),
        ("puzzle24", "6*4*1*1 + 0.5"),
        ("simple_integration", "Integral({integrand}, {variable})"),
        ("intermediate_integration", "Integral({integrand}, {variable})"),
        ("gsm_symbolic", "not {answer}"),
        ("gsm_symbolic", "{answer} or 7"),
        ("kakurasu", "{answer}\nor something else"),
        ("sokoban", "{answer} or something else"),
        ("survo", "{answer} or something else"),
        ("quantum_lock", "{answer} or something else"),
        ("knights_knaves", "{answer} or something else"),
        ("knights_knaves", "not {answer}"),
        ("letter_jumble", "{answer} or something else"),
        ("spell_backward", "{answer} or something else"),
        ("time_intervals", "{answer} or something else"),
        ("fraction_simplification", "{answer} or something else"),
    ],
)
def test_what_theirs_pay_for_is_worth_nothing(task: str, junk: str) -> None:
    for entry in rows(task, 2 if task in SMALL else 6)[1]:
        text = junk
        for name, value in {
            "nans": ", ".join(["NaN"] * (entry["answer"].count(",") + 1)),
            **entry,
            **entry["metadata"],
        }.items():
            text = text.replace(f"{{{name}}}", str(value))
        is_right = text == entry["answer"] or (task == "coin_flip" and float(entry["answer"]) <= 1e-4)
        assert is_right or "Integral" in entry["answer"] or scores(task, entry, text)[0] < 0.1


@pytest.mark.parametrize("task", sorted(EVALUATING_TASKS - {"composite"}))
def test_no_text_is_evaluated(task: str, tmp_path: Path) -> None:
    here = tmp_path / "evaluated"
    code = f"__import__('pathlib').Path({str(here)!r}).touch()"
    (entry,) = rows(task, 1)[1]
    hostile = {**entry, "answer": code, "metadata": {**entry["metadata"], "integrand": code, "problem": code}}
    for text in (
        code,
        f"[{code}]",
        f"({code}, 1)[1]",
        f"x*{code}",
        f"'{{}}'.format({code})",
        "entry['answer']",
        "self",
    ):
        assert max(scores(task, entry, text)) < 0.1
        scores(task, hostile, text, str(entry["answer"]))
    assert not here.exists()


def test_lists_that_are_written_as_python_have_the_credit_they_had() -> None:
    expected = {"binary_matrix": 0.1, "spiral_matrix": 0.1, "string_insertion": 0.1, "n_queens": 0.5}
    for task, credit in expected.items():
        (entry,) = rows(task, 1)[1]
        lines = [line.split() for line in entry["answer"].split("\n")]
        numbers = [[int(cell) if cell.isdigit() else cell for cell in line] for line in lines]
        listed = {"spiral_matrix": numbers[0], "string_insertion": list(entry["answer"])}.get(task, numbers)
        assert scores(task, entry, repr(listed)) == [credit]


def test_every_file_of_reasoning_gym_that_evaluates_text_is_known() -> None:
    """A new release may evaluate in another place: then it must be read, and gym.py with it."""
    home = Path(reasoning_gym.__file__).parent
    evaluates = re.compile(
        r"(?<![.\w])(?:eval|exec|compile|sympify|parse_expr|literal_eval)\(|\b(?:sp|sympy)\.(?:S|sympify|parse_expr)\(|pickle|yaml\.load\("
    )
    found = {
        path.relative_to(home).as_posix()
        for path in home.rglob("*.py")
        if evaluates.search(re.sub(r"re\.compile\(|def \w+\(", "", path.read_text(encoding="utf-8")))
    }
    makes_questions_only = {
        "arithmetic/basic_arithmetic.py",
        "arithmetic/gsm_symbolic/generators_00_49.py",
        "arithmetic/gsm_symbolic/generators_50_99.py",
        "code/codeio.py",
        "code/contrib/bfit/Compiler/Compiler.py",
        "logic/propositional_logic.py",  # a reader of its own of that name
    }
    verifies = {
        "algebra/intermediate_integration.py",
        "algebra/polynomial_multiplication.py",
        "algebra/simple_integration.py",
        "algorithmic/binary_matrix.py",
        "algorithmic/number_sorting.py",
        "algorithmic/spiral_matrix.py",
        "algorithmic/string_insertion.py",
        "arithmetic/bitwise_arithmetic.py",
        "games/countdown.py",
        "games/n_queens.py",
        "games/puzzle24.py",
    }
    assert {Path(file).stem for file in verifies} == EVALUATING_TASKS - {"composite"}
    assert found - makes_questions_only == verifies


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "x.real", "x[0]", "[1]", "lambda: 1", "f(x)", "sin(x, evaluate=1)", "9**9**9", "x**1001"),
        *("1 if x else 2", "'text'", "1" + "0" * 120, "x = 1", "", "_x", "-" * 1900 + "1", "1+" * 2000 + "1", "True"),
        *("x @ y", "x; y"),
    ],
)
def test_an_expression_is_mathematics_or_nothing(text: str) -> None:
    with pytest.raises(ValueError):
        parse_expression(text)
    with pytest.raises(ValueError):
        integer_value(text)


@pytest.mark.parametrize("text", ["5 | 2", "6 & 3", "4 ^ 1", "1 << 3", "~1", "x & y"])
def test_operators_on_bits_are_for_integers_alone(text: str) -> None:
    with pytest.raises(ValueError):
        parse_expression(text)
    with pytest.raises(ValueError):
        integer_value(f"x + ({text})")


def test_expressions_are_sympys() -> None:
    from sympy.parsing.sympy_parser import parse_expr

    texts = (
        "3*x**2/4 - 2*x + C",
        "exp(-2*x)*sin(x)/3",
        "sqrt(3)*pi/2",
        "(8 - 2)*4/3",
        "-1.5*x",
        "log(x) + E**x",
        "X**9*-2",
    )
    assert [parse_expression(text) for text in texts] == [parse_expr(text) for text in texts]
    assert integer_value("((0x28ac << 0x2) - (~0xebff & 3) ^ 1)") == ((0x28AC << 0x2) - (~0xEBFF & 3) ^ 1)


@pytest.mark.parametrize("text", ["1 << 10001", "1 >> 10001", "2 ** 1001"])
def test_no_exponent_or_shift_is_beyond_its_limit(text: str) -> None:
    with pytest.raises(ValueError, match="that large"):
        integer_value(text)
    integer_value(text[:-1] + "0")


def test_the_reward_scores_groups_of_several_rows() -> None:
    first, second = rows("chain_sum")[1]
    completions = [first["answer"], f"so <answer>{first['answer']}</answer>", "pelican", second["answer"]]
    found = reward(["q"] * 4, completions, task=["chain_sum"] * 4, entry=[first, first, first, second])
    assert found == [1.0, 1.0, 0.0, 1.0]
