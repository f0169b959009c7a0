"""What may differ between a run and its resumption: keys of the recipe, and what else decides a number's last bit."""

import hashlib
import inspect
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gspo.learner.trainer import Trainer
from gspo.reward.calls import RewardFunction
from gspo.run.hooks import Hook

# None of them changes what is learned: how far, how often it is looked at or saved, where it lies, how long is waited.
_SAFE = re.compile(
    r"name|output_dir|steps|checkpoint\..*|early_stop\..*|report\..*|evaluation\.every"
    r"|trainer\.timeout_seconds|cluster\..*|hooks(\..*)?|hook_errors"  # their code is compared in `environment`
    r"|reward\.\d+\.(time_limit_seconds|concurrent_calls)"
    r"|rollout\.(embedded|vllm|sglang)\.(python|weights\w*|\w+_seconds|(urls|devices)(\..*)?)"
)
# How the work is cut to fit the memory: equal but for rounding. How far ahead sampling may be: another run from here.
_ROUNDING = re.compile(
    r"rollout\.(max_rows|max_staleness|too_old|in_turn|interrupt|old_cache|engine|(embedded|vllm|sglang)\..*)"
    r"|trainer\.sharding|actor\.(micro_batch_tokens|gradient_\w+)|model\.attn_implementation"
)

_LIBRARIES = (
    *("gspo", "torch", "transformers", "tokenizers", "safetensors", "numpy"),
    *("reasoning-gym", "math-verify", "sympy"),  # of queries and rewards
)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Lines `key: was …, is …`, by what the change does to a run.

    Example: Changes(safe=["steps: was 100, is 200"], rounding=[], refused=["seed: was 0, is 1"])
    """

    safe: Sequence[str]
    rounding: Sequence[str]  # may be made, but the run is no longer bit by bit the one it would have been
    refused: Sequence[str]


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """What differs between two recipes given as nested mappings."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    lines = {key: f"{key}: was {was}, is {value}" for key, was, value in _different(before, after)}
    safe = [lines[key] for key in lines if _SAFE.fullmatch(key)]
    rounding = [lines[key] for key in lines if _ROUNDING.fullmatch(key) and not _SAFE.fullmatch(key)]
    refused = [line for line in lines.values() if line not in safe and line not in rounding]
    return Changes(safe=safe, rounding=rounding, refused=refused)


def environment(
    trainer: Trainer, functions: Sequence[RewardFunction], engine: Mapping[str, str], hooks: Mapping[str, Hook]
) -> dict[str, str]:
    """Libraries, processor, threads, what was proven of the model at load, the engine, code of rewards and hooks."""
    policy, device = trainer.policy, trainer.policy.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
        "device": f"{device.type}: {processor}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(trainer.num_ranks),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix products": torch.get_float32_matmul_precision(),
        "packed attention": str(policy.supports_packing),
        **engine,
        **{f"code of reward {function.name}": f"{code_of(function.call)}{function.settings}" for function in functions},
        **{f"code of hook {name}": code_of(hook) for name, hook in hooks.items()},
    }


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each entry of two environments that has changed."""
    return sorted(f"{name} was {was}, is {value}" for name, was, value in _different(then, now))


def _different(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names whose values differ, with both; None for one that is not there."""
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            yield name, then.get(name), now.get(name)


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping | list) and tree:
        for name, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def code_of(call: Any) -> str:
    """A digest of the file that a function is in; of its own lines, for one from a script or a notebook."""
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
