"""The states of every random generator that code in this process may draw from."""

import json
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

    Sampling needs none: seed, step, query and sample number decide a response's random numbers.
    """
    kind, keys, *rest = np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "python": _as_tensor(random.getstate()),
        "numpy": _as_tensor([kind, np.asarray(keys).tolist(), *rest]),
        **{f"cuda_{index}": state for index, state in enumerate(devices)},
    }


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Put every generator back to where it was when `random_state` was called."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = _from_tensor(state["python"])
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(_from_tensor(state["numpy"])))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda_{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda_{index}"], index)


def _as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
