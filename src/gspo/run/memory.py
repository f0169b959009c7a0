"""The memory that a run will need, computed from the model's configuration and the recipe: no weights are loaded."""

import math
import re
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from gspo.learner.torch_optimizers import matrices_of
from gspo.model.head import MAX_LOGITS
from gspo.model.load import empty_model, load_config
from gspo.model.lora import adapter_of, add_lora, has_adapter
from gspo.model.parameters import freeze
from gspo.model.policy import device_of
from gspo.model.prove import one_line
from gspo.model.shape import heads_of, inner_size
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ModelConfig
from gspo.run.prepare import Inputs

_CGROUP = Path("/sys/fs/cgroup/memory.max")  # what a container may use, where there is one
_MOMENTS = {"SGD": 4, "RMSprop": 4, "Lion": 4, "AdamW8bit": 2, "Adafactor": 0}  # bytes a number, else 8
_NF4 = 4.127 / 8  # bytes of a weight, with its share of the quantised constants (QLoRA, arXiv 2305.14314, §3)
_MOST_MODELS = 4
_models: dict[str, tuple[Any, int]] = {}  # without memory for their weights
# The bytes of each part, by stage: {"in the update": {"weights": 1e9, …}, "while sampling": {"cache": 3e9, …}}
Memory = Mapping[str, Mapping[str, float]]


def memory_lines(recipe: Recipe, inputs: Inputs, num_ranks: int = 1) -> Iterator[str]:
    """The lines of `gspo check` on memory: both stages, what this machine has, and a note where that is too little."""
    device = device_of(recipe.model.device)
    available = available_bytes(device) / (1 if device.type == "cuda" else num_ranks)
    try:
        memory = memory_of_inputs(recipe, inputs, num_ranks)
        disk, has_room = disk_line(recipe, sized(recipe, inputs))
    except Exception as error:  # of transformers, or of the model's own code
        yield f"memory      cannot be computed: {one_line(error)}"
        return
    for number, (stage, parts) in enumerate(memory.items()):
        listed = sorted(parts.items(), key=lambda item: -item[1])
        words = ", ".join(f"{part} {_words(size)}" for part, size in listed if size >= 2**20)
        yield f"{'' if number else 'memory':<12}about {_words(sum(parts.values()))} {stage}: {words}"
    whose = "that this machine has" if num_ranks == 1 else f"that each of {num_ranks} processes has"
    yield f"            of {_words(available)} {whose} ({device.type})"
    for stage, parts in memory.items():
        if sum(parts.values()) > available:
            yield f"note        too much {stage}: docs/guides/memory.md says which key makes which part smaller"
    yield f"disk        {disk}"
    if not has_room:
        yield "note        too little room on the disk: lower checkpoint.keep, or set output_dir"


def memory_of_inputs(recipe: Recipe, inputs: Inputs, num_ranks: int = 1) -> Memory:
    """Return what a run with these inputs holds on this machine; on a CPU, with the libraries of this process."""
    device, config = device_of(recipe.model.device), sized(recipe, inputs)
    memory = memory_of(recipe, config, prompt_tokens=longest_prompt(inputs), device=device, num_ranks=num_ranks)
    if device.type == "cuda":
        return memory
    libraries = {"libraries": float(psutil.Process().memory_info().rss)}
    return {stage: {**parts, **libraries} for stage, parts in memory.items()}


def longest_prompt(inputs: Inputs) -> int:
    """The tokens of the longest prompt."""
    return max(len(query.prompt_ids) for query in (*inputs.queries.train, *inputs.queries.held_out))


def sized(recipe: Recipe, inputs: Inputs) -> Any:
    """The configuration, with a new model's vocabulary."""
    config = deepcopy(inputs.config)
    if recipe.model.architecture is not None:
        config.vocab_size = recipe.model.architecture.get("vocab_size", len(inputs.tokenizer))
    return config


