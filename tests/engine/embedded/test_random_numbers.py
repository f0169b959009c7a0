"""Keys and numbers of responses: each its own stream, which can be had from any token on."""

import itertools

import pytest
import torch

from gspo.engine.embedded.sampling import uniform_numbers
from gspo.rollout.keys import SamplingKey


def keys_of(key: SamplingKey, query_ids: list[str], num_samples: int) -> list[int]:
    return [number for group in key.of_groups(query_ids, num_samples) for number in group]


KEYS = keys_of(SamplingKey(seed=0, step=1), [f"data:{number}" for number in range(40)], 5)


def test_seed_step_query_and_number_each_give_another_key() -> None:
    keys = [
        key
        for seed, step in itertools.product([0, 1, 11, 2**64 - 1], [0, 1, 11])
        for key in keys_of(SamplingKey(seed=seed, step=step), ["a:1", "a:11", "a:1 1", "b:1", "1 a:1", ""], 12)
    ]
    assert len(set(keys)) == len(keys) == 4 * 3 * 6 * 12


def test_a_response_has_its_key_whatever_stands_beside_it() -> None:
    key = SamplingKey(seed=3, step=7)
    assert keys_of(key, ["x", "y"], 2) == [*keys_of(key, ["x"], 2), *keys_of(key, ["y"], 2)]
    assert keys_of(key, ["y", "x"], 2)[2:] == keys_of(key, ["x"], 5)[:2]


def test_a_query_that_stands_twice_goes_on_counting_its_samples() -> None:
    key = SamplingKey(seed=3, step=7)
    x, y = keys_of(key, ["x"], 4), keys_of(key, ["y"], 2)
    assert keys_of(key, ["x", "y", "x"], 2) == [*x[:2], *y, *x[2:]]


def test_keys_stay_what_they_are_and_any_id_has_one() -> None:
    """A resumed run must draw what it drew, in another process, too."""
    (key,) = keys_of(SamplingKey(seed=0, step=1), ["data:1"], 1)
    assert key == 329151827304503016949101005978311973385
    assert uniform_numbers([key], [0], 2).tolist() == [[0.5708607132069384, 0.19123081172896594]]
    strange = keys_of(SamplingKey(seed=0, step=1), ["\udcff.jsonl:1", "\N{GRINNING FACE}:1", "\ud800:1"], 1)
    assert len(set(strange)) == 3


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 5, 250, 256, 1000])
def test_a_stream_goes_on_from_any_token_as_if_all_before_it_had_been_drawn(start: int) -> None:
    whole = uniform_numbers(KEYS[:3], [0, 0, 0], 1100)
    part = uniform_numbers(KEYS[:3], [start, 0, start + 1], 90)
    for row, begin in enumerate((start, 0, start + 1)):
        assert torch.equal(part[row], whole[row, begin : begin + 90])


def test_numbers_are_uniform_over_tokens_and_over_responses() -> None:
    """Kolmogorov and Smirnov's distance of all numbers, of one response's, and of all responses' first."""
    numbers = uniform_numbers(KEYS, [0] * len(KEYS), 2000)
    assert numbers.dtype == torch.float64 and numbers.min() >= 0 and numbers.max() < 1
    for sample in (numbers.flatten(), numbers[0], numbers[:, 0], numbers[:, 1999]):
        ordered, size = sample.sort().values, len(sample)
        distance = (ordered - (torch.arange(size, dtype=torch.float64) + 0.5) / size).abs().max()
        assert distance < 1.9 / size**0.5  # p > 0.001


def test_streams_of_neighbours_and_neighbours_in_a_stream_are_not_correlated() -> None:
    numbers = uniform_numbers(KEYS, [0] * len(KEYS), 2000) - 0.5
    neighbours = [(numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])]
    for one, other in [*neighbours, (numbers[:-1, :-1], numbers[1:, 1:])]:
        correlation = (one * other).mean() * 12
        assert abs(correlation) < 4 / one.numel() ** 0.5
    assert len(numbers.flatten().unique()) == numbers.numel()
