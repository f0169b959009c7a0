"""What is clipped, and of whom: by mini-batch, by side and by length, counted by hand."""

import math

import pytest
import torch
from tests.report.steps import TWO_GROUPS, after_update, batch, metrics, report, trained

from gspo.metrics.sequences import trained_rows

LENGTHS = [2, 4, 6, 10, 3, 20, 5, 8]


def step() -> dict[str, object]:
    """Three mini-batches, of which the last trained nothing; advantages +1, -1, +1, … and 0 for the last response."""
    made = batch([LENGTHS], [[0.0] * 8], advantage=(1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, 0.0))
    clipped = [1, 0, 6, 5, 0, 20, 0, 8]
    items = [trained(index, index // 4, LENGTHS[index], clipped[index], ratio=1.0) for index in range(8)]
    return metrics(made, report(*items[:4]), report(*items[4:]), report(clip_range=(0.125, 0.25)))


def test_sequences_and_tokens_are_counted_in_each_mini_batch() -> None:
    line = step()
    assert line["clip/sequence_fraction_by_mini_batch"] == [3 / 4, 2 / 4, 0]
    assert line["clip/token_fraction_by_mini_batch"] == [12 / 22, 28 / 36, 0]


def test_each_side_has_the_tokens_of_its_own_sequences_for_denominator() -> None:
    line = step()
    assert line["clip/token_fraction_positive"] == 7 / (2 + 6 + 3 + 5)
    assert line["clip/token_fraction_negative"] == 25 / (4 + 10 + 20)  # without the response of advantage 0
    positive, negative = (line[f"clip/token_fraction_{side}_by_mini_batch"] for side in ("positive", "negative"))
    assert isinstance(positive, list) and isinstance(negative, list)
    assert positive[:2] == [7 / 8, 0] and negative[:2] == [5 / 14, 20 / 20]
    assert math.isnan(positive[2]) and math.isnan(negative[2])


def test_the_parts_by_length_are_the_quartiles_of_the_trained_responses() -> None:
    line = step()  # sorted: 2 3 | 4 5 | 6 8 | 10 20
    assert line["response/length_quartiles"] == [3.75, 5.5, 8.5, 20]
    assert line["clip/token_fraction_by_length"] == [1 / 5, 0, 14 / 14, 25 / 30]
    assert line["clip/sequence_fraction_by_length"] == [1 / 2, 0, 1, 1]


def test_equal_lengths_share_a_part_and_an_empty_part_has_no_fraction() -> None:
    items = [trained(0, 0, 7, 7, 1.0), trained(1, 0, 7, 0, 1.0)]
    line = metrics(batch([[7, 7]], [[1.0, 0.0]]), report(*items))
    assert line["response/length_quartiles"] == [7, 7, 7, 7]
    assert line["clip/token_fraction_by_length"][0] == 0.5
    assert all(math.isnan(part) for part in line["clip/token_fraction_by_length"][1:])
    assert all(math.isnan(part) for part in line["clip/sequence_fraction_by_length"][1:])


@pytest.mark.parametrize("seed", range(5))
def test_every_response_is_in_the_first_part_whose_bound_it_does_not_exceed(seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(1, 12, (30,)).tolist()
    items = [trained(index, 0, length, 0, 1.0) for index, length in enumerate(lengths)]
    made = batch([lengths], [[0.0] * 30])
    rows = trained_rows(after_update(made, report(*items)).samples)
    bounds = metrics(made, report(*items))["response/length_quartiles"]
    assert rows["num_tokens"] == lengths
    assert rows["quarter"] == [next(part for part, bound in enumerate(bounds) if n <= bound) for n in lengths]


def test_the_range_in_force_is_the_updates_and_not_the_recipes() -> None:
    line = step()
    assert (line["clip/low"], line["clip/high"]) == (0.125, 0.25)


def test_a_step_that_trained_nothing_has_no_sides_and_no_lengths() -> None:
    line = metrics(TWO_GROUPS, report())
    assert line["clip/sequence_fraction_by_mini_batch"] == [0]
    assert math.isnan(line["clip/token_fraction_positive"]) and math.isnan(line["clip/token_fraction_negative"])
    for name in ("response/length_quartiles", "clip/token_fraction_by_length", "clip/sequence_fraction_by_length"):
        assert len(line[name]) == 4 and all(math.isnan(value) for value in line[name])
