"""The clip range that sets itself clips the fraction that was asked for, and does not run away."""

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.samples import query_of, sample_of

from gspo.learner.clip_range import clipping_scale, next_scale, with_clip_range
from gspo.objective import surrogate
from gspo.types import Sample, SequenceStats


def trained(ratios: Sequence[float], lengths: Sequence[int], advantages: Sequence[float]) -> list[Sample]:
    samples = []
    for index, (ratio, length) in enumerate(zip(ratios, lengths, strict=True)):
        stats = SequenceStats(
            mini_batch=index % 2,
            num_tokens=length,
            num_clipped=0,
            sequence_ratio=ratio,
            entropy_sum=0.0,
            old_logprobs=torch.zeros(length),
            log_ratios=torch.zeros(length),
        )
        samples.append(sample_of(query_of([4]), [5] * length, advantage=advantages[index], stats=stats))
    return samples


def ratio_of(sample: Sample) -> float:
    assert sample.stats is not None
    return sample.stats.sequence_ratio


def clipped_tokens(actor: Any, scale: float, samples: Sequence[Sample]) -> int:
    """By the objective itself, at the range that the scale gives."""
    used = with_clip_range(actor, (math.log(scale), 0.0))
    lengths = torch.tensor([sample.num_tokens for sample in samples])
    moved = torch.tensor([math.log(ratio_of(sample)) for sample in samples], dtype=torch.float64)
    found = surrogate(
        moved.repeat_interleave(lengths),
        torch.zeros(int(lengths.sum()), dtype=torch.float64),
        torch.tensor([sample.advantage for sample in samples], dtype=torch.float64),
        lengths,
        clip_low=used.clip_low,
        clip_high=used.clip_high,
    )
    return int(found.clipped.sum())


def drawn(seed: int, *, one_token: bool) -> list[Sample]:
    rng = random.Random(seed)
    ratios = [math.exp(rng.gauss(0, 0.01)) for _ in range(40)]
    lengths = [1 if one_token else rng.randint(1, 30) for _ in ratios]
    return trained(ratios, lengths, [rng.choice([-1, 1]) * rng.uniform(0.1, 2) for _ in ratios])


