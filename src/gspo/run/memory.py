"""The memory that a run will need, computed from the model's configuration and the recipe: no weights are loaded."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from gspo.model.head import MAX_LOGITS
from gspo.model.policy import device_of
from gspo.recipe.schema import Recipe
from gspo.run.prepare import Inputs

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may use, where there is one
_LESS = {  # what makes a part smaller
    "activations": "lower actor.micro_batch_tokens, or set actor.gradient_checkpointing: true",
    "cache": "lower rollout.max_rows or rollout.max_new_tokens",
    "token logits": "lower rollout.max_rows",
    "reference": "set actor.kl.coefficient: 0",
    "value model": "set critic.trunk: shared",
    "gradient's copy": "set actor.gradient_noise: false",
}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes by part, in the two stages that take turns; the larger sum is the peak.

    Example: Memory(update={"weights": 1e9, "gradient": 2e9, …}, sampling={"weights": 1e9, "cache": 3e9, …})
    """

    update: Mapping[str, float]
    sampling: Mapping[str, float]

    @property
    def peak(self) -> float:
        """Bytes of the stage that needs more."""
        return max(sum(self.update.values()), sum(self.sampling.values()))

    def advice(self, available: float) -> str | None:
        """What does not fit into the bytes that are available, and which key lowers it; None where all fits."""
        for stage, parts in {"the update": self.update, "sampling": self.sampling}.items():
            if (total := sum(parts.values())) > available:
                largest = max((part for part in parts if part in _LESS), key=lambda part: parts[part])
                fix = _LESS[largest]
                if total - sum(parts[part] for part in parts if part in _LESS) > available:
                    fix = "take a smaller model or a larger machine, for weights and optimiser alone are too much"
                return f"{stage} needs about {total / 2**30:.1f} GiB, and there are {available / 2**30:.1f}: {fix}"
        return None


def memory_of(
    recipe: Recipe, config: Any, *, prompt_tokens: int, device: torch.device, libraries: float = 0.0
) -> Memory:
    """What a run holds on its device, if all responses are as long as they may be; `libraries` are bytes held already.

    `config` is the model's transformers configuration, `prompt_tokens` the length of the longest prompt. The
    coefficients of activations are those of Qwen3's layers, counted (docs/guides/memory.md compares with runs).
    """
    model, actor, text = _blank(config, recipe.model.trust_remote_code), recipe.actor, config.get_text_config()
    dtype = {"auto": "float32" if device.type == "cpu" else "bfloat16"}.get(recipe.model.dtype, recipe.model.dtype)
    width, masters = (4, 0) if dtype == "float32" else (2, 4)
    trained, size = 12 + masters, sum(p.numel() for p in model.parameters())
    trunk = model.base_model if model.base_model is not model else getattr(model, "model", model)
    own_critic = actor.advantage == "gae" and recipe.critic.trunk == "own"
    critic_size = sum(p.numel() for p in trunk.parameters()) if own_critic else 0
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = {  # always, from the first update on
        "weights": width * size,
        "masters": masters * num_trained,
        "moments": 8 * num_trained,
        "reference": width * size * bool(actor.kl.coefficient),
        "value model": width * size * own_critic + (trained - 4) * critic_size,
        "libraries": libraries,
    }
    copy = (width + masters + 8) * (size + critic_size) * (device.type == "cpu")
    update = {
        "gradient": 4 * (num_trained + critic_size),
        "gradient's copy": 4 * num_trained * actor.gradient_noise,
        "activations": width * _activations(recipe, text, prompt_tokens),
        "logits": _logits(recipe, text, prompt_tokens) * (1 if width == 4 or device.type != "cpu" else 2),
    }
    sampling = {**_sampling(recipe, text, prompt_tokens, width), "checkpoint's copy": copy}
    return Memory(update=_some(held | update), sampling=_some(held | sampling))


