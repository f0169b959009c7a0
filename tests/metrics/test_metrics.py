"""The numbers of a step against their definitions, on batches small enough to do by hand."""

import math
import statistics

import pytest
import torch
from tests.report.steps import SECONDS, TWO_GROUPS, batch, metrics, report, trained
from tests.samples import changed

from gspo.errors import FailureKind
from gspo.metrics.step import peak_bytes, step_metrics
from gspo.recipe.sections import ActorConfig
from gspo.types import Failure, Score


def test_rewards_are_averaged_over_scored_responses() -> None:
    line = metrics(batch([[1, 1], [1, 1]], [[1.0, None], [0.0, 0.25]]), report())
    assert line["reward/mean"] == pytest.approx(1.25 / 3)
    assert line["reward/std"] == pytest.approx(statistics.stdev([1.0, 0.0, 0.25]))
    assert line["reward/unscored_fraction"] == 0.25


def test_masked_responses_are_counted_by_what_failed_and_are_unscored_too() -> None:
    kinds: list[FailureKind | None] = ["raised", "crashed", "timed_out", "invalid", "invalid", None, None, None]
    scores = tuple(
        Score(
            reward=None if kind or number == 7 else 1.0,
            parts={"f": None},
            failure=kind and Failure(kind=kind, message="f"),
        )
        for number, kind in enumerate(kinds)
    )
    line = metrics(batch([[1] * 8], [[None] * 8], scores=scores), report())
    assert line["reward/masked_fraction"] == 5 / 8 and line["reward/unscored_fraction"] == 6 / 8
    assert [line[f"reward/{kind}_rollouts"] for kind in ("raised", "crashed", "timed_out", "invalid")] == [1, 1, 1, 2]


def test_a_group_has_zero_variance_where_its_scored_rewards_are_equal() -> None:
    rewards: list[list[float | None]] = [[1.0, 1.0], [1.0, 0.0], [None, 1.0], [None, None]]
    line = metrics(batch([[1, 1]] * 4, rewards), report())
    assert line["group/zero_variance_fraction"] == 0.75


def test_nothing_scored_at_all_is_still_a_line() -> None:
    line = metrics(batch([[1, 1]], [[None, None]]), report())
    assert line["reward/unscored_fraction"] == 1 and line["group/zero_variance_fraction"] == 1
    assert math.isnan(line["reward/mean"])  # there is none: null in the file


def test_lengths_and_cut_responses_are_counted_over_all_responses() -> None:
    line = metrics(TWO_GROUPS, report())
    assert line["response/mean_tokens"] == 22 / 4
    assert line["response/truncated_fraction"] == 0.25


def test_a_cut_response_runs_on_where_a_mark_of_a_turns_end_stands_in_it() -> None:
    texts = ["7<|eot|>7", "7 USER: 8?", "7 <|eot|", "eot USER"]
    for reason, fraction in (("length", 0.5), ("stop", 0.0)):
        made = changed(TWO_GROUPS, text=texts, finish_reason=[reason] * 4)
        line = step_metrics(made, [report().report], SECONDS, ActorConfig(), turn_marks=["<|eot|>", "USER:"])
        assert line["response/run_on_fraction"] == fraction
    assert metrics(TWO_GROUPS, report())["response/run_on_fraction"] == 0.0


def test_the_clipped_token_fraction_weighs_a_response_by_its_tokens() -> None:
    reports = [
        report(trained(0, 0, tokens=2, clipped=0, ratio=1.0)),
        report(trained(1, 1, tokens=4, clipped=0, ratio=0.9), trained(3, 1, tokens=10, clipped=10, ratio=1.2)),
    ]
    line = metrics(TWO_GROUPS, *reports)
    assert line["clip/token_fraction"] == pytest.approx(10 / 16)  # not the mean of 0 and 10/14, nor 1/3
    assert line["clip/sequence_fraction"] == pytest.approx(1 / 3)
    assert line["clip/token_fraction_by_mini_batch"] == pytest.approx([0, 10 / 14])


def test_a_response_with_one_clipped_token_counts_as_clipped() -> None:
    line = metrics(
        batch([[8, 8]], [[1.0, 0.0]]), report(trained(0, 0, tokens=8, clipped=1, ratio=1.0), trained(1, 0, 8, 0, 1.0))
    )
    assert line["clip/sequence_fraction"] == 0.5
    assert line["clip/token_fraction"] == pytest.approx(1 / 16)