def memory_of(recipe: Recipe, config: Any, *, prompt_tokens: int, device: torch.device, num_ranks: int = 1) -> Memory:
    """Return what a run holds on its device where responses are as long as they may be, by docs/guides/memory.md.

    Of several ranks, on one host, what rank 0 holds, which copies all weights for a checkpoint.
    """
    text, rollout = config.get_text_config(), recipe.rollout
    width, tokens = _width(recipe, device), _pass_tokens(recipe, prompt_tokens)
    model, size = _trained_model(recipe.model, config, is_sharded=num_ranks > 1)
    weights = width * size
    held, update, copied = _by_parameters(recipe, model, width, num_ranks)
    activations = width * tokens * _kept(text, recipe.actor.gradient_checkpointing) * (1 + ("value model" in held))
    logits = 2 * min(MAX_LOGITS, tokens * text.vocab_size) + text.vocab_size * text.hidden_size
    logits *= 8 if width == 2 and device.type == "cpu" else 4  # a CPU multiplies float32 copies
    update |= {"activations": activations, "logits": logits}
    sampling = {}
    if rollout.engine == "embedded":  # a server has a cache of its own
        sampling = _sampling(recipe, text, prompt_tokens, width, num_ranks if rollout.is_in_trainer else 1)
    if rollout.engine == "embedded" and not rollout.is_in_trainer:
        held |= {"engine's weights": weights, **sampling}
    if num_ranks > 1:
        update["a layer, gathered"] = _gathered(model, width, activations)
        sampling["weights, gathered"] = weights * rollout.is_in_trainer  # a server has the weights it samples with
    if device.type == "cpu":  # where a GPU's copies lie, too
        sampling["checkpoint's copy"] = copied + _saved(model, width)
    stages = {"in the update": held | update, "while sampling": held | sampling}
    return {stage: {part: float(size) for part, size in parts.items() if size} for stage, parts in stages.items()}


def disk_line(recipe: Recipe, config: Any) -> tuple[str, bool]:
    """Return what a run leaves on the disk beside logs and rollouts, in words, and whether there is room for it."""
    width = _width(recipe, device_of(recipe.model.device))
    model, _ = _trained_model(recipe.model, config, is_sharded=False)
    copied = _by_parameters(recipe, model, width, 1)[2]
    weights = _saved(model, width)
    checkpoint = weights + copied
    num_kept = recipe.checkpoint.keep + 1
    num_models = 1 + bool(recipe.checkpoint.best) + bool(recipe.cold_start.steps)
    place = next(path for path in (recipe.run_dir.absolute(), *recipe.run_dir.absolute().parents) if path.is_dir())
    needed, free = num_kept * checkpoint + num_models * weights, shutil.disk_usage(place).free
    parts = f"{num_kept} × {_words(checkpoint)} while a checkpoint is written, "
    parts += f"{num_models} × {_words(weights)} of weights"
    return f"about {_words(needed)} of {_words(free)} free: {parts}", needed <= free


def _trained_model(recipe: ModelConfig, config: Any, *, is_sharded: bool) -> tuple[Any, int]:
    """The model as it is trained, without memory for its weights, and its parameters without an adapter's.

    A plan asks for the same few again and again, and an adapter takes seconds to make.
    """
    key = f"{is_sharded} {recipe.model_dump_json()} {config.to_json_string()}"
    if key not in _models:
        model = empty_model(recipe, deepcopy(config))
        size = _count(model)
        freeze(model, recipe.frozen)
        if recipe.lora is not None:
            add_lora(model, recipe.lora, is_sharded=is_sharded)
        if len(_models) == _MOST_MODELS:
            _models.clear()
        _models[key] = model, size
    return _models[key]


def _width(recipe: Recipe, device: torch.device) -> int:
    """Bytes of a weight."""
    dtype = recipe.model.dtype
    return 4 if dtype == "float32" or (dtype == "auto" and device.type == "cpu") else 2


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _by_parameters(
    recipe: Recipe, model: Any, width: int, num_ranks: int
) -> tuple[dict[str, float], dict[str, float], float]:
    """Return what goes by the number of parameters: always, in the update, and copied for a checkpoint.

    Each of several ranks has its share. What it keeps of a parameter is a master, in float32.
    """
    actor, shards = recipe.actor, 1 if recipe.trainer.sharding == "none" else num_ranks
    copied_masters = 4 if width < 4 else 0
    kept, masters = (width, copied_masters) if num_ranks == 1 else (4, 0)
    if recipe.model.lora is not None:
        copied_masters, masters = 0, 0  # its own are in float32
    size, trained = _count(model), sum(p.numel() for p in model.parameters() if p.requires_grad)
    has_critic = actor.advantage == "gae" and recipe.critic.trunk == "own"
    trunk = _count(model.base_model) if has_critic else 0
    has_reference = bool(actor.kl.coefficient) and not (recipe.model.lora and actor.kl.reference is None)
    held = {
        "weights": kept * size - (kept - _NF4) * _quantised(recipe, model),
        "masters": masters * trained,
        "moments": _moments(recipe, model),
        "value model": (kept * size + (masters + 8) * trunk) * has_critic,
        "reference": kept * size * has_reference,
        "teacher": kept * _teacher_size(recipe),
    }
    copied = held["masters"] + held["moments"] + held["value model"] + held["reference"] * bool(actor.kl.refresh_steps)
    copied += (copied_masters - masters) * (trained + trunk)
    held = {part: number / shards for part, number in held.items() if number}
    update = {
        "gradient": 4 * (trained + trunk) / shards,
        "gradient's copy": 4 * trained * actor.gradient_noise / shards,
    }
    return held, update, copied / shards


