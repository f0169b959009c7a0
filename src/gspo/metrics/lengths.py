"""The trained responses of a step in four parts by their length."""

import math
from collections.abc import Sequence

import torch

from gspo.learner.item import Trained

_QUARTILES = (0.25, 0.5, 0.75, 1.0)


def length_quartiles(trained: Sequence[Trained]) -> list[float]:
    """The longest that a response of each part can be; NaN where nothing was trained."""
    if not trained:
        return [math.nan] * len(_QUARTILES)
    lengths = torch.tensor([item.num_tokens for item in trained], dtype=torch.float64)
    return torch.quantile(lengths, torch.tensor(_QUARTILES, dtype=torch.float64)).tolist()


def by_length(trained: Sequence[Trained]) -> list[list[Trained]]:
    """The step's responses in each part, the shortest first; equal lengths stay together, so a part can be empty."""
    bounds = torch.tensor(length_quartiles(trained)[:-1], dtype=torch.float64)
    lengths = torch.tensor([item.num_tokens for item in trained], dtype=torch.float64)
    places = torch.bucketize(lengths, bounds).tolist()  # the first part whose bound is not below the length
    return [
        [item for item, place in zip(trained, places, strict=True) if place == part] for part in range(len(_QUARTILES))
    ]
