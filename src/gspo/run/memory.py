"""The memory that a run will need, computed from the model's configuration and the recipe: no weights are loaded."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import torch

from gspo.model.head import MAX_LOGITS
from gspo.model.policy import device_of
from gspo.recipe.schema import Recipe
from gspo.run.prepare import Inputs

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may use, where there is one
_MOMENTS = {"SGD": 4, "Muon": 4, "RMSprop": 4, "Lion": 4, "AdamW8bit": 2, "Adafactor": 0}  # bytes a number, else 8
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

    def advice(self, available: float) -> Iterator[str]:
        """What does not fit into the bytes that are available, and which key lowers its largest part."""
        for stage, parts in {"the update": self.update, "sampling": self.sampling}.items():
            needed, less = sum(parts.values()), {part: size for part, size in parts.items() if part in _LESS}
            if needed > available:
                fix = _LESS[max(less, key=lambda part: less[part])]
                if needed - sum(less.values()) > available:
                    fix = "take a smaller model or a larger machine: what no key lowers is too much already"
                yield f"{stage} needs about {_words(needed)}, and there are {_words(available)}: {fix}"


def memory_lines(recipe: Recipe, inputs: Inputs) -> Iterator[str]:
    """What `gspo check` says of it: both stages, beside what this machine has, and a note where that is too little."""
    memory, device = memory_of_inputs(recipe, inputs), device_of(recipe.model.device)
    available = available_bytes(device)
    for title, stage, parts in (("memory", "in the update", memory.update), ("", "while sampling", memory.sampling)):
        listed = sorted(parts.items(), key=lambda item: -item[1])
        words = ", ".join(f"{part} {_words(size)}" for part, size in listed if size >= 2**20)
        yield f"{title:<12}about {_words(sum(parts.values()))} {stage}: {words}"
    yield f"            of {_words(available)} that this machine has ({device.type})"
    for sentence in memory.advice(available):
        yield f"note        {sentence}"


def memory_of_inputs(recipe: Recipe, inputs: Inputs) -> Memory:
    """What a run with these inputs holds on this machine; on a CPU with the libraries, which this process holds."""
    device, config = device_of(recipe.model.device), deepcopy(inputs.config)
    if recipe.model.architecture is not None:
        config.vocab_size = recipe.model.architecture.get("vocab_size", len(inputs.tokenizer))
    longest = max(len(query.prompt_ids) for query in (*inputs.queries.train, *inputs.queries.held_out))
    libraries = 0.0 if device.type == "cuda" else psutil.Process().memory_info().rss
    return memory_of(recipe, config, prompt_tokens=longest, device=device, libraries=libraries)


def memory_of(
    recipe: Recipe, config: Any, *, prompt_tokens: int, device: torch.device, libraries: float = 0.0
) -> Memory:
    """What a run holds on its device, with the longest prompt and responses as long as they may be.

    `config` is the model's transformers configuration. Activations are those of Qwen3's layers, counted;
    docs/guides/memory.md has the formula, and compares it with runs.
    """
    actor, text, model = recipe.actor, config.get_text_config(), _blank(config, recipe.model.trust_remote_code)
    is_float32 = recipe.model.dtype == "float32" or (recipe.model.dtype == "auto" and device.type == "cpu")
    width, masters = (4, 0) if is_float32 else (2, 4)
    frozen, name = getattr(recipe.model, "frozen", ()), getattr(actor.optimizer, "name", "adamw")
    moments = _MOMENTS.get(re.split("[.:]", name)[-1], 8)
    size = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for n, p in model.named_parameters() if not any(fnmatchcase(n, own) for own in frozen))
    has_critic = actor.advantage == "gae" and recipe.critic.trunk == "own"
    critic = sum(p.numel() for p in model.base_model.parameters()) * has_critic
    tokens = _pass_tokens(recipe, prompt_tokens)
    always = {
        "weights": width * size,
        "masters": masters * trained,
        "moments": moments * trained,
        "reference": width * size * bool(actor.kl.coefficient),
        "value model": (width * size + (masters + 8) * critic) * has_critic,
        "libraries": libraries,
    }
    chunk = 2 * min(MAX_LOGITS, tokens * text.vocab_size) + text.vocab_size * text.hidden_size
    update = {
        "gradient": 4 * (trained + critic),
        "gradient's copy": 4 * trained * actor.gradient_noise,
        "activations": width * tokens * _kept(text, actor.gradient_checkpointing) * (1 + has_critic),
        "logits": 4 * chunk * (1 if is_float32 or device.type != "cpu" else 2),  # a CPU multiplies float32 copies
    }
    copy = sum(always[part] for part in ("weights", "masters", "moments", "value model"))
    sampling = _sampling(recipe, text, prompt_tokens, width) | {"checkpoint's copy": copy * (device.type == "cpu")}
    stages = ({part: float(own) for part, own in {**always, **parts}.items() if own} for parts in (update, sampling))
    return Memory(update=next(stages), sampling=next(stages))


def available_bytes(device: torch.device) -> float:
    """The memory of the GPU, or of this machine as far as its container may use it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def _blank(config: Any, trust_remote_code: bool) -> Any:
    """The model without memory for its weights: they have shapes only."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)


def _pass_tokens(recipe: Recipe, prompt_tokens: int) -> int:
    """Tokens of the largest forward pass of an update."""
    rollout, actor = recipe.rollout, recipe.actor
    group = prompt_tokens + rollout.group_size * rollout.max_new_tokens
    in_all = rollout.queries_per_step // actor.mini_batches * group
    return max(prompt_tokens + rollout.max_new_tokens, min(actor.micro_batch_tokens, in_all))


def _kept(text: Any, recomputes: bool) -> int:
    """The numbers of a token that a pass keeps for its backward pass."""
    hidden, inner = text.hidden_size, getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    heads, keys, size = _heads(text)
    mlp = 4 * inner
    if experts := getattr(text, "num_experts_per_tok", None):
        mlp = experts * (4 * (getattr(text, "moe_intermediate_size", None) or inner) + 2 * hidden)
        mlp += 4 * (getattr(text, "shared_expert_intermediate_size", None) or 0)
    layer, layers = 8 * hidden + 10 * heads * size + 5 * keys * size + mlp, text.num_hidden_layers
    return int(layer + (layers - 1) * hidden if recomputes else layer * layers)


def _sampling(recipe: Recipe, text: Any, prompt_tokens: int, width: int) -> dict[str, float]:
    """Keys and values of all rows, one layer of them twice while they grow; three copies of a token's logits."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    most = max(rollout.queries_per_step * rollout.group_size, evaluation.num_queries * evaluation.samples)
    rows, (_, keys, size) = max(rollout.group_size, min(rollout.max_rows, most)), _heads(text)
    numbers = 2 * (text.num_hidden_layers + 1) * keys * size * (prompt_tokens + rollout.max_new_tokens)
    return {"cache": width * rows * numbers, "token logits": 12 * rows * text.vocab_size}


def _heads(text: Any) -> tuple[int, int, int]:
    """The heads of queries, those of keys, and a head's size."""
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = getattr(text, "num_key_value_heads", None) or heads
    return heads, keys, getattr(text, "head_dim", None) or text.hidden_size // heads


def _words(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
