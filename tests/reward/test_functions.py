"""Reward functions are found by name, by module, by file, or handed in, and checked before training."""

import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.recipe.sections import RewardConfig
from gspo.reward.builtin import exact_match
from gspo.reward.functions import Reward, close_functions, load_functions, own_answer_notes
from gspo.reward.reply import is_async
from gspo.types import Query


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a reward file that imports its neighbour."""
    (tmp_path / "neighbour_of_mine.py").write_text("BONUS = 2.0\n")
    (tmp_path / "my_rewards.py").write_text(
        textwrap.dedent("""
            from neighbour_of_mine import BONUS

            def short(completions, limit=10, **columns):
                return [BONUS * (len(text) < limit) for text in completions]

            def strict(completions, limit):
                return [0.0 for text in completions]

            NUMBER = 3
        """)
    )
    (tmp_path / "broken.py").write_text("x = 1\nimport no_such_module_at_all\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    return tmp_path


@pytest.mark.parametrize("function", ["my_rewards.py:short", "./my_rewards.py:short", "my_rewards:short"])
def test_functions_of_a_file_or_module_in_the_working_directory(function: str, home: Path) -> None:
    (loaded,) = load_functions(
        [RewardConfig(function=function, weight=0.5, time_limit_seconds=3, options={"limit": 3})]
    )
    assert loaded.call(completions=["ab", "abc"], limit=3) == [2.0, 0.0]
    assert (loaded.name, loaded.weight, loaded.time_limit_seconds) == ("short", 0.5, 3)
    assert loaded.options == {"limit": 3}


def test_an_edited_file_is_read_anew(home: Path) -> None:
    path = home / "edited.py"
    path.write_text("def f(completions):\n    return [1.0]\n")
    assert load_functions([RewardConfig(function="edited.py:f")])[0].call(["x"]) == [1.0]
    path.write_text("def f(completions):\n    return [22.0]\n")
    os.utime(path, ns=(1, 1))
    assert load_functions([RewardConfig(function="edited.py:f")])[0].call(["x"]) == [22.0]


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        ("exact_mach", {}, "did you mean exact_match"),
        ("zzz", {}, "exact_match, format, math, reasoning_gym"),
        ("my_rewards.py:sort", {}, r"did you mean short\?$"),
        ("my_rewards.py:NUMBER", {}, "no function 'NUMBER'"),
        ("neighbour_of_mine.py:f", {}, "no function 'f'$"),
        ("my_reward.py:short", {}, r"no such file my_reward\.py(.|\n)*my_rewards\.py"),
        ("no_module_of_this_name:f", {}, "No module named 'no_module_of_this_name'"),
        ("broken.py:f", {}, r"broken\.py, line 2 raises ModuleNotFoundError"),
        ("broken:f", {}, "importing broken raises ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("my_rewards.py:strict", {"limits": 3}, "no option 'limits'(.|\n)*it takes: limit"),
        ("my_rewards.py:short", {"completions": 3}, "no option 'completions'"),
        ("format", {"pattern": "x", "patern": "y"}, "no option 'patern'(.|\n)*pattern, full_match"),
        ("reasoning_gym", {"task": "chain_sum"}, "no option 'task'(.|\n)*it takes: seconds_per_answer"),
    ],
)
def test_what_cannot_be_found_or_used_says_what_is_there(
    function: str, options: dict[str, Any], said: str, home: Path
) -> None:
    with pytest.raises(UserError, match=said):
        load_functions([RewardConfig(function=function, options=options)])


def test_functions_of_keyword_arguments_take_any_option(home: Path) -> None:
    (loaded,) = load_functions([RewardConfig(function="my_rewards.py:short", options={"threshold": 1})])
    assert loaded.options == {"threshold": 1}


def test_equal_names_are_numbered() -> None:
    rewards = [RewardConfig(function="format", options={"pattern": pattern}) for pattern in "abc"]
    assert [function.name for function in load_functions(rewards)] == ["format", "format_2", "format_3"]


def one(completions: Sequence[str]) -> list[float]:
    return [1.0 for _ in completions]


@pytest.mark.parametrize(("given", "names"), [(one, ["one"]), ([one, lambda **columns: []], ["one", "reward"])])
def test_functions_handed_in_stand_in_for_the_recipes(given: Any, names: list[str]) -> None:
    assert [function.name for function in load_functions([RewardConfig(function="math")], given)] == names


def test_a_function_from_python_comes_with_what_a_recipe_would_say() -> None:
    given: list[Any] = [one, Reward(one, weight=-0.1, time_limit_seconds=5, per="segment"), Reward(exact_match)]
    plain, own, built_in = load_functions((), given, segment_separator="\n")
    assert (plain.weight, plain.time_limit_seconds, plain.per, plain.settings) == (1.0, 60.0, "response", "")
    assert (own.name, own.weight, own.time_limit_seconds, own.per) == ("one_2", -0.1, 5, "segment")
    assert own.segment_separator == "\n" and "weight -0.1" in own.settings and "per segment" in own.settings
    assert built_in.only_options == ("answer_column", "thinking")


def test_a_function_from_python_with_a_built_ins_name_is_no_built_in() -> None:
    def format(completions: Sequence[str], word: str) -> list[float]:
        return [float(word in text) for text in completions]

    (own,) = load_functions((), Reward(format, options={"word": "a"}))
    assert own.name == "format" and own.only_options == () and own.call(["a"], **own.options) == [1.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"weight": float("nan")}, r"gspo.Reward\(one\): weight: should be"),
        ({"weight": 1e7}, "weight"),
        ({"time_limit_seconds": 0}, "time_limit_seconds"),
        ({"per": "word"}, "per"),
        ({"options": {"limit": 3}}, "no option 'limit'"),
        ({"options": 3}, "options"),
    ],
)
def test_settings_from_python_have_the_recipes_bounds(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_functions((), Reward(one, **settings))


class Judge:
    async def __call__(self, completions: Sequence[str]) -> list[float]:
        return [1.0 for _ in completions]


def test_objects_with_an_async_call_are_known_as_async() -> None:
    (judge,) = load_functions((), Judge())
    assert is_async(judge.call) and judge.name == "Judge"


@pytest.mark.parametrize("given", [None, []])
def test_no_reward_is_an_error(given: Any) -> None:
    with pytest.raises(UserError, match="no reward"):
        load_functions((), given)


def queries(rows: Sequence[dict[str, Any]], text: str = "q") -> list[Query]:
    return [Query(id=f"data:{i}", prompt="q", text=text, prompt_ids=(1,), columns=row) for i, row in enumerate(rows, 1)]


PROSE = "We look at the number $\\alpha$ and see, after a while, that there is nothing to be done, so that " * 2


@pytest.mark.parametrize(
    ("reward", "columns", "num_less"),
    [
        ({"function": "math"}, {"answer": [r"so \boxed{\frac12}", "#### 18", "1,000", r"\text{Ann}", None, PROSE]}, 1),
        ({"function": "math"}, {"answer": [PROSE, "3", PROSE]}, 2),
        ({"function": "exact_match"}, {"answer": ["so \\boxed{B}", 42.0, ["a", "b"], PROSE]}, 0),
        ({"function": "exact_match"}, {"answer": ["<answer>4", "<think>4", "5"]}, 1),
        (
            {"function": "reasoning_gym"},
            {"task": ["chain_sum", "fraction_simplification"], "entry": [{"answer": "3"}, {"answer": "three"}]},
            1,
        ),
        ({"function": "format", "options": {"pattern": "x"}}, {"answer": ["1", "2"]}, 0),
    ],
)
def test_rows_on_which_no_response_can_get_1_are_counted(
    reward: dict[str, Any], columns: dict[str, list[Any]], num_less: int, fitted_tokenizer: Any
) -> None:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    for text in ("q", "q<think>\n"):  # a prompt that opens thoughts changes nothing
        functions = load_functions([RewardConfig(**reward)])
        notes = own_answer_notes(queries(rows, text), functions, fitted_tokenizer, segment_separator=None)
        close_functions(functions)
        assert len(notes) == (num_less > 0)
        assert all(f"no response can get 1 on {num_less} of " in note for note in notes), notes


def test_an_answer_of_no_row_that_can_get_1_is_an_error_and_of_many_rows_some_are_tried(fitted_tokenizer: Any) -> None:
    functions = load_functions([RewardConfig(function="math", options={"answer_column": "proof"})])
    few = queries([{"proof": PROSE}] * 3)
    with pytest.raises(UserError, match=r"no response can get 1 on 3 of 3 rows, such as data:1(.|\n)*answer_column"):
        own_answer_notes(few, functions, fitted_tokenizer, segment_separator=None)
    many = queries([{"proof": PROSE if number % 2 else "4"} for number in range(999)])
    (note,) = own_answer_notes(many, functions, fitted_tokenizer, segment_separator=None)
    close_functions(functions)
    assert "of 200 rows, evenly drawn from 999, such as data:" in note
