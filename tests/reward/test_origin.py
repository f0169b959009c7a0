"""Data that name a task of reasoning-gym may hold any text: its verifier runs none of it, in a sandbox or not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.samples import sample_of, scores_of

from gspo import cli
from gspo.recipe.sections import RewardConfig
from gspo.reward.functions import close_functions, load_functions
from gspo.reward.score import score
from gspo.types import Group, Query

TINY = Path(__file__).parents[1] / "tiny.yaml"
DATA = ("reward=reasoning_gym", "queries.procedural=null", "cold_start.steps=0", "rollout.queries_per_step=4")
CODE = "__import__('pathlib').Path('evaluated').touch()"


def rows(task: str) -> list[dict[str, Any]]:
    """Rows of which one names the task, and holds code wherever a verifier of it could look."""
    metadata = {"numbers": [1], "target": 1, "expression": CODE, "problem": CODE, "integrand": CODE, "variable": "x"}
    entry = {"question": "q", "answer": CODE, "metadata": metadata}
    plain = {"task": "chain_sum", "answer": "1", "entry": {"question": "q", "answer": "1", "metadata": {}}}
    hostile = {"task": task, "answer": CODE, "entry": entry}
    return [{"prompt": f"say {place}", **(plain if place else hostile)} for place in range(20)]


@pytest.mark.parametrize("task", ["countdown", "simple_integration"])
def test_a_file_of_hostile_rows_is_checked_and_nothing_of_it_runs(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(task)), encoding="utf-8")
    assert cli.main(["check", str(TINY), *DATA, "queries.path=rows.jsonl", "evaluation.num_queries=0"]) == 0
    assert re.search(r"no response can get 1 on 1 of 20 rows", capsys.readouterr().out)
    assert not Path("evaluated").exists()


def test_in_its_process_an_answer_that_does_not_end_is_wrong_and_the_others_are_not() -> None:
    (function,) = load_functions([RewardConfig(function="reasoning_gym", options={"seconds_per_answer": 2.0})])
    metadata = {"numbers": [8, 3], "target": 24}
    columns = {"task": "countdown", "entry": {"question": "q", "answer": "8*3", "metadata": metadata}}
    query = Query(id="rows.jsonl:1", prompt="q", text="", prompt_ids=(1,), columns=columns)
    texts = ("8*3", "((9**999)**999)**999", "3*8")
    samples = (sample_of(query, [7, 8], text=text, finish_reason="stop") for text in texts)
    found = [one.reward for one in scores_of(score([Group(samples=tuple(samples))], [function]))]
    close_functions([function])
    assert found == [1.0, 0.0, 1.0]
