"""What besides the recipe decides the last bit of a run's numbers."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from gspo.policy.model import Policy
from gspo.rollout.one_token import decoder_of

_LIBRARIES = ("gspo", "torch", "transformers", "tokenizers", "safetensors", "numpy", "reasoning-gym", "math-verify")


def environment(policy: Policy) -> dict[str, str]:
    """Libraries with their versions, the processor, the number of threads, and what was proven of the model at load."""
    device = policy.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "device": f"{device.type}: {processor}",
        "threads": str(torch.get_num_threads()),
        "packed attention": str(policy.packs),
        "decoder written out": str(decoder_of(policy.trunk) is not None),
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each that has changed."""
    names = sorted({*then, *now})
    return [f"{name} was {then.get(name)}, is {now.get(name)}" for name in names if then.get(name) != now.get(name)]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
