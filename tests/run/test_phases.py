"""Phases: each step is that of a recipe that has the phase's values from the start, and a resumed run has the same."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.breaking_off import GRADIENT, SAMPLING, TINY, differing, logged, recipe_of, result, train

import gspo
from gspo.check import check
from gspo.errors import UserError
from gspo.recipe.load import load_recipe
from gspo.report.page.data import _run
from gspo.report.run_files import read_run
from gspo.reward.overlong import overlong_penalty
from gspo.run.console import Display
from gspo.run.progress import Progress, next_phases

FAST = ("cold_start.steps=0", "evaluation.num_queries=0", "rollout.queries_per_step=4", "rollout.max_new_tokens=4")
LONGER = "phases=[{from_step: 2, rollout: {max_new_tokens: 9}}]"


def longest(name: str, step: int) -> int:
    lines = Path(f"runs/{name}/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    return max(json.loads(line)["tokens"] for line in lines)


def test_only_what_a_phase_sets_changes_from_its_first_step_on() -> None:
    second = "{from_step: 3, actor: {clip_low: 0.1, optimizer: {lr: 0.5}}}"
    recipe = recipe_of("of", *FAST, f"phases=[{{from_step: 2, rollout: {{max_new_tokens: 9}}}}, {second}]")
    tree = recipe.model_dump()
    assert recipe.at(1).model_dump() == tree
    tree["rollout"]["max_new_tokens"] = 9
    assert recipe.at(2).model_dump() == tree == recipe.at_longest.model_dump()
    tree["actor"]["clip_low"] = 0.1
    tree["actor"]["optimizer"]["lr"] = 0.5
    assert recipe.at(3).model_dump() == tree == recipe.at(30).model_dump()


def test_responses_get_longer_in_the_midst_of_a_run() -> None:
    lines = train(recipe_of("longer", *FAST, LONGER)).metrics
    assert [longest("longer", step) for step in (1, 2, 3)] == [4, 9, 9]
    assert [line["phase"] for line in lines] == [0, 1, 1]
    assert _run(read_run(Path("runs/longer")), "longer")["phases"] == [2]


@pytest.mark.parametrize(
    ("phase", "keys"),
    [
        ("rollout: {temperature: 0.5}", ["rollout.temperature=0.5"]),
        ("rollout: {max_new_tokens: 7}", ["rollout.max_new_tokens=7", "actor.length_norm=constant"]),
        ("actor: {clip_low: 1.0e-9, clip_high: 1.0e-9}", ["actor.clip_low=1.0e-9", "actor.clip_high=1.0e-9"]),
        ("actor: {optimizer: {lr: 2.0e-2}}", ["actor.optimizer.lr=2.0e-2"]),
    ],
)
def test_a_step_of_a_phase_is_that_of_a_run_with_its_values_all_along(phase: str, keys: list[str]) -> None:
    """Where the first step changes no weight and leaves no momentum, the second is that of a recipe with the values."""
    still = [*FAST, "steps=2", "actor.clip_low=0.5", "actor.clip_high=0.5", "actor.optimizer={lr: 0.01, betas: [0, 0]}"]
    still += [key for key in keys if key.startswith("actor.length_norm")]
    runs = {"phased": [f"phases=[{{from_step: 2, {phase}}}]"], "all_along": keys, "without": []}
    for name, own in runs.items():
        recipe = recipe_of(name, *still, *own)
        # Rewards that are all equal leave the policy as it is: the first step's count for nothing.
        train(
            recipe,
            reward=lambda completions, trainer_state=None, **_: [
                0.0 if trainer_state.global_step == 0 else float(len(text) % 3) for text in completions
            ],
        )
    second = {name: logged(Path(f"runs/{name}/metrics.jsonl"))[1] for name in runs}
    second["phased"].pop("phase")
    assert second["phased"] == second["all_along"] != second["without"]


def test_a_run_broken_off_around_a_phase_is_the_unbroken_one(broken_off: Callable[..., Any]) -> None:
    keys = [*FAST, "phases=[{from_step: 2, rollout: {max_new_tokens: 9}, actor: {optimizer: {lr: 3.0e-3}}}]"]
    train(recipe_of("unbroken", *keys))
    broken_off(recipe_of("broken", *keys), SAMPLING, 6)  # the second step's
    broken_off(recipe_of("broken", *keys), GRADIENT, 1, resume=True)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


def test_a_phase_that_has_not_begun_may_change_and_one_that_has_may_not() -> None:
    keys = [*FAST, "checkpoint.every=1", "checkpoint.keep=9"]
    train(recipe_of("whole", *keys, LONGER, "steps=2"))
    later = "phases=[{from_step: 2, rollout: {max_new_tokens: 9}}, {from_step: 3, rollout: {max_new_tokens: 2}}]"
    shutil.copytree("runs/whole", "runs/changed")
    with pytest.raises(UserError, match=r"phases\.0\.rollout\.max_new_tokens was 9, is 8"):
        gspo.train(recipe_of("changed", *keys, LONGER.replace("9", "8")), resume=True)
    text = io.StringIO()
    recipe = recipe_of("changed", *keys, later, "steps=4")
    gspo.train(recipe, resume=True, display=Display(Console(file=text, width=250)))
    assert "changed since: phases.1.from_step was None, is 3" in text.getvalue()
    assert "from step 3: rollout.max_new_tokens 2" in text.getvalue() and "NOT comparable" not in text.getvalue()
    assert [longest("changed", step) for step in (2, 3, 4)] == [9, 2, 2]


def test_a_longer_phase_that_a_resume_adds_changes_what_evaluations_are_of() -> None:
    text, longer = io.StringIO(), [*FAST, LONGER, "steps=2"]
    train(recipe_of("other", *FAST, "steps=1"))
    gspo.train(recipe_of("other", *longer), resume=True, display=Display(Console(file=text, width=250)))
    assert "NOT comparable: evaluations are of responses of up to 9 tokens, and it was up to 4" in text.getvalue()


def test_phases_are_given_on_the_command_line_check_lists_them_and_looks_at_each() -> None:
    recipe = load_recipe(TINY, ["phases.0.from_step=2", "phases.0.actor.optimizer.lr=5"])
    lines = list(check(recipe))
    assert "phase 1     from step 2: actor.optimizer.lr 5" in lines
    assert any("in phases.0: actor.optimizer.lr 5 is far above" in line for line in lines)


WHEN = "when: {metric: response/mean_tokens, above: 0, steps: 2}"
CONDITIONAL = f"phases=[{{{WHEN}, rollout: {{max_new_tokens: 9}}}}, {{{WHEN}, rollout: {{max_new_tokens: 2}}}}]"


def test_a_phase_begins_once_its_condition_has_held_and_the_next_is_looked_at_from_then_on() -> None:
    text = io.StringIO()
    recipe = recipe_of("when", *FAST, CONDITIONAL, "steps=6")
    lines = gspo.train(recipe, display=Display(Console(file=text, width=250))).metrics
    assert [line["phase"] for line in lines] == [0, 0, 1, 1, 2, 2]
    assert [longest("when", step) for step in range(1, 7)] == [4, 4, 9, 9, 2, 2]
    assert text.getvalue().count("from step 3: rollout.max_new_tokens 9") == 1
    assert "phase 1     once response/mean_tokens above 0 for 2 steps: rollout.max_new_tokens 9" in check(recipe)


def test_a_run_broken_off_between_conditions_is_the_unbroken_one(broken_off: Callable[..., Any]) -> None:
    keys = [*FAST, CONDITIONAL, "steps=6"]
    train(recipe_of("unbroken", *keys))
    broken_off(recipe_of("broken", *keys), SAMPLING, 20)
    broken_off(recipe_of("broken", *keys), GRADIENT, 1, resume=True)
    broken_off(recipe_of("broken", *keys), GRADIENT, 5, resume=True)
    with pytest.raises(UserError, match=r"phases\.0\.when\.steps was 2, is 3"):
        gspo.train(recipe_of("broken", *keys, "phases.0.when.steps=3"), resume=True)
    train(recipe_of("broken", *keys), resume=True)
    assert differing(result("broken"), result("unbroken")) == []


PHASES: list[dict[str, Any]] = [
    {"when": {"metric": "m", "above": 0.5, "steps": 2}, "rollout": {"max_new_tokens": 5}},
    {"when": {"metric": "m", "below": 0.2, "steps": 1}, "rollout": {"max_new_tokens": 6}},
    {"from_step": 9, "rollout": {"max_new_tokens": 7}},
    {"when": {"metric": "m", "above": 0.1, "below": 0.3, "steps": 1}, "rollout": {"max_new_tokens": 8}},
]


@pytest.mark.parametrize(
    ("values", "begun"),
    [
        ([0.6, 0.6, 0.6], [0, 0, 1, 1]),
        ([0.6, 0.4, 0.6, 0.6], [0, 0, 0, 0, 1]),
        ([0.6, None, 0.6], [0, 0, 0, 1]),
        ([0.6, float("nan"), 0.6, 0.6], [0, 0, 0, 1, 1]),
        ([0.6, 0.6, 0.1, 0.2, 0.2], [0, 0, 1, 2, 2, 2]),
        ([0.5] * 8 + [0.3, 0.1, 0.2], [0] * 8 + [3, 3, 3, 4]),
    ],
)
def test_phases_begin_in_their_order_by_what_a_metric_was(values: list[float | None], begun: list[int]) -> None:
    recipe = recipe_of("order", *FAST, f"phases={json.dumps(PHASES)}")
    progress, seen = Progress(), [0]
    for step, value in enumerate(values, 1):
        line = {"step": step} if value is None else {"step": step, "m": value}
        progress = next_phases(progress, recipe, line)
        seen.append(recipe.num_begun(step + 1, progress.phases_begun))
    assert seen == begun


def test_a_condition_that_a_resume_changes_counts_anew_or_holds_already() -> None:
    progress, line = Progress(steps=3), {"step": 3, "m": 0.6, "n": 0.6}

    def after(metric: str, steps: int) -> Progress:
        when = {"metric": metric, "above": 0.5, "steps": steps}
        phases = json.dumps([{"when": when, "rollout": {"max_new_tokens": 5}}])
        return next_phases(progress, recipe_of("changed", *FAST, f"phases={phases}"), line)

    for _ in range(3):
        progress = after("m", 5)
    assert progress.phases_begun == 0
    assert after("m", 2).phases_begun == 1
    assert after("n", 4).phases_begun == 0 and after("n", 4).held[1] == 1


@pytest.mark.parametrize(("every", "begun"), [(0, 0), (2, 1)])
def test_only_the_evaluations_that_a_longer_run_has_too_begin_a_phase(every: int, begun: int) -> None:
    phases = [
        {"when": {"metric": "evaluation/held_out/pass_at_1", "above": 0, "steps": 1}, "rollout": {"temperature": 2}}
    ]
    recipe = recipe_of("evaluated", *FAST[:1], f"evaluation.every={every}", f"phases={json.dumps(phases)}")
    line = {"evaluation/held_out/pass_at_1": 0.5}
    assert next_phases(Progress(), recipe, {"step": 3, **line}).phases_begun == 0
    assert next_phases(Progress(), recipe, {"step": 4, **line}).phases_begun == begun
    assert next_phases(Progress(), recipe, {"step": 0, **line}).phases_begun == 1


def test_an_evaluation_that_begins_a_phase_may_not_come_at_other_steps_after_a_resume() -> None:
    when = "when: {metric: evaluation/held_out/pass_at_1, above: 2, steps: 1}"
    keys = [FAST[0], *FAST[2:], "evaluation.num_queries=4", "evaluation.every=2", "steps=1"]
    keys += [f"phases=[{{{when}, rollout: {{max_new_tokens: 9}}}}]"]
    train(recipe_of("asked", *keys))
    with pytest.raises(UserError, match=r"evaluation\.every was 2, is 1"):
        gspo.train(recipe_of("asked", *keys, "steps=2", "evaluation.every=1"), resume=True)


def test_a_phase_that_begins_as_a_run_is_resumed_is_said() -> None:
    keys, text = [*FAST, CONDITIONAL], io.StringIO()
    train(recipe_of("said", *keys, "steps=2"))
    gspo.train(recipe_of("said", *keys, "steps=3"), resume=True, display=Display(Console(file=text, width=250)))
    assert text.getvalue().count("from step 3: rollout.max_new_tokens 9") == 1


@pytest.mark.parametrize(
    ("phase", "why"),
    [
        ("rollout: {max_new_tokens: 9}", "phases.0: give one of from_step and when"),
        (f"from_step: 2, {WHEN}, rollout: {{max_new_tokens: 9}}", "phases.0: give one of from_step and when"),
        ("when: {metric: reward/mean}, rollout: {max_new_tokens: 9}", "phases.0.when: give above, below or both"),
        ("when: {metric: reward/mean, above: 1, below: 0}, rollout: {max_new_tokens: 9}", "phases.0.when: give above"),
        ("when: {metric: reward/meen, above: 1}, rollout: {max_new_tokens: 9}", "no metric is called reward/meen"),
        ("when: {metric: critic/loss, above: 1}, rollout: {max_new_tokens: 9}", "with actor.advantage: gae only"),
        ("when: {metric: time/total_seconds, above: 1}, rollout: {max_new_tokens: 9}", "depends on the machine"),
        (
            "when: {metric: evaluation/held_out/pass_at_1, above: 1}, rollout: {max_new_tokens: 9}",
            "early_stop.metric or phases.when: evaluation.num_queries is 0",
        ),
    ],
)
def test_a_phase_that_cannot_begin_is_refused(phase: str, why: str) -> None:
    with pytest.raises(UserError) as error:
        list(check(recipe_of("refused", *FAST, f"phases=[{{{phase}}}]")))
    assert why in str(error.value)


def test_a_penalty_for_length_is_never_more_than_one() -> None:
    assert overlong_penalty(90, 10, 0.2) == -1 == overlong_penalty(10, 10, 0.2)


@pytest.mark.parametrize("change", ["temperature: 0.5", "max_new_tokens: 1"])
def test_groups_sampled_ahead_in_another_way_are_sampled_again(change: str) -> None:
    keys = [*FAST, "rollout.max_staleness=1", "rollout.in_turn=true", "actor.old_logprobs=engine"]
    keys += ["rollout.overlong=penalty", f"phases=[{{from_step: 2, rollout: {{{change}}}}}]"]
    lines = train(recipe_of("ahead", *keys)).metrics
    assert [line["staleness/dropped_groups"] for line in lines] == [0, 4, 0]


@pytest.mark.parametrize(
    ("phases", "sentence"),
    [
        (
            "[{from_step: 1, rollout: {temperature: 2}}]",
            "phases.0.from_step: should be greater than or equal to 2, not 1",
        ),
        ("[{from_step: 3}]", "phases.0 changes nothing: give it a key beside from_step"),
        ("[{rollout: {temperature: 2}}]", "phases.0: give one of from_step and when"),
        (
            "[{from_step: 3, queries: {path: a}}]",
            "unknown key phases.0.queries.path: a phase has from_step, when.metric",
        ),
        (
            "[{from_step: 5, rollout: {temperature: 2}}, {from_step: 5, rollout: {temperature: 1}}]",
            "phases begin one after the other: from_step is 5, 5",
        ),
        ("[{from_step: 3, rollout: {max_new_tokens: 400}}]", "lower phases.0.rollout.max_new_tokens"),
    ],
)
def test_phases_that_cannot_be_are_refused_before_anything_is_sampled(phases: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        train(recipe_of("refused", f"phases={phases}"))
    assert sentence in str(error.value) and not Path("runs/refused").exists()


def test_a_rule_between_keys_is_checked_in_each_phase() -> None:
    keys = ["rollout.engine=vllm", "phases=[{from_step: 3, rollout: {temperature: 0.001}}]"]
    with pytest.raises(UserError, match=r"in phases\.0: rollout\.temperature 0\.001: vllm takes 0\.01"):
        recipe_of("ruled", *keys)
