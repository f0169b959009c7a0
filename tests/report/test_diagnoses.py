"""Named diagnoses: each one holds where it should and nowhere else."""

from typing import Any

import pytest

from gspo.report.diagnoses import WINDOW, diagnoses

HEALTHY: dict[str, Any] = {
    "group/zero_variance_fraction": 0.3,
    "reward/mean": 0.5,
    "reward/unscored_fraction": 0.0,
    "clip/token_fraction": 0.15,
    "response/truncated_fraction": 0.05,
    "mismatch/logprob_gap_mean": 1e-4,
    "policy/skipped_updates": 0.0,
}


def found(level: str = "sequence", mini_batches: int = 4, **changes: float) -> dict[str, str]:
    """Of a run whose every step is the healthy one with these changes (`__` for `/`)."""
    line = {**HEALTHY, **{name.replace("__", "/"): value for name, value in changes.items()}}
    return diagnoses([line] * WINDOW, level=level, mini_batches=mini_batches)


def test_a_healthy_run_and_an_empty_one_have_none() -> None:
    assert found() == {}
    assert diagnoses([]) == {}


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
    ],
)
def test_a_diagnosis_holds_from_its_threshold_on_and_alone(name: str, metric: str, bad: float, good: float) -> None:
    assert diagnoses([{**HEALTHY, metric: bad}] * WINDOW).keys() == {name}
    assert diagnoses([{**HEALTHY, metric: good}] * WINDOW) == {}


def test_the_sentences_give_the_number_and_the_key_to_change() -> None:
    assert found(group__zero_variance_fraction=0.92)["no_signal"].startswith("92% of groups have equal rewards")
    narrow = found(clip__token_fraction=0.97)["clip_too_narrow"]
    assert "97%" in narrow and "actor.clip_low" in narrow and "actor.clip_high" in narrow
    assert "rollout.max_new_tokens" in found(response__truncated_fraction=0.4)["truncated"]


def test_no_signal_says_on_which_side_the_task_lies() -> None:
    assert "easy" in found(group__zero_variance_fraction=0.9, reward__mean=0.95)["no_signal"]
    assert "hard" in found(group__zero_variance_fraction=0.9, reward__mean=0.02)["no_signal"]


def test_an_unclipped_run_is_not_blamed_where_nothing_could_be_clipped() -> None:
    assert found(clip__token_fraction=0.0, mini_batches=1) == {}
    nothing_trained = found(clip__token_fraction=0.0, group__zero_variance_fraction=1.0)
    assert nothing_trained.keys() == {"no_signal"}


def test_the_advice_on_an_inert_clip_range_fits_the_level() -> None:
    assert "ratio/sequence_min" in found(clip__token_fraction=0.0)["clip_inert"]
    assert "0.2" in found(clip__token_fraction=0.0, level="token")["clip_inert"]


def test_only_the_last_steps_count() -> None:
    bad = {**HEALTHY, "response/truncated_fraction": 1.0}
    assert diagnoses([bad] * 50 + [HEALTHY] * WINDOW) == {}
    assert diagnoses([HEALTHY] * 50 + [bad] * WINDOW).keys() == {"truncated"}
