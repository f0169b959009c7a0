"""Every metric has a definition that can be shown, and a metric of a run leads to its own."""

import pytest

from gspo.metrics.definitions import definition_of, families, general_name
from gspo.metrics.words import measures


def test_a_metric_is_defined_once_and_every_definition_says_something() -> None:
    names = [name for family in families() for name in family.metrics]
    assert len(names) == len(set(names)) > 90
    assert all(family.title and family.about for family in families())
    assert all(definition.text for family in families() for definition in family.metrics.values())


def test_formulas_are_as_written() -> None:
    ratios = next(family for family in families() if family.title == "Ratios")
    assert "s_i = exp(1/|y_i| Σ_t log π_θ/π_old)" in ratios.about
    experts = next(family for family in families() if family.title == "Experts")
    assert "|experts now \\ experts of π_old|" in experts.about


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("evaluation/held_out/pass_at_1", "evaluation/<set>/pass_at_1"),
        ("evaluation/pass_at_1/standard_error", "evaluation/<set>/standard_error"),
        ("evaluation/a b.c-é/mean_tokens", "evaluation/<set>/mean_tokens"),
        ("evaluation/x/y_z", "evaluation/<set>/y_z"),
        ("evaluation/x/my_fn/mean", "evaluation/<set>/<function>/mean"),
        ("reward/my_fn/mean", "reward/<function>/mean"),
        ("reward/a.b:c d/seconds", "reward/<function>/seconds"),
        ("reward/mean/mean", "reward/<function>/mean"),
        ("reward/rewards/x.py:f/mean", "reward/<function>/mean"),
        ("reward/mean", "reward/mean"),
        ("time/reward_seconds", "time/reward_seconds"),
        ("logged/f/mean", "logged/<function>/<name>"),
        ("logged/f/evaluation/x/seconds", "logged/<function>/<name>"),
        ("evaluation/a/logged/f/pass_at_1", "evaluation/<set>/logged/<function>/<name>"),
        ("evaluation/logged/pass_at_1", "evaluation/<set>/pass_at_1"),
    ],
)
def test_a_set_and_a_function_are_any(metric: str, name: str) -> None:
    assert general_name(metric) == name


def test_what_a_function_logs_is_no_score_of_a_set() -> None:
    line = {"evaluation/a/pass_at_1": 0.5, "evaluation/a/logged/f/pass_at_1": 1.0, "logged/f/pass_at_1": 1.0}
    assert [measure.name for measure in measures([line])] == ["evaluation/a/pass_at_1"]


def test_a_metric_of_a_run_leads_to_its_definition() -> None:
    (family,) = [family for family in families() if family.title == "Evaluation"]
    assert definition_of("evaluation/held_out/mean_tokens") == family.metrics["evaluation/<set>/mean_tokens"]
    assert definition_of("flux/capacity") is None