def _quantised(recipe: Recipe, model: Any) -> int:
    """The number of weights that QLoRA keeps in 4 bits: those of linear layers but the head's and an adapter's."""
    if recipe.model.lora is None or recipe.model.lora.quantize == "none":
        return 0
    linear, head = (
        (module for module in model.modules() if isinstance(module, nn.Linear)),
        model.get_output_embeddings(),
    )
    adapter = {*map(id, adapter_of(model).values())}
    return sum(own.weight.numel() for own in linear if own is not head and id(own.weight) not in adapter)


def _moments(recipe: Recipe, model: Any) -> float:
    """The bytes that the optimiser keeps of what it steps; what is not for Muon has AdamW's two moments."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    name = re.split("[.:]", recipe.actor.optimizer.name)[-1]
    sizes = {name: parameter.numel() for name, parameter in trained.items()}
    if name == "Muon":
        return 8 * sum(sizes.values()) - 4 * sum(sizes[matrix] for matrix in matrices_of(model, trained))
    return _MOMENTS.get(name, 8) * sum(sizes.values())


def _teacher_size(recipe: Recipe) -> int:
    """The parameters of a teacher of its own."""
    if recipe.teacher.path is None:
        return 0
    teacher = ModelConfig(path=recipe.teacher.path, trust_remote_code=recipe.model.trust_remote_code)
    return _count(empty_model(teacher, load_config(teacher, is_whole=False)))


def _saved(model: Any, width: int) -> float:
    """The bytes of what a model's directory has, by its parameters as `_by_parameters` leaves them."""
    return 4.0 * sum(p.numel() for p in adapter_of(model).values()) if has_adapter(model) else width * _count(model)


def _gathered(model: Any, width: int, activations: float) -> float:
    """The bytes of what a rank has gathered beside a pass's activations, or in their place when they are freed.

    With them there are two layers and their gradients, and the weights of all that is in no layer. The gradients of
    these are added up at the end, in float32.
    """
    layers = max((list(module) for module in model.modules() if isinstance(module, nn.ModuleList)), key=len, default=[])
    sizes = [*map(_count, layers)]
    outside = _count(model) - sum(sizes)
    under_way = (width + 4) * 2 * max(sizes, default=0) + width * outside
    return max(under_way, (2 * width + 4) * outside - activations)


def available_bytes(device: torch.device) -> float:
    """The memory of the GPU, or of this machine as far as its container may use it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limit = _CGROUP.read_text().strip() if _CGROUP.exists() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def _pass_tokens(recipe: Recipe, prompt_tokens: int) -> int:
    """Return tokens of the largest forward pass of an update."""
    rollout, actor = recipe.rollout, recipe.actor
    group = prompt_tokens + rollout.group_size * rollout.max_new_tokens
    in_all = rollout.queries_per_step // actor.mini_batches * group
    return max(prompt_tokens + rollout.max_new_tokens, min(actor.micro_batch_tokens, in_all))


def _kept(text: Any, recomputes: bool) -> int:
    """The numbers of a token that a pass keeps for its backward pass."""
    hidden, (heads, keys, size) = text.hidden_size, heads_of(text)
    mlp = 4 * inner_size(text) + 2 * hidden * (getattr(text, "num_experts_per_tok", None) or 0)
    layer, layers = 8 * hidden + 10 * heads * size + 5 * keys * size + mlp, text.num_hidden_layers
    return int(layer + (layers - 1) * hidden if recomputes else layer * layers)


def _sampling(recipe: Recipe, text: Any, prompt_tokens: int, width: int, num_samplers: int) -> dict[str, float]:
    """Keys and values of all rows, one layer of them twice while they grow; three copies of a token's logits.

    With turns, what is kept of the last ones, too. Of several ranks that sample, what each has for its share of the
    queries.
    """
    rollout, evaluation = recipe.rollout, recipe.evaluation
    asked = ((rollout.queries_per_step, rollout.group_size), (evaluation.num_queries, evaluation.samples))
    most = max(math.ceil(queries / num_samplers) * samples for queries, samples in asked)
    longest = max(rollout.max_new_tokens, *(suite.max_new_tokens or 0 for suite in evaluation.suites), 0)
    rows, (_, keys, size) = max(rollout.group_size, min(rollout.max_rows, most)), heads_of(text)
    numbers = 2 * (text.num_hidden_layers + 1) * keys * size * (prompt_tokens + longest)
    return {"cache": width * rows * numbers * (1 + rollout.has_turns), "token logits": 12 * rows * text.vocab_size}


def _words(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
