"""The states of every random generator that code in this process may draw from."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_everything(seed: int) -> None:
    """The same states for the same seed, whatever this process has drawn before."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Tensor]:
    """The states of torch's generators (every device), NumPy's and Python's, as tensors.

    The sampler needs none: its generator is made anew each step, from the recipe's seed and the step.
    """
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    inner = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *internal]),
        "python_gauss": _optional(gauss),
        "numpy": torch.from_numpy(inner["key"].astype(np.int64)),
        "numpy_position": torch.tensor([inner["pos"], numpy_state["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state |= {f"cuda_{index}": one for index, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Put every generator back to where `random_state` found it."""
    torch.set_rng_state(state["torch"])
    version, *internal = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss[0] if gauss else None))
    position, has_gauss = state["numpy_position"].tolist()
    numpy_state: dict[str, Any] = {
        "bit_generator": "MT19937",
        "state": {"key": state["numpy"].numpy().astype(np.uint32), "pos": position},
        "has_gauss": has_gauss,
        "gauss": float(state["numpy_gauss"]),
    }
    np.random.set_state(numpy_state)
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda_{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda_{index}"], index)


def _optional(value: float | None) -> Tensor:
    return torch.tensor([] if value is None else [value], dtype=torch.float64)
