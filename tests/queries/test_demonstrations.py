"""The cold start's corpus: right answers, in both styles, the same for the same seed."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.errors import UserError
from gspo.queries.demonstrations import load_demonstrations
from gspo.queries.row import Row
from gspo.queries.source import RowSet, load_rows
from gspo.queries.worked import chain_sum as demonstrate
from gspo.recipe.schema import Recipe

RecipeOf = Callable[..., Recipe]
ROWS = [Row(id=f"data:{number}", prompt=f"{number}?", columns={"answer": str(number)}) for number in range(5)]


def row_of(expression: str) -> dict[str, Any]:
    answer = str(eval(expression))
    return {"task": "chain_sum", "entry": {"answer": answer, "metadata": {"expression": expression}}}


@pytest.mark.parametrize(
    ("expression", "worked"),
    [
        ("7 + 4 + 3", "7+4=11, 11+3=14 <answer>14</answer>"),
        ("3 - 7 + 2", "3-7=-4, -4+2=-2 <answer>-2</answer>"),
        ("5", "<answer>5</answer>"),
    ],
)
def test_worked_and_bare_answers(expression: str, worked: str) -> None:
    assert demonstrate(row_of(expression), random.Random(0), worked_fraction=1.0) == worked
    bare = demonstrate(row_of(expression), random.Random(0), worked_fraction=0.0)
    assert bare == f"<answer>{eval(expression)}</answer>"


def test_built_in_demonstrations_are_right_mixed_and_reproducible(
    recipe_of: RecipeOf, chain_sum: dict[str, Any]
) -> None:
    cold_start = {"steps": 1, "demonstrations": "gspo.queries.worked:chain_sum", "rows": 200}
    recipe = recipe_of(queries={"procedural": chain_sum}, cold_start=cold_start)
    rows = load_rows(recipe).train
    pairs = load_demonstrations(recipe, RowSet(train=tuple(rows), held_out=()))
    assert pairs == load_demonstrations(recipe, RowSet(train=tuple(rows), held_out=()))
    assert len({row.id for row, _ in pairs}) == 200
    for row, text in pairs:
        *steps, answer = re.findall(r"-?\d+(?=,| <|<)", str(text))
        assert answer == row.columns["answer"] and (not steps or steps[-1] == answer)
    assert 0.35 < sum("=" in text for _, text in pairs) / 200 < 0.65


def test_a_demonstrator_of_ones_own_gets_the_row_with_its_prompt(tmp_path: Path, recipe_of: RecipeOf) -> None:
    (tmp_path / "mine.py").write_text("def show(row, rng):\n    return row['prompt'] + row['answer']\n")
    recipe = recipe_of(cold_start={"steps": 1, "demonstrations": f"{tmp_path}/mine.py:show"})
    assert sorted(str(text) for _, text in load_demonstrations(recipe, RowSet(train=tuple(ROWS), held_out=()))) == [
        "0?0",
        "1?1",
        "2?2",
        "3?3",
        "4?4",
    ]


TURNS = [
    {"role": "assistant", "content": "f(2)"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
]


def test_a_demonstration_may_be_a_conversation_with_tools(tmp_path: Path, recipe_of: RecipeOf) -> None:
    (tmp_path / "mine.py").write_text(f"def show(row, rng):\n    return {TURNS}\n")
    cold_start = {"steps": 1, "demonstrations": f"{tmp_path}/mine.py:show"}
    recipe = recipe_of(cold_start=cold_start, rollout={"tools": ["calculator"]})
    assert [shown for _, shown in load_demonstrations(recipe, RowSet(train=tuple(ROWS[:1]), held_out=()))] == [TURNS]
    with pytest.raises(UserError, match=r"the completion has several turns\n  fix: set rollout\.tools"):
        load_demonstrations(recipe_of(cold_start=cold_start), RowSet(train=tuple(ROWS), held_out=()))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"return {TURNS[:2]}", "messages of the roles assistant, tool\n  fix: write assistant, tool, assistant"),
        (f"return {TURNS[1:]}", "messages of the roles tool, assistant"),
        (f"return {TURNS[::2]}", "messages of the roles assistant, assistant"),
        ("return [{'role': 'assistant', 'content': 3}] * 2", "3 and not a text"),
        ("return row['gold']", r"KeyError: 'gold', at .*mine\.py:2"),
        ("return None", "None and not a text"),
        ("raise SystemExit(0)", "raises SystemExit: 0"),
    ],
)
def test_a_demonstrator_that_fails_is_named_with_the_row(
    body: str, said: str, tmp_path: Path, recipe_of: RecipeOf
) -> None:
    (tmp_path / "mine.py").write_text(f"def show(row, rng):\n    {body}\n")
    recipe = recipe_of(cold_start={"steps": 1, "demonstrations": f"{tmp_path}/mine.py:show"})
    with pytest.raises(UserError, match=said) as caught:
        load_demonstrations(recipe, RowSet(train=tuple(ROWS), held_out=()))
    assert "row data:" in str(caught.value)


def test_the_built_in_demonstrator_refuses_other_tasks(recipe_of: RecipeOf) -> None:
    recipe = recipe_of(cold_start={"steps": 1, "demonstrations": "gspo.queries.worked:chain_sum"})
    with pytest.raises(UserError, match="chain_sum only"):
        load_demonstrations(recipe, RowSet(train=tuple(ROWS), held_out=()))


def test_a_file_of_completions(tmp_path: Path, recipe_of: RecipeOf) -> None:
    path = tmp_path / "shown.jsonl"
    shown = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": [{"role": "assistant", "content": "d"}]}]
    path.write_text("\n".join(map(json.dumps, shown)))
    recipe = recipe_of(cold_start={"steps": 1, "path": str(path)})
    assert {(row.prompt, text) for row, text in load_demonstrations(recipe, RowSet(train=(), held_out=()))} == {
        ("a", "b"),
        ("c", "d"),
    }
    held_out = (Row(id="test:1", prompt="a"),)
    assert [row.prompt for row, _ in load_demonstrations(recipe, RowSet(train=(), held_out=held_out))] == ["c"]
    with pytest.raises(UserError, match="among those held out"):
        load_demonstrations(recipe, RowSet(train=(), held_out=(*held_out, Row(id="test:2", prompt="c"))))
    path.write_text('{"prompt": "a", "response": "b"}')
    with pytest.raises(UserError, match="'completion'; the other columns there are: response"):
        load_demonstrations(recipe, RowSet(train=(), held_out=()))
