"""What this machine can do, measured: the limits that the benchmarks compare with."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of the best of some square matrix products: torch's, and gspo's on a CPU."""
    from gspo.model.linear import linear  # which the other side of a comparison does not have

    best = 0.0
    for size in (512, 1024, 2048) if device.type == "cpu" else (4096, 8192):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        for product in (torch.mm, linear):
            best = max(best, 2 * size**3 / seconds(partial(product, left, right), device, repeats=10))
    return best


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that a sum over a large tensor reads."""
    tensor = torch.ones(2**26 if device.type == "cpu" else 2**30, device=device)
    return 4 * tensor.numel() / seconds(tensor.sum, device, repeats=5)


def seconds(function: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """The fastest of several calls, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return min(found[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load() -> str:
    """The machine's load now, for the tables."""
    return f"load {' '.join(f'{value:.2f}' for value in os.getloadavg())} on {os.cpu_count()} cores"


def reset_peak_memory() -> int:
    """Count this process's peak from here on; bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that this process has held since the peak was reset."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes, from the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)
