"""Evaluation on held-out queries: what counts as passed, and that nothing else changes the number."""

import math
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.sampling import sampler_of

from gspo.errors import Stopped
from gspo.evaluation.held_out import Numbers, evaluate, held_out_set
from gspo.interrupt import Interrupt
from gspo.model.policy import Policy
from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.functions import load_functions
from gspo.types import Query

Queries = Sequence[Query]


@pytest.fixture
def queries(query_of: Callable[..., Query]) -> Queries:
    return [query_of([3 + number, 5, 6], number) for number in range(6)]


@pytest.fixture
def recipe_of() -> Callable[..., Recipe]:
    def build(max_new_tokens: int = 6, **evaluation: Any) -> Recipe:
        rollout = {"max_new_tokens": max_new_tokens, "temperature": 0.5}
        tree = {"name": "e", "steps": 1, "model": {"path": "m"}, "rollout": rollout, "evaluation": evaluation}
        return make_recipe(tree)

    return build


def giving(value: float | None, name: str = "giving") -> Callable[..., list[float | None]]:
    def function(completions: Sequence[str], **columns: Any) -> list[float | None]:
        return [value] * len(completions)

    function.__name__ = name
    return function


def evaluated(policy: Policy, queries: Queries, functions: Any, recipe: Recipe, **watched: Any) -> Numbers:
    return evaluate(sampler_of(policy), held_out_set(recipe, queries, functions), **watched)[0]