@pytest.mark.parametrize("sides", [(3e-4, 4e-4), (0.2, 0.05), (1e-3, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_step_it_was_found_on_has_exactly_the_asked_fraction_clipped(
    sides: tuple[float, float], seed: int, actor_of: Any
) -> None:
    samples = drawn(seed, one_token=True)
    for count in (2, 5, 10):  # of 40; rounding may fall on either side of a whole number
        actor = actor_of(clip_low=sides[0], clip_high=sides[1], clip_fraction=(count + 1e-6) / 40)
        scale = clipping_scale(actor, samples)
        # Only a sequence that has moved the way its advantage pushes it can be clipped.
        movable = sum((ratio_of(sample) > 1) == (sample.advantage > 0) for sample in samples)
        assert count < movable
        assert clipped_tokens(actor, scale, samples) == count


@pytest.mark.parametrize("seed", range(5))
def test_sequences_weigh_by_their_tokens_and_one_more_would_be_too_many(seed: int, actor_of: Any) -> None:
    samples = drawn(seed, one_token=False)
    total = sum(sample.num_tokens for sample in samples)
    actor = actor_of(clip_low=1e-3, clip_high=2e-3, clip_fraction=0.15)
    scale = clipping_scale(actor, samples)
    assert 0.15 * total - 30 < clipped_tokens(actor, scale, samples) <= 0.15 * total
    assert clipped_tokens(actor, scale * (1 - 1e-9), samples) > 0.15 * total


def ratios_of_width(actor: Any, width: float) -> list[Sample]:
    """Forty sequences whose scale is exactly this."""
    pushed = [1 + actor.clip_high * width * place / 33 for place in range(40)]
    return trained(pushed, [1] * 40, [1.0] * 40)


def test_what_stays_the_same_is_found_at_once_and_kept(actor_of: Any) -> None:
    actor = actor_of(clip_low=1e-3, clip_high=2e-3, clip_fraction=0.15)
    samples = ratios_of_width(actor, 7.0)
    wanted, scale = clipping_scale(actor, samples), None
    for _ in range(30):
        scale = next_scale(scale, actor, samples)
        assert scale is not None and math.exp(sum(scale)) == pytest.approx(wanted)


def test_what_shrinks_steadily_is_met_without_lagging_behind(actor_of: Any) -> None:
    actor, scale, misses = actor_of(clip_low=1e-3, clip_high=2e-3, clip_fraction=0.15), None, []
    for step in range(60):
        samples = ratios_of_width(actor, 50 * 0.85**step)
        if scale is not None:
            misses.append(sum(scale) - math.log(clipping_scale(actor, samples)))
        scale = next_scale(scale, actor, samples)
    assert misses[0] == pytest.approx(-math.log(0.85))  # the first is one step old
    assert max(map(abs, misses[30:])) < 0.01


def test_one_step_moves_the_range_by_half_of_its_surprise_and_a_little_trend(actor_of: Any) -> None:
    actor = actor_of(clip_low=1e-3, clip_high=2e-3, clip_fraction=0.15)
    samples = ratios_of_width(actor, 7.0)
    found = math.log(clipping_scale(actor, samples))
    level, trend = next_scale((2.0, 0.1), actor, samples) or (0.0, 0.0)
    assert level == pytest.approx(0.5 * found + 0.5 * 2.1)
    assert trend == pytest.approx(0.2 * (level - 2.0) + 0.8 * 0.1)


def test_the_sides_keep_their_proportion_and_the_lower_stays_a_range(actor_of: Any) -> None:
    actor = actor_of(clip_low=3e-4, clip_high=4e-4, clip_fraction=0.1)
    used = with_clip_range(actor, (math.log(7), 0.0))
    assert (used.clip_low, used.clip_high) == pytest.approx((21e-4, 28e-4))
    assert used == actor.model_copy(update={"clip_low": used.clip_low, "clip_high": used.clip_high})
    assert with_clip_range(actor, (13.0, 1.0)).clip_low == 1.0
    plain = actor_of()
    assert with_clip_range(plain, (2.0, 0.0)) is plain
    assert next_scale((5.0, 1.0), plain, trained([2.0], [3], [1.0])) == (5.0, 1.0)


def test_what_has_no_advantage_is_never_clipped_and_takes_no_share(actor_of: Any) -> None:
    # A KL or an entropy term trains such sequences, too; theirs have moved the furthest here.
    ratios, advantages = [0.5, 0.6, 1.05, 1.04, 1.03, 1.02], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    actor = actor_of(clip_low=0.1, clip_high=0.1, clip_fraction=0.34)
    samples = trained(ratios, [1] * 6, advantages)
    assert clipped_tokens(actor, clipping_scale(actor, samples), samples) == 2


@pytest.mark.parametrize(
    "ratios", [[], [1.0, 1.0, 1.0], [math.nan] * 3, [1.01, math.nan, 0.99], [math.inf] * 3, [0.5, 2.0, 0.5]]
)
def test_nothing_in_a_step_makes_the_range_useless(ratios: list[float], actor_of: Any) -> None:
    actor = actor_of(clip_low=1e-3, clip_high=1e-3, clip_fraction=0.1)
    before = (math.log(2.0), 0.0)
    scale = next_scale(before, actor, trained(ratios, [4] * len(ratios), [1.0, -1.0, 1.0]))
    assert scale is not None and abs(sum(scale) - before[0]) <= 7
    if not ratios or not any(ratio > 1 for ratio in ratios):
        assert scale == before


def test_a_first_step_that_trains_nothing_leaves_the_range_to_the_next(actor_of: Any) -> None:
    actor = actor_of(clip_low=1e-3, clip_high=1e-3, clip_fraction=0.1)
    assert next_scale(None, actor, []) is None
    assert with_clip_range(actor, None) is actor
