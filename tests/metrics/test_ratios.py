"""How the ratios spread, what they are made of and how many samples they leave, against plain loops."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.report.steps import TWO_GROUPS, batch, metrics, report, trained


def line_of(*parts: Sequence[float], **actor: Any) -> dict[str, Any]:
    """Of mini-batches whose sequences, of two tokens, have these ratios."""
    ratios = [ratio for part in parts for ratio in part]
    places = iter(range(len(ratios)))
    found = [
        report(*(trained(next(places), number, 2, 0, ratio) for ratio in part)) for number, part in enumerate(parts)
    ]
    return metrics(batch([[2] * len(ratios)], [[0.0] * len(ratios)]), *found, **actor)


def quantile(values: Sequence[float], at: float) -> float:
    """Linear between the sorted values, the first at 0 and the last at 1."""
    place = at * (len(values) - 1)
    low = math.floor(place)
    ordered = sorted(values)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])


def test_the_quantiles_are_of_the_sequence_ratios_in_the_step_and_in_each_mini_batch() -> None:
    parts: list[list[float]] = [[1.0, 1.0, 1.0], [0.7, 1.3, 0.9, 1.05, 1.2], []]
    line, every = line_of(*parts), [*parts[0], *parts[1]]
    levels = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    assert line["ratio/sequence_quantiles"] == pytest.approx([quantile(every, at) for at in levels])
    first, second, third = line["ratio/sequence_quantiles_by_mini_batch"]
    assert first == [1.0] * 7
    assert second == pytest.approx([quantile(parts[1], at) for at in levels])
    assert len(third) == 7 and all(math.isnan(value) for value in third)


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_the_effective_sample_is_of_the_sequences_where_they_are_weighed(level: str) -> None:
    line = line_of([1.0, 1.0], [0.5, 2.0, 1.0], [], importance_sampling_level=level)
    assert line["ratio/effective_fraction"] == pytest.approx(5.5**2 / (5 * (1 + 1 + 0.25 + 4 + 1)))
    first, second, third = line["ratio/effective_fraction_by_mini_batch"]
    assert first == 1 and second == pytest.approx(3.5**2 / (3 * 5.25)) and math.isnan(third)


def test_the_effective_sample_is_of_the_tokens_at_their_level() -> None:
    tokens = [[1.0, 1.0, 1.0], [0.5, 3.0], [2.0, 1.0, 0.25, 4.0]]
    items = [
        trained(
            index,
            min(index, 1),
            len(one),
            0,
            ratio=9.0,  # of no consequence
            ratio_sum=sum(one),
            ratio_square_sum=sum(ratio**2 for ratio in one),
        )
        for index, one in enumerate(tokens)
    ]
    made = batch([[3, 2, 4]], [[0.0] * 3])
    line = metrics(made, report(items[0]), report(*items[1:]), importance_sampling_level="token")
    every = [ratio for one in tokens for ratio in one]
    assert line["ratio/effective_fraction"] == pytest.approx(sum(every) ** 2 / (9 * sum(r**2 for r in every)))
    stale = every[3:]
    wanted = [1.0, sum(stale) ** 2 / (6 * sum(r**2 for r in stale))]
    assert line["ratio/effective_fraction_by_mini_batch"] == pytest.approx(wanted)


def origin_line(old_logprobs: str) -> dict[str, Any]:
    """Two mini-batches of two sequences; the engine's log-likelihoods are -1, π_old's are given here."""
    items = [
        trained(0, 0, 2, 0, ratio=1.1, old=[-1.0, -0.9]),
        trained(1, 0, 4, 0, ratio=0.9, old=[-1.0, -1.0, -1.0, -0.6]),
        trained(2, 1, 3, 0, ratio=2.0, old=[-1.3, -0.7, -1.3]),
        trained(3, 1, 1, 0, ratio=0.4, old=[-2.0]),
    ]
    made = batch([[2, 4, 3, 1]], [[0.0] * 4])
    return metrics(made, report(*items[:2]), report(*items[2:]), old_logprobs=old_logprobs)


def root_mean_square(*values: float) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def test_a_ratio_to_the_engine_is_split_into_staleness_and_mismatch() -> None:
    line = origin_line("recompute")
    moved, apart = [math.log(ratio) for ratio in (1.1, 0.9, 2.0, 0.4)], [0.05, 0.1, -0.1, -1.0]
    assert line["ratio/staleness_log_std"] == pytest.approx(root_mean_square(*moved))
    assert line["ratio/mismatch_log_std"] == pytest.approx(root_mean_square(*apart))
    for name, values in (("staleness", moved), ("mismatch", apart)):
        wanted = [root_mean_square(*values[:2]), root_mean_square(*values[2:])]
        assert line[f"ratio/{name}_log_std_by_mini_batch"] == pytest.approx(wanted)


def test_a_mini_batch_that_trained_nothing_takes_no_part_in_staleness_and_mismatch() -> None:
    line, without = line_of([1.1, 0.9], [], old_logprobs="recompute"), line_of([1.1, 0.9], old_logprobs="recompute")
    for name in ("staleness", "mismatch"):
        assert line[f"ratio/{name}_log_std"] == without[f"ratio/{name}_log_std"]
        assert math.isnan(line[f"ratio/{name}_log_std_by_mini_batch"][1])


def test_where_the_engine_is_the_old_policy_the_first_mini_batchs_mismatch_is_taken_off_the_later_ones() -> None:
    line = origin_line("engine")
    first, second = root_mean_square(math.log(1.1), math.log(0.9)), root_mean_square(math.log(2.0), math.log(0.4))
    left = math.sqrt(second**2 - first**2)
    assert line["ratio/mismatch_log_std"] == pytest.approx(first)
    mismatch, staleness = (line[f"ratio/{name}_log_std_by_mini_batch"] for name in ("mismatch", "staleness"))
    assert mismatch == pytest.approx([first, first])
    assert staleness == pytest.approx([0, left])
    assert line["ratio/staleness_log_std"] == pytest.approx(left / math.sqrt(2))


def test_ratios_that_are_not_finite_or_that_do_not_exist_still_make_a_line() -> None:
    for ratio in (0.0, math.inf, math.nan):
        line = line_of([ratio, 1.0])
        assert not math.isfinite(line["ratio/staleness_log_std"])
    line = metrics(TWO_GROUPS, report())
    assert len(line["ratio/sequence_quantiles"]) == 7
    assert all(math.isnan(value) for value in line["ratio/sequence_quantiles"])
    for name in ("effective_fraction", "staleness_log_std", "mismatch_log_std"):
        assert math.isnan(line[f"ratio/{name}"]) and all(map(math.isnan, line[f"ratio/{name}_by_mini_batch"]))


def test_a_corrections_weight_is_a_mean_over_tokens_and_what_it_masks_is_counted() -> None:
    items = [
        trained(0, 0, 2, 0, 1.0, correction_weight=0.5),
        trained(1, 0, 6, 0, 1.0, correction_weight=1.5, num_masked=3),
        trained(2, 1, 2, 0, 1.0, correction_weight=0.0, num_masked=2),
    ]
    reports = report(*items[:2]), report(items[2])
    made = batch([[2, 6, 2]], [[0.0] * 3])
    for actor in ({"correction": "mis"}, {"opsm_delta": 0.1}):
        line = metrics(made, *reports, **actor)
        assert line["correction/weight_mean"] == pytest.approx((2 * 0.5 + 6 * 1.5) / 10)
        assert line["correction/masked_fraction"] == 0.5
        assert line["correction/masked_fraction_by_mini_batch"] == [3 / 8, 1]
    assert not any(name.startswith("correction/") for name in metrics(made, *reports))


def test_the_mismatch_of_a_sequence_is_in_double_precision() -> None:
    old = torch.full((1000,), -1.0) + 1e-4
    made = batch([[1000]], [[0.0]])
    line = metrics(made, report(trained(0, 0, 1000, 0, 1.0, old=old.tolist())))
    assert line["ratio/mismatch_log_std"] == pytest.approx(1e-4, rel=1e-3)