def memory_lines(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    """What `gspo check` says of it: both stages, beside what this machine has, and a note where that is too little."""
    memory, device = memory_of_inputs(recipe, inputs), device_of(recipe.model.device)
    for words, parts in (("in the update", memory.update), ("while sampling", memory.sampling)):
        listed = ", ".join(f"{part} {_size(size)}" for part, size in sorted(parts.items(), key=lambda item: -item[1]))
        yield f"{'memory' if parts is memory.update else '':<12}about {_size(sum(parts.values()))} {words}: {listed}"
    available = available_bytes(device)
    yield f"            of {_size(available)} that this machine has ({device.type})"
    if advice := memory.advice(available):
        yield f"note        {advice}"


def memory_of_inputs(recipe: Recipe, inputs: Inputs) -> Memory:
    """What a run with these inputs holds on this machine; on a CPU with what this process holds, its libraries."""
    device, config = device_of(recipe.model.device), deepcopy(inputs.config)
    if recipe.model.architecture is not None:
        config.vocab_size = recipe.model.architecture.get("vocab_size", len(inputs.tokenizer))
    prompts = [len(query.prompt_ids) for query in (*inputs.queries.train, *inputs.queries.held_out)]
    libraries = 0.0 if device.type == "cuda" else float(psutil.Process().memory_info().rss)
    return memory_of(recipe, config, prompt_tokens=max(prompts), device=device, libraries=libraries)


def available_bytes(device: torch.device) -> float:
    """The memory of the GPU, or of this machine as far as its container may use it."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    total = float(psutil.virtual_memory().total)
    return min(total, float(limit)) if limit.isdigit() else total


def _blank(config: Any, trust_remote_code: bool) -> Any:
    """The model without memory for its weights: they have shapes only."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)


def _pass_tokens(recipe: Recipe, prompt_tokens: int) -> int:
    """Tokens of the largest forward pass of an update."""
    rollout, actor = recipe.rollout, recipe.actor
    queries = rollout.queries_per_step // actor.mini_batches
    in_all = queries * (prompt_tokens + rollout.group_size * rollout.max_new_tokens)
    return max(prompt_tokens + rollout.max_new_tokens, min(actor.micro_batch_tokens, in_all))


def _activations(recipe: Recipe, text: Any, prompt_tokens: int) -> float:
    """The numbers that a pass keeps for its backward pass: by token and layer, those between its operators."""
    hidden, heads, keys, size = _heads(text)
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    experts = getattr(text, "num_experts_per_tok", None)
    mlp = 4 * inner
    if experts:
        mlp = experts * (4 * (getattr(text, "moe_intermediate_size", None) or inner) + 2 * hidden)
        mlp += 4 * (getattr(text, "shared_expert_intermediate_size", None) or 0)
    layer, layers = 8 * hidden + 10 * heads * size + 5 * keys * size + mlp, text.num_hidden_layers
    kept = layer + (layers - 1) * hidden if recipe.actor.gradient_checkpointing else layer * layers
    models = 1 + (recipe.actor.advantage == "gae" and recipe.critic.trunk == "own")
    return float(_pass_tokens(recipe, prompt_tokens) * kept * models)


def _logits(recipe: Recipe, text: Any, prompt_tokens: int) -> float:
    """Bytes of two chunks of logits in float32, and of the head's gradient."""
    chunk = min(MAX_LOGITS, _pass_tokens(recipe, prompt_tokens) * text.vocab_size)
    return 4.0 * (2 * chunk + text.vocab_size * text.hidden_size)


def _sampling(recipe: Recipe, text: Any, prompt_tokens: int, width: int) -> dict[str, float]:
    """Keys and values of all rows, one layer of them twice while they grow; three copies of a token's logits."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    most = max(rollout.queries_per_step * rollout.group_size, evaluation.num_queries * evaluation.samples)
    rows = max(rollout.group_size, min(rollout.max_rows, most))
    _, _, keys, size = _heads(text)
    tokens = prompt_tokens + rollout.max_new_tokens
    cache = 2 * (text.num_hidden_layers + 1) * keys * size * width * rows * tokens
    return {"cache": float(cache), "token logits": 12.0 * rows * text.vocab_size}


def _heads(text: Any) -> tuple[int, int, int, int]:
    """The hidden size, the heads of queries, those of keys, and a head's size."""
    hidden, heads = text.hidden_size, getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    return hidden, heads, keys, getattr(text, "head_dim", None) or hidden // heads


def _some(parts: Mapping[str, float]) -> dict[str, float]:
    return {part: float(size) for part, size in parts.items() if size}


def _size(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"
