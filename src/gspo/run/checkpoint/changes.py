"""What may differ between a run and its resumption: keys of the recipe, and what else decides a number's last bit."""

import inspect
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from gspo.learner.trainer import Trainer
from gspo.model.lora import has_adapter
from gspo.reward.calls import RewardFunction
from gspo.rollout.tools import Tools
from gspo.run.checkpoint.store import digest
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
class Change:
    """A key of the recipe, or an entry of the environment, that is not what it was, and what that does to a run.

    Example: str(Change(key="steps", was=100, now=200, effect="none")) == "steps was 100, is 200"
    """

    key: str
    was: Any  # None: it was not there
    now: Any
    effect: Literal["none", "rounding", "another run"]  # rounding: no longer bit by bit the run it would have been

    def __str__(self) -> str:
        return f"{self.key} was {self.was}, is {self.now}"


def recipe_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return what differs between two recipes given as nested mappings."""
    return [
        Change(key=key, was=was, now=value, effect=_effect(key))
        for key, was, value in _different(dict(_leaves(then)), dict(_leaves(now)))
    ]


def environment_changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return what differs between two environments, by name."""
    return [Change(key=key, was=was, now=value, effect="rounding") for key, was, value in sorted(_different(then, now))]


def _effect(key: str) -> Literal["none", "rounding", "another run"]:
    if _SAFE.fullmatch(key):
        return "none"
    return "rounding" if _ROUNDING.fullmatch(key) else "another run"


def environment(
    trainer: Trainer,
    functions: Sequence[RewardFunction],
    engine: Mapping[str, str],
    hooks: Mapping[str, Hook],
    tools: Tools | None = None,
) -> dict[str, str]:
    """Libraries, processor, threads, what was proven of the model at load, the engine, code of rewards and hooks."""
    policy, device = trainer.policy, trainer.policy.device
    processor = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in (*_LIBRARIES, *(["peft"] if has_adapter(policy.model) else []))},
        "device": f"{device.type}: {processor}",
        "threads": str(torch.get_num_threads()),
        "ranks": str(trainer.num_ranks),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "matrix products": torch.get_float32_matmul_precision(),
        "packed attention": str(policy.supports_packing),
        **engine,
        **{f"code of reward {function.name}": f"{code_of(function.call)}{function.settings}" for function in functions},
        **{f"code of hook {name}": code_of(hook) for name, hook in hooks.items()},
        **{f"code of tool {each.__name__}": code_of(each) for each in (tools.functions if tools else ())},
    }


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
        return digest([text.encode()])[:16]
    except (OSError, TypeError, UnicodeDecodeError):  # an object that is called, or made on the fly
        return "unknown"


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