def test_the_ratios_are_a_mean_over_sequences_and_the_extremes() -> None:
    items = [
        trained(number, 0, tokens=number + 1, clipped=0, ratio=ratio) for number, ratio in enumerate([0.8, 1.0, 1.5])
    ]
    line = metrics(batch([[1, 2, 3]], [[1.0, 0.0, 0.5]]), report(*items))
    assert line["ratio/sequence_mean"] == pytest.approx(1.1)
    assert (line["ratio/sequence_min"], line["ratio/sequence_max"]) == (0.8, 1.5)


def test_a_step_that_trained_nothing_has_no_ratio_and_nothing_clipped() -> None:
    line = metrics(TWO_GROUPS, report(), report())
    assert math.isnan(line["ratio/sequence_mean"]) and math.isnan(line["policy/entropy"])
    assert (line["clip/token_fraction"], line["clip/sequence_fraction"]) == (0, 0)
    assert line["clip/token_fraction_by_mini_batch"] == [0, 0]
    assert line["throughput/trained_tokens_per_second"] == 0


def test_the_policys_numbers_are_means_over_updates_and_the_entropy_over_tokens() -> None:
    reports = [
        report(trained(0, 0, 2, 0, 1.0, entropy=1.0), loss=0.5, norm=2.0, rate=1e-4),
        report(trained(2, 1, 6, 0, 1.0, entropy=3.0), loss=-0.1, norm=4.0, rate=3e-4, applied=False),
    ]
    line = metrics(TWO_GROUPS, *reports)
    assert line["policy/loss"] == pytest.approx(0.2)
    assert line["policy/grad_norm"] == 3
    assert line["policy/entropy"] == pytest.approx((2 * 1 + 6 * 3) / 8)
    assert line["policy/learning_rate"] == 3e-4  # the last update's
    assert line["policy/skipped_updates"] == 1


def test_the_mismatch_is_token_by_token_between_engine_and_policy() -> None:
    line = metrics(
        TWO_GROUPS,
        report(trained(1, 0, 4, 0, 1.0, old=[-1.0, -1.0, -1.0, -0.8])),
        report(trained(0, 1, 2, 0, 1.0, old=[-1.5, -1.0])),
    )
    assert line["mismatch/logprob_gap_mean"] == pytest.approx((0.5 + 0.2) / 6)
    assert line["mismatch/logprob_gap_max"] == pytest.approx(0.5)
    assert metrics(TWO_GROUPS, report())["mismatch/logprob_gap_mean"] == 0


def test_throughputs_divide_tokens_by_the_seconds_of_their_stage() -> None:
    line = metrics(TWO_GROUPS, report(trained(0, 0, 2, 0, 1.0), trained(3, 0, 10, 0, 1.0)))
    assert line["throughput/generated_tokens_per_second"] == 22 / 2.0
    assert line["throughput/trained_tokens_per_second"] == 12 / 4.0
    for stage, seconds in SECONDS.items():
        assert line[f"time/{stage}_seconds"] == seconds


def test_several_functions_get_a_mean_each_over_the_responses_they_apply_to() -> None:
    parts: list[dict[str, float | None]] = [
        {"a": 1.0, "b": None},
        {"a": 0.0, "b": 4.0},
        {"a": 1.0, "b": 2.0},
        {"a": 1.0, "b": None},
    ]
    scores = tuple(Score(reward=1.0, parts=part) for part in parts)
    line = metrics(batch([[1, 1], [1, 1]], [[1.0, 1.0], [1.0, 1.0]], scores=scores), report())
    assert (line["reward/a/mean"], line["reward/b/mean"]) == (0.75, 3.0)
    assert "reward/f/mean" not in metrics(TWO_GROUPS, report())  # the only one is reward/mean


def test_the_peak_of_memory_never_falls_and_counts_bytes() -> None:
    first = peak_bytes()
    if not torch.cuda.is_available():  # there it is the GPU's memory, of which nothing need be held
        assert first > 16 * 2**20  # Python with torch, in bytes and not in KiB
    assert peak_bytes() >= first
