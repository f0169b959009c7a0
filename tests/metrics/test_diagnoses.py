"""Named diagnoses: each one holds where it should and nowhere else."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.metrics.words import WINDOW, diagnoses, early_diagnoses
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import ActorConfig
from gspo.run.console import Display
from gspo.run.recorder import Recorder

TINY = Path(__file__).parents[1] / "tiny.yaml"

HEALTHY: dict[str, Any] = {
    "group/zero_variance_fraction": 0.3,
    "reward/mean": 0.5,
    "reward/unscored_fraction": 0.0,
    "clip/token_fraction": 0.15,
    "response/truncated_fraction": 0.05,
    "mismatch/logprob_gap_mean": 1e-4,
    "policy/skipped_updates": 0.0,
}


def found(actor: ActorConfig | None = None, **changes: Any) -> dict[str, str]:
    """Of a run whose every step is the healthy one with these changes (`__` for `/`)."""
    line = {**HEALTHY, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return diagnoses([line] * WINDOW, actor)


STILL: dict[str, Any] = {"response/mean_tokens": 100.0, "ratio/sequence_min": 0.998, "ratio/sequence_max": 1.002}


@pytest.mark.parametrize(
    ("changes", "num_steps", "holds"),
    [
        ({}, 4, False),
        ({}, 5, True),
        ({}, 19, True),
        ({}, 20, False),  # later it may have come to rest
        ({"ratio/sequence_min": 0.99}, 9, False),
        ({"ratio/sequence_max": 1.01}, 9, False),
        ({"ratio/sequence_max": 1.01, "response/mean_tokens": 16.0}, 9, True),  # short responses' ratios are wider
        ({"response/mean_tokens": 8000.0}, 9, False),
        ({"ratio/sequence_min": None}, 9, False),
    ],
)
def test_a_policy_that_hardly_moves_is_named_in_its_first_steps(
    changes: dict[str, Any], num_steps: int, holds: bool
) -> None:
    actor = ActorConfig(mini_batches=4)
    lines = [{**HEALTHY, **STILL, **changes}] * num_steps
    assert ("not_moving" in diagnoses(lines, actor)) == ("not_moving" in early_diagnoses(lines, actor)) == holds
    assert "not_moving" not in diagnoses(lines, ActorConfig(mini_batches=1))  # then every ratio is 1


def test_tools_that_fail_are_named_early() -> None:
    for fraction, holds in [(0.85, False), (0.95, True)]:
        lines = [{**HEALTHY, "tools/error_fraction": fraction}] * 5
        assert ("failing_tools" in early_diagnoses(lines, ActorConfig())) == holds


def test_what_leaves_nothing_to_learn_from_comes_before_what_costs_a_part() -> None:
    bad = {"group/zero_variance_fraction": 0.88, "response/truncated_fraction": 0.75, "policy/skipped_updates": 1.0}
    lines = [{**HEALTHY, **STILL, **bad, "ratio/effective_fraction": 0.1}] * WINDOW
    order = [*diagnoses(lines, ActorConfig(mini_batches=4))]
    assert order == ["not_finite", "no_signal", "not_moving", "truncated", "low_effective_sample"]
    assert [*early_diagnoses(lines[:5], ActorConfig(mini_batches=4))] == ["no_signal", "not_moving"]


def test_a_healthy_run_and_an_empty_one_have_none() -> None:
    assert found() == {}
    assert diagnoses([]) == {}


@pytest.mark.parametrize("value", [None, "x", [1.0], {}, math.nan, math.inf, 1e308, 10**400])
def test_what_is_no_number_diagnoses_nothing(value: Any) -> None:
    names = [*HEALTHY, "gradient/signal_to_noise", "critic/explained_variance", "ratio/effective_fraction"]
    assert diagnoses([dict.fromkeys(names, value)] * 30) == {}
    shares = ("gradient/share_by_length", "response/token_share_by_length")
    assert diagnoses([dict.fromkeys(shares, [value] * 4)] * 30) == {}


@pytest.mark.parametrize(
    ("name", "metric", "bad", "good"),
    [
        ("no_signal", "group/zero_variance_fraction", 0.75, 0.74),
        ("clip_too_narrow", "clip/token_fraction", 0.6, 0.59),
        ("clip_inert", "clip/token_fraction", 0.0, 0.001),
        ("truncated", "response/truncated_fraction", 0.25, 0.24),
        ("unscored", "reward/unscored_fraction", 0.2, 0.19),
        ("engine_mismatch", "mismatch/logprob_gap_mean", 0.05, 0.049),
        ("not_finite", "policy/skipped_updates", 1.0, 0.0),
        ("engine_failures", "engine/retries", 1.0, 0.0),
        ("engine_failures", "engine/restarts", 1.0, 0.0),
    ],
)
def test_a_diagnosis_holds_from_its_threshold_on_and_alone(name: str, metric: str, bad: float, good: float) -> None:
    assert diagnoses([{**HEALTHY, metric: bad}] * WINDOW).keys() == {name}
    assert diagnoses([{**HEALTHY, metric: good}] * WINDOW) == {}


@pytest.mark.parametrize(("run_on", "is_named"), [(0.2, True), (0.4, True), (0.19, False), (0.0, False), (None, False)])
def test_responses_that_go_on_behind_their_turn_need_an_end_and_not_more_tokens(run_on: Any, is_named: bool) -> None:
    sentence = found(response__truncated_fraction=0.4, response__run_on_fraction=run_on)["truncated"]
    assert ("rollout.stop_tokens" in sentence) == is_named and ("raise it" in sentence) != is_named
    assert "40% of responses cut off" in sentence


def test_the_sentences_give_the_number_and_the_key_to_change() -> None:
    assert found(group__zero_variance_fraction=0.92)["no_signal"].startswith("92% of groups have equal rewards")
    narrow = found(clip__token_fraction=0.97)["clip_too_narrow"]
    assert "97%" in narrow and "actor.clip_low" in narrow and "actor.clip_high" in narrow
    assert "rollout.max_new_tokens" in found(response__truncated_fraction=0.4)["truncated"]


def test_groups_of_equal_rewards_train_with_a_teacher() -> None:
    assert found(group__zero_variance_fraction=1.0, teacher__kl=0.2) == {}


def test_no_signal_says_on_which_side_the_task_lies() -> None:
    assert "easy" in found(group__zero_variance_fraction=0.9, reward__mean=0.95)["no_signal"]
    assert "hard" in found(group__zero_variance_fraction=0.9, reward__mean=0.02)["no_signal"]
    penalised = found(group__zero_variance_fraction=0.9, reward__mean=0.1, reward__overlong_penalty__mean=-0.9)
    assert "solved" in penalised["no_signal"]  # right answers, all of them long


def test_rounding_is_named_where_it_is_in_the_ratio_and_half_as_wide_as_the_range() -> None:
    engine = ActorConfig(old_logprobs="engine", clip_low=3e-3)
    assert found(engine, ratio__mismatch_log_std=1.5e-3).keys() == {"clipped_noise"}
    assert found(engine, ratio__mismatch_log_std=1.4e-3) == {}
    assert found(ActorConfig(old_logprobs="recompute", clip_low=3e-3), ratio__mismatch_log_std=1.0) == {}
    token = ActorConfig(old_logprobs="engine", importance_sampling_level="token")
    assert found(token, ratio__mismatch_log_std=0.15) == {}


def test_what_staleness_moves_is_not_blamed_on_the_engine() -> None:
    engine, far = ActorConfig(old_logprobs="engine", clip_low=3e-3), {"mismatch__logprob_gap_mean": 0.5}
    stale = found(engine, ratio__mismatch_log_std=0.05, staleness__mean=1.5, **far)
    assert stale.keys() == {"clipped_staleness"} and "1.5 in steps" in stale["clipped_staleness"]
    assert found(engine, ratio__mismatch_log_std=1e-4, staleness__mean=1.5, **far) == {}
    assert found(engine, ratio__mismatch_log_std=1e-4, staleness__mean=0.0, **far).keys() == {"engine_mismatch"}


def test_a_single_failure_of_a_server_is_named() -> None:
    line = {**HEALTHY, "engine/retries": 0.0, "engine/restarts": 0.0}
    (words,) = diagnoses([line] * 5 + [{**line, "engine/retries": 1.0, "engine/restarts": 1.0}]).values()
    assert "in 6 steps" in words and "2 times" in words


def test_an_unclipped_run_is_not_blamed_where_nothing_could_be_clipped() -> None:
    assert found(ActorConfig(mini_batches=1), clip__token_fraction=0.0) == {}
    nothing_trained = found(clip__token_fraction=0.0, group__zero_variance_fraction=1.0)
    assert nothing_trained.keys() == {"no_signal"}


def test_the_advice_on_an_inert_clip_range_fits_the_level() -> None:
    assert "ratio/sequence_min" in found(clip__token_fraction=0.0)["clip_inert"]
    assert "0.2" in found(ActorConfig(importance_sampling_level="token"), clip__token_fraction=0.0)["clip_inert"]


def test_only_the_last_steps_count() -> None:
    bad = {**HEALTHY, "response/truncated_fraction": 1.0}
    assert diagnoses([bad] * 50 + [HEALTHY] * WINDOW) == {}
    assert diagnoses([HEALTHY] * 50 + [bad] * WINDOW).keys() == {"truncated"}


@pytest.mark.parametrize("surrogate", ["cispo", "gmpo", "sapo", "dppo", "minirl", "reinforce"])
def test_a_surrogate_that_does_not_bound_the_ratio_is_not_blamed_for_clipping_nothing(surrogate: Any) -> None:
    assert found(ActorConfig(surrogate=surrogate), clip__token_fraction=0.0) == {}
    assert "clip_inert" in found(ActorConfig(surrogate="dapo"), clip__token_fraction=0.0)


@pytest.mark.parametrize("surrogate", ["gmpo", "dppo", "minirl", "dapo"])
def test_whatever_clips_can_clip_too_much(surrogate: Any) -> None:
    assert found(ActorConfig(surrogate=surrogate), clip__token_fraction=0.9).keys() == {"clip_too_narrow"}


def test_a_range_that_sets_itself_is_neither_too_narrow_nor_inert() -> None:
    for clipped in (0.0, 0.9):
        assert found(ActorConfig(clip_fraction=0.15), clip__token_fraction=clipped) == {}


@pytest.mark.parametrize(
    ("name", "metric", "bad", "good"),
    [
        ("low_effective_sample", "ratio/effective_fraction", 0.49, 0.5),
        ("noisy_gradient", "gradient/signal_to_noise", 0.049, 0.05),
    ],
)
def test_a_diagnosis_of_samples_or_gradient_holds_below_its_threshold(
    name: str, metric: str, bad: float, good: float
) -> None:
    assert diagnoses([{**HEALTHY, metric: bad}] * WINDOW).keys() == {name}
    assert diagnoses([{**HEALTHY, metric: good}] * WINDOW) == {}


def test_a_few_measurements_do_not_make_a_gradient_noisy() -> None:
    noisy, unknown = ({**HEALTHY, "gradient/signal_to_noise": value} for value in (-0.5, math.nan))
    assert diagnoses([noisy] * 4) == {}
    assert diagnoses([*[noisy] * 4, *[unknown] * 6]) == {}
    assert diagnoses([*[noisy] * 5, *[unknown] * 5]).keys() == {"noisy_gradient"}


def shares(gradient: list[float], tokens: list[float]) -> dict[str, Any]:
    return {**HEALTHY, "gradient/share_by_length": gradient, "response/token_share_by_length": tokens}


def test_long_responses_that_carry_the_gradient_are_named_unless_they_hold_as_many_tokens() -> None:
    for bad in (
        shares([0.1, 0.1, 0.2, 0.6], [0.2, 0.2, 0.2, 0.4 - 1e-9]),
        shares([0, 0, 0.25, 0.75], [0, 0, 0.5, 0.5]),
    ):
        assert diagnoses([bad] * WINDOW).keys() == {"length_share"}
    assert "75%" in diagnoses([bad])["length_share"] and "50%" in diagnoses([bad])["length_share"]
    for good in (
        shares([0, 0, 0.25, 0.75], [0, 0, 0.49, 0.51]),  # less than 1.5 times
        shares([0.1, 0.11, 0.2, 0.59], [0.2, 0.25, 0.25, 0.3]),
        shares([0.6, 0.2, 0.1, 0.1], [0.3, 0.25, 0.25, 0.2]),  # short ones
        shares([1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),  # all are as long
        shares([math.nan] * 4, [math.nan] * 4),
    ):
        assert diagnoses([good] * WINDOW) == {}
    assert diagnoses([shares([0.1, 0.2, 0.7, 0.0], [0.3, 0.3, 0.4, 0.0])]).keys() == {"length_share"}


@pytest.mark.parametrize("nothing", [None, math.nan, 0.5, [], [None] * 4])
def test_without_a_list_of_shares_nothing_is_said_of_the_lengths(nothing: Any) -> None:
    some = [0.0, 0.0, 0.25, 0.75]
    for line in (shares(nothing, some), shares(some, nothing), shares(nothing, nothing)):
        assert diagnoses([line] * WINDOW) == {}
    known = shares(some, [0.0, 0.0, 0.75, 0.25])
    assert diagnoses([*[known] * (WINDOW - 1), shares(nothing, some)]).keys() == {"length_share"}


def test_a_value_model_has_twenty_steps_to_become_better_than_the_mean() -> None:
    bad, good = ({**HEALTHY, "critic/explained_variance": value} for value in (0.0, 0.01))
    assert diagnoses([bad] * 19) == {}
    assert diagnoses([bad] * 20).keys() == {"critic_useless"}
    assert diagnoses([good] * 20) == {}
    outlier = {**HEALTHY, "critic/explained_variance": -50.0}
    assert diagnoses([*[good] * 19, outlier]) == {}
    assert diagnoses([*[bad] * 20, *[good] * 10]) == {}


def test_numbers_that_a_step_does_not_have_say_nothing() -> None:
    names = [*HEALTHY, "ratio/effective_fraction", "gradient/signal_to_noise", "critic/explained_variance"]
    for nothing in (math.nan, None):
        assert diagnoses([dict.fromkeys(names, nothing)] * 30) == {}
    assert diagnoses([{}] * 30) == {}
    cut = {**HEALTHY, "response/truncated_fraction": 0.9}
    assert diagnoses([cut, {**cut, "response/truncated_fraction": math.nan}]).keys() == {"truncated"}


def test_a_run_is_diagnosed_as_its_own_recipe_says_and_not_of_its_evaluation_before() -> None:
    for overrides, wanted in ((["actor.surrogate=sapo"], set[str]()), ([], {"clip_inert"})):
        lines = [{"step": 0}, *({**HEALTHY, "step": step, "clip/token_fraction": 0.0} for step in (1, 2))]
        directory = SimpleNamespace(metrics=lambda lines=lines: lines)
        recipe = load_recipe(TINY, [*overrides, "report.tokens=false"])
        run: Any = SimpleNamespace(recipe=recipe, directory=directory, display=Display(quiet=True))
        sentences = Recorder(run)._diagnose(run.recipe.actor, {})
        assert sentences.keys() == wanted
        assert all("in 2 steps" in sentence for sentence in sentences.values())
