"""A run whose queries change on the way: by a function, or by a data file that is replaced."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.breaking_off import GRADIENT, REWARD, SAMPLING, differing, recipe_of, result, train
from tests.queries.conftest import _byte_tokenizer

import gspo
from gspo.errors import UserError
from gspo.recipe.schema import Recipe
from gspo.run.console import Display

FUNCTION = """
def rows(step):
    return [{"prompt": f"{n}-1=", "answer": str(n)} for n in range(12)] if step == 2 else None
"""
KEYS = (
    *("cold_start.steps=0", "queries={path: rows.jsonl, max_prompt_tokens: 8}", "model.tokenizer=tokenizer"),
    *("rollout.queries_per_step=4", "rollout.max_new_tokens=4", "evaluation.num_queries=2", "steps=4"),
)
AHEAD = ("rollout.max_staleness=1", "rollout.in_turn=true", "actor.old_logprobs=engine")


def write_rows(prompts: list[str], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps({"prompt": own, "answer": "1"}) + "\n" for own in prompts))


@pytest.fixture(autouse=True)
def _files() -> None:
    _byte_tokenizer(after="").save_pretrained("tokenizer")
    write_rows([f"{n}+1=" for n in range(24)])
    Path("own.py").write_text(FUNCTION)


def made(name: str, *overrides: str) -> Recipe:
    return recipe_of(name, *KEYS, *overrides)


def asked(name: str) -> list[set[str]]:
    """The prompts of each step."""
    paths = sorted(Path("runs", name, "rollouts").glob("step_*"))
    return [{json.loads(line)["prompt"] for line in path.read_text().splitlines()} for path in paths]


def said(recipe: Recipe, **given: Any) -> str:
    text = io.StringIO()
    gspo.train(recipe, display=Display(Console(file=text, width=200)), **given)
    return text.getvalue()


@pytest.mark.parametrize("others", [(), ("queries.sampler=difficulty",), AHEAD], ids=["order", "difficulty", "ahead"])
def test_a_run_with_new_queries_broken_off_is_the_unbroken_one(
    others: tuple[str, ...], broken_off: Callable[..., Any]
) -> None:
    # With entropy no mini-batch is empty.
    keys = ("queries.refresh=own.py:rows", "actor.entropy_bonus=1e-3", *others)
    unbroken = train(made("unbroken", *keys))
    steps = asked("unbroken")
    seen = [line["curriculum/seen_fraction"] for line in unbroken.metrics if "curriculum/seen_fraction" in line]
    assert seen[:2] == pytest.approx([4 / 22, 4 / 12][: len(seen)])  # of the queries that there are
    assert all("+" in prompt for prompt in steps[0]) and all("-" in prompt for own in steps[1:] for prompt in own)
    assert others or len(set.union(*steps[1:])) == 12  # each once, before any comes again
    broken_off(made("broken", *keys), SAMPLING, 3)
    broken_off(made("broken", *keys), GRADIENT, 3, resume=True)
    broken_off(made("broken", *keys), REWARD, 2, resume=True)
    broken_off(made("broken", *keys), REWARD, 1, resume=True)
    Path("own.py").write_text(FUNCTION.replace("-", "*"))  # what it gave is remembered
    assert "NOT an exact resume: code of own.py:rows" in said(made("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_a_file_that_is_replaced_is_read_anew_also_while_the_run_is_down() -> None:
    def replace_file(step: int, metrics: Any, samples: Any) -> None:
        if step == 1:
            write_rows([f"{n}-1=" for n in range(8)] + ["3+1="], "next.jsonl")  # which is held out
            Path("next.jsonl").rename("rows.jsonl")

    text = said(made("one", "queries.refresh=file", "steps=2"), on_step=replace_file)
    assert "from step 2: 8 queries, 8 of them new (file)" in text
    first, second = asked("one")
    assert all("+" in prompt for prompt in first) and all("-" in prompt for prompt in second)
    before = said(made("one", "queries.refresh=file", "steps=3"), resume=True)  # as it was: nothing is said
    assert "of them new" not in before and "goes on from" in before
    write_rows([f"{n}*1=" for n in range(8)])
    assert "from step 4: 8 queries, 8 of them new (file)" in said(made("one", "queries.refresh=file"), resume=True)
    assert all("*" in prompt for prompt in asked("one")[3])
    evaluated = {json.loads(line)["step"] for line in Path("runs/one/metrics.jsonl").read_text().splitlines()}
    assert evaluated == {0, 1, 2, 3, 4}


def test_each_source_whose_file_is_replaced_is_read_anew_and_equal_rows_keep_their_ids() -> None:
    write_rows([f"{n}-1=" for n in range(24)], "others.jsonl")
    sources = "queries={sources: {a: rows.jsonl, b: others.jsonl}, max_prompt_tokens: 8, refresh: file}"
    said(made("two", sources, "steps=1"))
    write_rows([f"{n}*1=" for n in range(24)], "others.jsonl")
    assert "from step 2: 47 queries, 24 of them new (file)" in said(made("two", sources, "steps=2"), resume=True)
    assert {prompt.strip("0123456789=") for prompt in asked("two")[1]} == {"+", "*"}


BAD = {
    "[]": "the data has no rows",
    "[{'prompt': '1+1='}]": "a step takes 4 different queries and the data has 1",
    "[{'prompt': f'{n}' * 9} for n in range(8)]": "8 of 8 prompts have too many tokens",
    "[{'question': {}}]": "neither text nor a list of messages",
    "{'prompt': '1'}": "own.py:rows: the rows for step 2 cannot be used: it returns dict",
    "1 / 0": "it raises ZeroDivisionError: division by zero, at ",
}


def test_rows_that_cannot_be_used_are_one_error_and_nothing_is_lost() -> None:
    keys = ("queries.refresh=own.py:rows", "steps=2")
    train(made("unbroken", *keys))
    for number, (given, what) in enumerate(BAD.items()):
        Path("own.py").write_text(f"def rows(step):\n    return {given} if step == 2 else None\n")
        with pytest.raises(UserError) as caught:
            train(made("broken", *keys), resume=number > 0)
        assert what in str(caught.value) and "queries.refresh" in str(caught.value)
    Path("own.py").write_text(FUNCTION)
    train(made("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []
