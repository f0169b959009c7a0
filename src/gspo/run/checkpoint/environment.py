"""What besides the recipe decides the last bit of a run's numbers."""

import hashlib
import inspect
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from gspo.model.policy import Policy
from gspo.reward.calls import RewardFunction

_LIBRARIES = (
    "gspo",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "reasoning-gym",
    "math-verify",
    "sympy",
)


def environment(policy: Policy, functions: Sequence[RewardFunction], engine: Mapping[str, str]) -> dict[str, str]:
    """Libraries, processor, threads, what was proven of the model at load, the engine and the code of the rewards."""
    device = policy.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "device": f"{device.type}: {processor}",
        "threads": str(torch.get_num_threads()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix products": torch.get_float32_matmul_precision(),
        "packed attention": str(policy.supports_packing),
        **engine,
        **{f"code of reward {function.name}": _code(function) for function in functions},
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each that has changed."""
    names = sorted({*then, *now})
    return [f"{name} was {then.get(name)}, is {now.get(name)}" for name in names if then.get(name) != now.get(name)]


def _code(function: RewardFunction) -> str:
    """A digest of the file that a function is in; of its own lines, for one from a script or a notebook."""
    call = function.call
    try:
        if getattr(call, "__module__", "__main__") == "__main__":
            text = inspect.getsource(call)
        else:
            text = Path(inspect.getsourcefile(call) or "").read_text(encoding="utf-8")
        return hashlib.sha256(text.encode()).hexdigest()[:16]
    except (OSError, TypeError, UnicodeDecodeError):  # an object that is called, or made on the fly
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
