"""What a checkpoint holds as tensors beside the policy's weights: optimiser, critic and random generators."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor


def tensors_file(rank: int) -> str:
    """The file of a checkpoint in which a rank has its tensors."""
    return "state.safetensors" if rank == 0 else f"state_{rank}.safetensors"


class _SavedTensors(Mapping[str, Tensor]):
    """The tensors of a part; of one that ranks shared, each rank's file has its rows."""

    def __init__(self, checkpoint: Path, part: str) -> None:
        paths = takewhile(Path.is_file, (checkpoint / tensors_file(number) for number in count(1)))
        self._files = [safe_open(path, framework="pt") for path in (checkpoint / tensors_file(0), *paths)]
        self._prefix = f"{part}/"
        self._names = [
            {name: None for name in file.keys() if name.startswith(self._prefix)}  # noqa: SIM118 - it is no mapping
            for file in self._files
        ]

    def __getitem__(self, name: str) -> Tensor:
        full = f"{self._prefix}{name}"
        rows = [file.get_tensor(full) for file, names in zip(self._files, self._names, strict=True) if full in names]
        if not rows:
            raise KeyError(name)
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._names[0])

    def __len__(self) -> int:
        return len(self._names[0])


def tensors_of(checkpoint: Path, part: str) -> Mapping[str, Tensor]:
    """The tensors that a checkpoint has under `part/`, each read when it is asked for."""
    return _SavedTensors(checkpoint, part)


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes and bytes of tensors on the CPU: equal if and only if they are, bit by bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {list(weights[name].shape)}".encode())
        digest.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def seed_everything(seed: int) -> None:
    """The same states of every generator for the same seed, whatever this process has drawn before."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Tensor]:
    """The states of the generators that code in this process may draw from: torch's (every device), NumPy's, Python's.

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
    for index in range(torch.cuda.device_count()):
        if f"cuda_{index}" in state:
            torch.cuda.set_rng_state(state[f"cuda_{index}"], index)


def _as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(tensor: Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
