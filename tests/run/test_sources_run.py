"""A run over several sources: what is taken of each, who judges, and phases that shift both."""

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.breaking_off import GRADIENT, ROUND, SAMPLING, differing, logged, recipe_of, result, train

import gspo
from gspo.check import check
from gspo.errors import UserError
from gspo.run.console import Display

TASK = "task: chain_sum, min_digits: 1, max_digits: 1, size: 40"
SOURCES = f"""queries={{
  sources: {{
    easy: {{procedural: {{{TASK}, min_terms: 2, max_terms: 2}}}},
    hard: {{procedural: {{{TASK}, min_terms: 4, max_terms: 4}}}}}},
  weights: {{easy: 3, hard: 1}}}}"""
REWARD = """reward=[{function: format, options: {pattern: '[1-4]'}, sources: [easy]},
  {function: length.py:shorter, weight: 0.5}]"""
PHASES = "phases=[{from_step: 3, queries: {weights: {hard: 1}}, reward_weights: {shorter: 0.25}}]"
KEYS = ("cold_start.steps=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=4", SOURCES, REWARD, PHASES)
FUNCTION = "def shorter(completions, **_):\n    return [1.0 / (1 + len(text)) for text in completions]\n"


@pytest.fixture(autouse=True)
def function() -> None:
    Path("length.py").write_text(FUNCTION)


def rows_of(name: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"runs/{name}/rollouts/step_{step:06d}.jsonl").read_text().splitlines()]


def test_sources_are_taken_by_their_weights_judged_by_their_functions_and_shifted_by_a_phase() -> None:
    text = io.StringIO()
    recipe = recipe_of("both", *KEYS, "steps=4")
    lines = gspo.train(recipe, display=Display(Console(file=text, width=250))).metrics[1:]
    for step, (easy, hard) in enumerate([(3, 1), (3, 1), (0, 4), (0, 4)], 1):
        rows, line = rows_of("both", step), lines[step - 1]
        assert Counter(row["query"].partition(":")[0] for row in rows) == Counter(easy=4 * easy, hard=4 * hard)
        assert line.get("queries/easy/sampled", 0) == easy and line["queries/hard/sampled"] == hard
        for row in rows:
            form, shorter = row["rewards"]["format"], row["rewards"]["shorter"]
            assert (form is None) == row["query"].startswith("hard")
            assert row["reward"] == pytest.approx((form or 0.0) + (0.5 if step < 3 else 0.25) * shorter)
    ids = [row["query"] for step in range(1, 5) for row in rows_of("both", step)[::4]]
    assert len({*ids}) == len(ids)  # of 40 each
    note = "from step 3: queries.weights.hard 1, reward_weights.shorter 0.25"
    assert note in text.getvalue() and f"phase 1     {note}" in [*check(recipe)]
    assert sum(line.startswith("reward      format of easy: ") for line in check(recipe)) == 1
    assert "sources     easy 40 at 75%, hard 40 at 25%" in check(recipe) and "75% from easy" in text.getvalue()
    never = next(
        line for line in check(recipe_of("never", *KEYS, "phases=[]", "queries.weights.hard=0")) if "all along" in line
    )
    assert never.startswith("note        queries.sources.hard: the weight is 0")


AHEAD = ("rollout.max_staleness=1", "rollout.in_turn=true", "actor.old_logprobs=engine")


@pytest.mark.parametrize("others", [("rollout.dynamic_sampling=true", "rollout.max_rounds=3"), AHEAD])
def test_a_run_over_sources_broken_off_is_the_unbroken_one(
    others: tuple[str, ...], broken_off: Callable[..., Any]
) -> None:
    keys = [*KEYS, "steps=4", *others]
    train(recipe_of("unbroken", *keys))
    broken_off(recipe_of("broken", *keys), SAMPLING, 3)
    broken_off(recipe_of("broken", *keys), ROUND, 2, resume=True)
    broken_off(recipe_of("broken", *keys), GRADIENT, 3, resume=True)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []
    with pytest.raises(UserError, match=r"queries\.weights\.easy was 3\.0, is 2"):
        train(recipe_of("broken", *keys, "queries.weights.easy=2", "steps=5"), resume=True)


def test_groups_sampled_ahead_are_weighed_as_the_step_is_that_trains_on_them() -> None:
    train(recipe_of("ahead", *KEYS, "steps=4", "rollout.max_staleness=1", "actor.old_logprobs=engine"))
    for row in rows_of("ahead", 3):
        assert row["reward"] == pytest.approx((row["rewards"]["format"] or 0.0) + 0.25 * row["rewards"]["shorter"])
    assert logged(Path("runs/ahead/metrics.jsonl"))[3]["phase"] == 1


def test_a_small_source_does_not_end_the_rounds_of_dynamic_sampling() -> None:
    small = f"queries.sources.small={{procedural: {{{TASK.replace('40', '2')}, min_terms: 3, max_terms: 3}}}}"
    keys = [*KEYS, "phases=[]", small, "queries.weights={small: 1, hard: 1}"]
    keys += ["reward={function: format, options: {pattern: never}}"]
    train(recipe_of("rounds", *keys, "rollout.dynamic_sampling=true", "rollout.max_rounds=3", "steps=4"))
    lines = logged(Path("runs/rounds/metrics.jsonl"))[1:]
    assert all(line["group/sampled"] == 12 for line in lines)  # three rounds of four: rewards are equal
    assert all(line["queries/small/sampled"] == 2 for line in lines)


def test_what_python_stands_in_for_has_no_keys_left_that_speak_of_it() -> None:
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(9)]
    with pytest.raises(UserError, match=r"reward\.sources, phases\.queries\.weights: queries come from Python"):
        train(recipe_of("rows", *KEYS), queries=rows)
    keys = [*KEYS, "phases=[]", "steps=1", "evaluation.num_queries=0"]
    train(recipe_of("given", *keys), reward=[gspo.Reward(given, sources=["easy"]), gspo.Reward(given, weight=0.5)])
    for row in rows_of("given", 1):
        assert row["rewards"] == {"given": None if row["query"].startswith("hard") else 1.0, "given_2": 1.0}
    with pytest.raises(UserError, match=r"phases\.reward_weights: the reward comes from Python"):
        train(recipe_of("judge", *KEYS), reward=lambda completions, **_: [1.0 for _ in completions])


def given(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def test_a_metric_of_no_source_is_refused() -> None:
    with pytest.raises(UserError, match="no metric is called queries/typo/reward_mean"):
        [*check(recipe_of("typo", *KEYS, "checkpoint.best=queries/typo/reward_mean"))]
