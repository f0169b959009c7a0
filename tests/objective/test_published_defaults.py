"""What a name stands for where nothing else is said: the numbers of the papers, from Python and in a recipe alike."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from gspo.objective import SurrogateSettings, surrogate
from gspo.recipe.published import PUBLISHED
from gspo.recipe.sections import ActorConfig

# By hand, from the papers: level, clip_low, clip_high, length norm, advantage.
EXPECTED: dict[Any, tuple[str, float, float, str, str]] = {
    "clip": ("sequence", 3e-4, 4e-4, "own", "group"),  # 2507.18071, §5.1
    "ppo": ("token", 0.2, 0.2, "own", "gae"),
    "dual_clip": ("token", 0.2, 0.2, "own", "group"),
    "dapo": ("token", 0.2, 0.28, "mean", "group"),
    "dr_grpo": ("token", 0.2, 0.2, "constant", "group_mean"),
    "luspo": ("sequence", 2e-3, 2.5e-3, "none", "group"),
    "cispo": ("token", 1.0, 4.0, "group", "group"),  # Eq. 4: 1/Σ_i |o_i| of the group
    "gmpo": ("token", 0.4, 0.4, "own", "group"),
    "sapo": ("token", 0.2, 0.27, "own", "group"),  # of no effect
    "dppo": ("token", 0.15, 0.15, "none", "group_mean"),  # Eq. 12, App. C.1
    "ipo": ("token", 0.3, 0.3, "mean", "group_mean"),
    "minirl": ("token", 0.2, 0.27, "none", "group_mean"),
    "reinforce": ("token", 0.2, 0.27, "none", "leave_one_out"),  # of no effect
}
LEVEL_RANGES = {"token": (0.2, 0.27), "sequence": (3e-4, 4e-4), "sequence_token": (3e-4, 4e-4)}


def test_every_published_surrogate_is_expected_here() -> None:
    assert set(EXPECTED) == set(PUBLISHED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_that_names_only_the_surrogate_has_its_papers_settings(name: Any) -> None:
    actor = ActorConfig(surrogate=name)
    found = (actor.importance_sampling_level, actor.clip_low, actor.clip_high, actor.length_norm, actor.advantage)
    assert found == EXPECTED[name]
    assert (actor.dual_clip, actor.sapo_temperature, actor.advantage_ddof) == (3.0, (1.0, 1.05), 1)
    assert actor.minirl_cap == 5.0  # 2512.01374, §4.2


@pytest.mark.parametrize("name", EXPECTED)
def test_python_has_the_same_settings_where_none_are_given(name: Any) -> None:
    level, low, high, norm, _ = EXPECTED[name]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((200,), 2)
    old, noise = (torch.randn(400, generator=generator, dtype=torch.float64) for _ in range(2))
    old = -old.abs()
    advantages = torch.randn(200, generator=generator, dtype=torch.float64)
    given: dict[str, Any] = {"name": name, "tokens_per_sequence": 4.0, "sampler_logprobs": old}
    explicit: dict[str, Any] = {"level": level, "clip_low": low, "clip_high": high, "length_norm": norm}
    explicit |= {"dual_clip": 3.0, "sapo_temperature": (1.0, 1.05), "minirl_cap": 5.0}
    for size in (1.0, low):  # so that a bound far from 1 binds, and one that is near
        new = old + size * noise
        found, wanted = (surrogate(new, old, advantages, lengths, **given, **more) for more in ({}, explicit))
        assert torch.equal(found.per_sequence, wanted.per_sequence) and torch.equal(found.clipped, wanted.clipped)


@pytest.mark.parametrize(("name", "level"), [(n, level) for n in EXPECTED for level in PUBLISHED[n].levels])
def test_at_a_level_it_was_not_published_with_a_surrogate_has_gspos_or_grpos_range(name: Any, level: Any) -> None:
    actor = ActorConfig(surrogate=name, importance_sampling_level=level)
    low, high = actor.clip_low, actor.clip_high
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor(
        [1 + 1.1 * high, 1 + 0.9 * high, max(1e-6, 1 - 1.1 * low), 1 - 0.9 * low], dtype=torch.float64
    ).log()
    lengths, advantages = torch.ones(4, dtype=torch.long), torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    given: dict[str, Any] = {"name": name, "tokens_per_sequence": 4.0, "sampler_logprobs": old, "level": level}
    found = surrogate(new, old, advantages, lengths, **given)
    wanted = surrogate(new, old, advantages, lengths, **given, clip_low=low, clip_high=high)
    assert torch.equal(found.per_sequence, wanted.per_sequence) and torch.equal(found.clipped, wanted.clipped)
    own = EXPECTED[name]
    # GSPO-token is as wide as LUSPO's; CISPO's bounds are no clip range, which would make all its weights 1.
    everywhere = name == "cispo" or (name == "luspo" and level == "sequence_token")
    expected = own[1:3] if level == own[0] or everywhere else LEVEL_RANGES[level]
    assert (actor.clip_low, actor.clip_high) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_are_changed_one_by_one_and_the_others_stay(name: Any) -> None:
    level, low, high, norm, _ = EXPECTED[name]
    settings = SurrogateSettings.published(name)
    assert (settings.level, settings.clip_low, settings.clip_high, settings.length_norm) == (level, low, high, norm)
    assert SurrogateSettings.published(name, clip_high=0.5, clip_low=None) == replace(settings, clip_high=0.5)
    assert SurrogateSettings.published(name, clip_low=0.0).clip_low == 0.0  # which is a number, and not left out
    old, lengths = torch.zeros(4, dtype=torch.float64), torch.tensor([1, 3])
    tensors: Any = (old + 0.3, old, torch.tensor([1.0, -1.0], dtype=torch.float64), lengths)
    given: dict[str, Any] = {"tokens_per_sequence": 4.0, "sampler_logprobs": old}
    found = surrogate(*tensors, settings=settings, clip_high=0.5, **given)
    wanted = surrogate(*tensors, name=name, clip_high=0.5, **given)
    assert torch.equal(found.per_sequence, wanted.per_sequence) and torch.equal(found.clipped, wanted.clipped)