@pytest.mark.parametrize(("value", "rate"), [(1.0, 1.0), (0.99, 0.0), (2.0, 1.0)])
def test_a_response_passes_where_the_function_reaches_the_threshold(
    new_policy: Callable[..., Policy],
    queries: Queries,
    recipe_of: Callable[..., Recipe],
    value: float,
    rate: float,
) -> None:
    found = evaluated(new_policy(), queries, load_functions((), giving(value)), recipe_of())
    assert found["pass_at_1"] == rate
    assert found["num_questions"] == len(queries)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_response_the_function_fails_on_counts_as_not_passed_and_one_that_none_applies_to_is_left_out(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe], weight: float
) -> None:
    seen: list[str] = []

    def fails_on_the_first_query(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        if prompts[0] == "first":
            seen.extend(completions)
            raise ValueError("unreadable")
        return [None if prompts[0] == "second" else 1.0] * len(completions)

    some = [replace(query, prompt=name) for query, name in zip(queries, ["first", "second", *"abcd"], strict=True)]
    functions = [replace(function, weight=weight) for function in load_functions((), fails_on_the_first_query)]
    found = evaluated(new_policy(), some, functions, recipe_of(samples=2))
    assert found["num_questions"] == 5 and found["pass_at_1"] == 4 / 5
    assert len(seen) == 4  # the group's two, and each of them by itself
    assert (found["num_responses"], found["num_failed"], found["num_unjudged"]) == (12, 2, 2)
    assert found["num_masked"] == (2 if weight else 0)
    assert "fails_on_the_first_query: it raises ValueError: unreadable" in found["first_failure"]
    assert found["first_failure"].endswith(f"(row {some[0].id})")


def test_however_many_fail_an_evaluation_goes_on_and_counts_them(
    new_policy: Callable[..., Policy], query_of: Callable[..., Query], recipe_of: Callable[..., Recipe]
) -> None:
    def sixty_right_twenty_fail(prompts: Sequence[str], **columns: Any) -> list[float]:
        if int(prompts[0]) >= 80:
            raise TimeoutError("too slow")
        return [float(int(prompts[0]) < 60)] * len(prompts)

    hundred = [replace(query_of([3, 5], number), prompt=str(number)) for number in range(100)]
    functions = load_functions((), [sixty_right_twenty_fail])
    found = evaluated(new_policy(), hundred, functions, recipe_of(max_new_tokens=1))
    assert found["pass_at_1"] == 0.6 and found["num_failed"] == 20
    assert found["reward_mean"] == 0.75  # a response without a reward has none
    most = evaluated(new_policy(), hundred[50:], functions, recipe_of(max_new_tokens=1))
    assert most["pass_at_1"] == 0.2 and most["num_failed"] == 20  # 40 %, which would end training


def test_on_data_of_two_kinds_each_response_is_judged_by_the_function_that_applies(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def first(prompts: Sequence[str], **columns: Any) -> list[float | None]:
        return [0.0 if prompt == "for the first" else None for prompt in prompts]

    def second(prompts: Sequence[str], **columns: Any) -> list[float | None]:
        return [1.0 if prompt == "for the second" else None for prompt in prompts]

    kinds = ["for the first", *["for the second"] * 3, "for neither", "for neither"]
    some = [replace(query, prompt=kind) for query, kind in zip(queries, kinds, strict=True)]
    found = evaluated(new_policy(), some, load_functions((), [first, second]), recipe_of())
    assert found["pass_at_1"] == 3 / 4 and found["num_questions"] == 4 and found["num_unjudged"] == 2
    assert found["function_means"] == {"first": 0.0, "second": 1.0}
    assert found["num_judged_by"] == {"first": 1, "second": 3}
    only_second = evaluated(new_policy(), some[1:4], load_functions((), [first, second]), recipe_of())
    assert only_second["pass_at_1"] == only_second["reward_mean"] == 1.0
    neither = evaluated(new_policy(), some[4:], load_functions((), [first, second]), recipe_of())
    assert math.isnan(neither["pass_at_1"]) and neither["num_unjudged"] == neither["num_responses"] == 2


def test_the_reward_is_the_functions_weighted_sum_with_its_error(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def marks(prompts: Sequence[str], **columns: Any) -> list[float]:
        return [float(prompt) for prompt in prompts]

    some = [replace(query, prompt=str(mark)) for query, mark in zip(queries, [0, 2, 4, 6, 8, 10], strict=True)]
    functions = [
        replace(function, weight=weight)
        for function, weight in zip(load_functions((), [marks, giving(3.0), giving(7.0)]), (1.0, 0.5, 0.0), strict=True)
    ]
    found = evaluated(new_policy(), some, functions, recipe_of())
    assert found["reward_mean"] == pytest.approx(5 + 1.5)
    assert found["reward_error"] == pytest.approx(statistics.stdev([0, 2, 4, 6, 8, 10]) / math.sqrt(6))
    assert found["function_means"] == {"marks": 5.0, "giving": 3.0, "giving_2": 7.0}  # of weight 0 too: measured


def test_the_threshold_is_the_recipes(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    functions = load_functions((), giving(0.5))
    assert evaluated(new_policy(), queries, functions, recipe_of(pass_threshold=0.5))["pass_at_1"] == 1


def test_of_functions_that_apply_the_first_alone_decides_what_passes(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def never(completions: Sequence[str], **columns: Any) -> list[float]:
        raise AssertionError("called")

    found = evaluated(new_policy(), queries, load_functions((), [giving(1.0), never]), recipe_of())
    assert found["pass_at_1"] == 1 and found["num_failed"] == 0
    assert found["num_masked"] == found["num_responses"] and math.isnan(found["reward_mean"])
    wrong = evaluated(new_policy(), queries, load_functions((), [giving(0.0), giving(1.0)]), recipe_of())
    assert wrong["pass_at_1"] == 0 and wrong["reward_mean"] == 1


def test_the_same_policy_gets_the_same_number_and_training_randomness_is_not_touched(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def even(completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(len(completion) % 2 == 0) for completion in completions]

    functions, recipe, policy = load_functions((), even), recipe_of(samples=4), new_policy()
    before = torch.get_rng_state()
    first = evaluated(policy, queries, functions, recipe)
    second = evaluated(policy, queries, functions, recipe.model_copy(update={"seed": 5}))
    assert second == first
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < first["pass_at_1"] < 1
    assert first["error_over_questions"] > 0 and first["error_over_samples"] > 0


def test_every_query_gets_its_samples_at_the_evaluations_own_temperature(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    sizes: list[int] = []

    def counting(completions: Sequence[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        return [float(len(set(completions)) == 1)] * len(completions)

    functions = load_functions((), counting)
    cold = evaluated(new_policy(), queries, functions, recipe_of(samples=5, temperature=1e-4))
    assert sizes == [5] * len(queries)
    assert cold["pass_at_1"] == 1  # at nearly no temperature all samples of a query are the same
    assert evaluated(new_policy(), queries, functions, recipe_of(samples=5, temperature=5.0))["pass_at_1"] < 1


def test_lengths_and_cut_responses_are_reported(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    found = evaluated(new_policy(), queries, load_functions((), giving(0.0)), recipe_of(max_new_tokens=1))
    assert found["mean_response_tokens"] == 1
    assert 0 <= found["truncated_fraction"] <= 1


def test_evaluation_leaves_the_weights_alone(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    policy = new_policy()
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    evaluated(policy, queries, load_functions((), giving(1.0)), recipe_of())
    assert all(torch.equal(one, two) for one, two in zip(before, policy.model.parameters(), strict=True))


def test_a_stop_is_heard_while_responses_are_scored(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    interrupt = Interrupt(lambda _: None)

    def calling(completions: Sequence[str], **columns: Any) -> list[float]:
        interrupt.signal = signal.SIGTERM
        return [0.0] * len(completions)

    with interrupt, pytest.raises(Stopped):
        evaluated(new_policy(), queries, load_functions((), calling), recipe_of())


@pytest.mark.parametrize("num_rows", [32, 5])
def test_rows_with_one_prompt_are_one_question_with_more_samples(
    num_rows: int, new_policy: Callable[..., Policy], query_of: Callable[..., Query], recipe_of: Callable[..., Recipe]
) -> None:
    def knows_the_first(prompts: Sequence[str], **columns: Any) -> list[float]:
        return [float(prompt == "a") for prompt in prompts]

    rows = [(name, query_of([3, 5], number)) for number in range(2 * num_rows) for name in ["ab"[number % 2]]]
    queries = [replace(query, prompt=name, text=name, columns={"row": query.id}) for name, query in rows]
    found = evaluated(new_policy(), queries, load_functions((), [knows_the_first]), recipe_of(max_new_tokens=1))
    assert (found["pass_at_1"], found["num_questions"], found["num_responses"]) == (0.5, 2, 2 * num_rows)
    assert found["error_over_questions"] == pytest.approx(0.5)
    assert found["error_over_samples"] == 0 and found["pass_at_k"][str(num_rows)] == 0.5
