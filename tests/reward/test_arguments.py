"""The names that a reward function may take: in TRL's signature, verl's and AReaL's, and in the guide's list."""

import re
from pathlib import Path
from typing import Any

import pytest
from tests.samples import scores_of

from gspo.errors import UserError
from gspo.reward.arguments import GIVEN
from gspo.reward.reply import TrainerState
from gspo.reward.score import score

STATE = TrainerState(global_step=3, max_steps=9, epoch=0.5)
ROW: dict[str, Any] = {
    "data_source": "sums",
    "extra_info": {"index": 7},
    "reward_model": {"ground_truth": {"is": ["b"]}},
}


def rows(**columns: Any) -> dict[str, list[Any]]:
    return {name: [value] for name, value in columns.items()}


def test_trl_gets_the_state_of_the_run_and_functions_that_log(groups: Any, named: Any, functions: Any) -> None:
    source = """
        def f(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, answer, **columns):
            log_metric("share", trainer_state.global_step / trainer_state.max_steps)
            log_extra("seen", completions)
            assert not {"trainer_state", "log_metric"} & columns.keys() and columns["other"] == [1, 1]
            return [trainer_state.epoch] * len(prompts)
    """
    seen: dict[str, Any] = {}

    def g(**columns: Any) -> list[float]:
        seen.update(columns)
        return [0.0] * len(columns["completions"])

    scored = score(groups(["a", "b"], answer=["a"], other=[1]), [named(source), *functions(g)], STATE)
    assert [one.reward for one in scores_of(scored)] == [0.5, 0.5] and scored.logged == {"f/share": (3 / 9, 1)}
    assert [one.extra for one in scores_of(scored)] == [{"f/seen": "a"}, {"f/seen": "b"}]
    assert (
        set(seen) == {*GIVEN["TRL"], "answer", "other"} - {"segments", "environment_rewards"}
        and seen["trainer_state"] is STATE
    )


@pytest.mark.parametrize("place", ["process", "thread", "process, async", "thread, async"])
def test_verls_function_is_called_for_each_response_and_what_it_says_beside_the_score_is_logged(
    place: str, groups: Any, named: Any, functions: Any
) -> None:
    source = """
        def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
            assert isinstance(solution_str, str) and ground_truth == {"is": ["b"]} and extra_info == {"index": 7}
            is_right = solution_str in ground_truth["is"]
            return {"score": is_right + bonus, "acc": is_right, "pred": solution_str + data_source}
    """
    source = ("async " if "async" in place else "") + source.strip().replace("\n        ", "\n")
    if place.startswith("process"):
        function = named(source, "compute_score", options={"bonus": 0.5})
    else:
        exec(source, space := dict[str, Any]())
        (function,) = functions(space["compute_score"], options={"bonus": 0.5})
    scored = score(groups(["a", "b"], **rows(**ROW)), [function])
    assert [one.reward for one in scores_of(scored)] == [0.5, 1.5]
    assert scored.logged == {f"{function.name}/acc": (1.0, 2)}
    assert [list(one.extra.values()) for one in scores_of(scored)] == [[False, "asums"], [True, "bsums"]]


@pytest.mark.parametrize(
    ("columns", "truth"),
    [
        ({"answer": "b"}, "b"),
        ({"answer": "b", "ground_truth": "c"}, "c"),
        ({"answer": "b", "ground_truth": "c", "reward_model": {"ground_truth": "d"}}, "d"),
        ({"answer": "b", "reward_model": {"style": "rule"}}, "b"),
    ],
)
def test_verls_ground_truth_is_that_of_its_row(columns: Any, truth: str, groups: Any, functions: Any) -> None:
    def is_it(solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        assert extra_info == {}
        return float(ground_truth == truth)

    assert [one.reward for one in scores_of(score(groups(["a"], **rows(**columns)), functions(is_it)))] == [1.0]


def test_areals_function_gets_text_tokens_and_the_rest_of_the_row(groups: Any, functions: Any) -> None:
    seen: list[Any] = []

    def gsm8k(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any) -> int:
        seen.append([prompt, prompt_ids, completion_ids, data])
        return int(completions == answer)

    scored = score(groups(["a", "b"], answer=["b"], level=[3]), functions(gsm8k))
    assert [one.reward for one in scores_of(scored)] == [0.0, 1.0]
    assert seen == [["", [1], [7, 8], {"level": 3}]] * 2  # the prompt as the model reads it, which is no text here


def test_columns_with_those_names_make_no_function_of_trl_another(groups: Any, functions: Any) -> None:
    def f(completions: list[str], ground_truth: list[str], solution_str: list[str], prompt_ids: Any) -> list[float]:
        assert (ground_truth, solution_str, prompt_ids) == (["a"] * 2, ["b"] * 2, [[3]] * 2)
        return [float(text == gold) for text, gold in zip(completions, ground_truth, strict=True)]

    scored = score(groups(["a", "b"], **rows(ground_truth="a", solution_str="b", prompt_ids=[3])), functions(f))
    assert [one.reward for one in scores_of(scored)] == [1.0, 0.0]


def test_only_the_response_on_which_such_a_function_fails_is_masked(groups: Any, functions: Any) -> None:
    def fragile(solution_str: str, ground_truth: str) -> dict[str, float]:
        return {"score": 1 / (solution_str != "bad"), "tried": 1.0}

    scored = score(groups(["a", "bad"], *[["a"] * 5] * 2, answer=["b"] * 3), functions(fragile))
    assert [one.reward for one in scores_of(scored)] == [1.0, None, *[1.0] * 10]
    assert scored.logged == {"f0/tried": (11.0, 11)}  # nothing of the call that failed, and nothing twice


def test_what_verls_function_needs_and_the_row_has_not_is_named(groups: Any, functions: Any) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str) -> float:
        return 0.0

    assert [s.reward for s in score(groups(["a"], answer=["a"]), functions(compute_score)).samples] == [0.0]
    with pytest.raises(UserError, match="it needs ground_truth; the columns there are: other"):
        score(groups(["a"], other=["a"]), functions(compute_score))


def test_a_parameter_that_is_misspelt_is_named_as_it_was_meant(groups: Any, functions: Any) -> None:
    def judge(completion: Any, answer: Any) -> list[float]:
        return [0.0]

    with pytest.raises(UserError, match=r"it needs completion; (.|\n)*did you mean completions\?"):
        score(groups(["a"], answer=["a"]), functions(judge))


@pytest.mark.parametrize("column", ["trainer_state", "log_metric", "log_extra"])
def test_no_column_stands_in_for_what_the_run_gives(column: str, groups: Any, functions: Any) -> None:
    with pytest.raises(UserError, match=f"a column is named {column}"):
        score(groups(["a"], **rows(**{column: 1})), functions(lambda completions: [1.0]))


def test_the_guide_lists_every_name_that_a_function_may_take() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "rewards.md").read_text(encoding="utf-8")
    table = guide.partition("## What a function may take")[2].partition("\n## ")[0]
    listed: dict[str, list[str]] = {}
    for signature, name in re.findall(r"^\| (TRL|verl|AReaL) \| `(\w+)` \| \S", table, re.MULTILINE):
        listed.setdefault(signature, []).append(name)
    assert {signature: set(names) for signature, names in listed.items()} == {
        signature: set(names) for signature, names in GIVEN.items()
    }
    assert all(len(names) == len(set(names)) for names in listed.values())
