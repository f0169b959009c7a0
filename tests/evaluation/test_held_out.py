"""Evaluation on held-out queries: what counts as passed, and that nothing else changes the number."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo.config import Recipe
from gspo.config_file import make_recipe
from gspo.evaluation.held_out import evaluate
from gspo.policy.model import Policy
from gspo.records import Query
from gspo.reward.functions import load_functions

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


@pytest.mark.parametrize(("value", "rate"), [(1.0, 1.0), (0.99, 0.0), (None, 0.0), (2.0, 1.0)])
def test_a_response_passes_where_the_function_reaches_the_threshold(
    new_policy: Callable[..., Policy],
    queries: Queries,
    recipe_of: Callable[..., Recipe],
    value: float | None,
    rate: float,
) -> None:
    found = evaluate(new_policy(), queries, load_functions((), giving(value)), recipe_of())
    assert found.pass_at_1 == rate
    assert found.num_queries == len(queries)


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_a_response_the_function_fails_on_is_left_out_and_one_it_does_not_apply_to_counts_as_not_passed(
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
    found = evaluate(new_policy(), some, functions, recipe_of(samples=2))
    assert found.num_queries == 5 and found.pass_at_1 == 4 / 5
    assert len(seen) == 4  # the group's two, and each of them by itself


def test_the_threshold_is_the_recipes(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    functions = load_functions((), giving(0.5))
    assert evaluate(new_policy(), queries, functions, recipe_of(pass_threshold=0.5)).pass_at_1 == 1


def test_the_first_function_alone_decides_and_the_others_are_not_called(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def never(completions: Sequence[str], **columns: Any) -> list[float]:
        raise AssertionError("called")

    functions = load_functions((), [giving(1.0), never])
    assert evaluate(new_policy(), queries, functions, recipe_of()).pass_at_1 == 1


def test_the_same_policy_gets_the_same_number_and_training_randomness_is_not_touched(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    def even(completions: Sequence[str], **columns: Any) -> list[float]:
        return [float(len(completion) % 2 == 0) for completion in completions]

    functions, recipe, policy = load_functions((), even), recipe_of(samples=4), new_policy()
    before = torch.get_rng_state()
    first = evaluate(policy, queries, functions, recipe)
    assert evaluate(policy, queries, functions, recipe.model_copy(update={"seed": 5})) == first
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < first.pass_at_1 < 1 and first.standard_error > 0


def test_every_query_gets_its_samples_at_the_evaluations_own_temperature(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    sizes: list[int] = []

    def counting(completions: Sequence[str], **columns: Any) -> list[float]:
        sizes.append(len(completions))
        return [float(len(set(completions)) == 1)] * len(completions)

    functions = load_functions((), counting)
    cold = evaluate(new_policy(), queries, functions, recipe_of(samples=5, temperature=1e-4))
    assert sizes == [5] * len(queries)
    assert cold.pass_at_1 == 1  # at nearly no temperature all samples of a query are the same
    assert evaluate(new_policy(), queries, functions, recipe_of(samples=5, temperature=5.0)).pass_at_1 < 1


def test_lengths_and_cut_responses_are_reported(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    found = evaluate(new_policy(), queries, load_functions((), giving(0.0)), recipe_of(max_new_tokens=1))
    assert found.mean_response_tokens == 1
    assert 0 <= found.truncated_fraction <= 1


def test_evaluation_leaves_the_weights_alone(
    new_policy: Callable[..., Policy], queries: Queries, recipe_of: Callable[..., Recipe]
) -> None:
    policy = new_policy()
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    evaluate(policy, queries, load_functions((), giving(1.0)), recipe_of())
    assert all(torch.equal(one, two) for one, two in zip(before, policy.model.parameters(), strict=True))
