"""The study's arithmetic: what a budget buys, what a failed run counts, which results belong to it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from studies.gspo_vs_grpo.arms import ARMS, MAIN
from studies.gspo_vs_grpo.jobs import Variant, main_jobs, tuning_jobs
from studies.gspo_vs_grpo.runs import load_runs
from studies.gspo_vs_grpo.tuned import tune
from studies.harness.results import Result
from studies.harness.summary import (
    common_compute,
    difference,
    final_pass_at_1,
    has_collapsed,
    late_reward,
    mean_reward,
    reward_at,
)


def result(rewards: list[float], *, steps: int = 8, cost: float = 10.0, failed: bool = False) -> Result:
    return Result(
        digest="d",
        overrides={},
        steps=steps,
        failed="not finite" if failed else None,
        seconds={},
        pass_at_1=[0.5] if failed else [0.5, 0.9],
        evaluated_tokens=[],
        series={"reward/mean": rewards, "tokens/forward_equivalents": [cost] * len(rewards)},
        means={},
    )


WHOLE = result([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
BROKEN = result([0.9, 0.9, 0.9], failed=True)


def test_a_step_that_was_never_made_counts_nothing() -> None:
    assert (late_reward(WHOLE), mean_reward(WHOLE)) == pytest.approx((0.75, 0.45))
    assert (late_reward(BROKEN), mean_reward(BROKEN)) == pytest.approx((0.0, 2.7 / 8))
    assert final_pass_at_1(BROKEN) == 0.0 and final_pass_at_1(WHOLE) == 0.9
    assert common_compute([{1: WHOLE, 2: BROKEN}]) == 80.0


def test_a_budgets_last_quarter_is_weighed_by_what_was_spent_in_it() -> None:
    assert reward_at(80.0)(WHOLE) == pytest.approx((0.7 + 0.8) / 2)
    assert reward_at(76.0)(WHOLE) == pytest.approx((0.6 * 3 + 0.7 * 10 + 0.8 * 6) / 19)
    assert reward_at(32.0)(BROKEN) == pytest.approx(0.9 * 6 / 8)  # 2 of the quarter's 8 were never spent
    assert reward_at(80.0)(BROKEN) == 0.0
    assert reward_at(80.0)(result([0.5] * 4, cost=20.0)) == pytest.approx(0.5)


def test_an_arm_that_breaks_off_does_not_gain_by_it() -> None:
    arms = {1: WHOLE, 2: WHOLE, 3: WHOLE}, {1: WHOLE, 2: BROKEN, 3: BROKEN}
    for measure in (late_reward, reward_at(80.0), final_pass_at_1):
        found = difference(*arms, measure)
        assert found.mean > 0 and found.seeds == 3 and math.isfinite(found.paired_error)


def test_a_difference_has_both_errors() -> None:
    better, worse = [0.5, 0.7, 0.9], [0.4, 0.5, 0.9]
    arms = [{seed: result([value] * 8) for seed, value in enumerate(values)} for values in (better, worse)]
    found = difference(arms[0], arms[1], mean_reward)
    assert found.mean == pytest.approx(0.1)
    assert found.paired_error == pytest.approx(0.1 / math.sqrt(3))
    assert found.unpaired_error == pytest.approx(math.sqrt((0.04 + 0.07) / 3))


def test_noise_is_no_collapse() -> None:
    assert not has_collapsed(result([0.5, 0.6, 0.55, 0.5, 0.6, 0.5, 0.45, 0.5]))
    assert not has_collapsed(WHOLE)
    assert has_collapsed(result([0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2, 0.1]))
    assert has_collapsed(BROKEN) and has_collapsed(result([], failed=True))


def test_results_of_another_recipe_are_missing_not_taken(tmp_path: Path) -> None:
    for job in tuning_jobs(Variant()):
        reward = {"narrow": 0.2, "middle": 0.9, "wide": 0.4}[job.experiment.partition("/")[2]]
        replace(result([reward] * 8), digest=job.digest).save(tmp_path / f"{job.name}.json")
    assert load_runs(tmp_path).missing == ()
    tune(load_runs(tmp_path))
    chosen = json.loads((tmp_path / "tuned.json").read_text(encoding="utf-8"))
    assert {choice["clip"] for choice in chosen.values()} == {"middle"}
    clips = {arm.name: arm.clips["middle"] for arm in ARMS}
    one, two, *_ = main_jobs(clips, Variant())
    replace(WHOLE, digest=one.digest).save(tmp_path / f"{one.name}.json")
    replace(WHOLE, digest="of older clips").save(tmp_path / f"{two.name}.json")
    runs = load_runs(tmp_path)
    assert list(runs.of(MAIN.name, one.arm)) == [one.seed]
    assert one.name not in runs.missing and two.name in runs.missing
