"""The model of a recipe: its transformers configuration and its weights, read or made, with every fault named."""

import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from gspo.errors import UserError
from gspo.model.prove import one_line
from gspo.recipe.sections import ModelConfig

MAX_LAYERS = 10_000
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def load_config(recipe: ModelConfig) -> Any:
    """The transformers configuration of the recipe's model, without dropout and jitter; UserError if there is none."""
    config = _read_config(recipe) if recipe.architecture is None else _made_config(recipe.architecture)
    # Dropout, and the jitter of some routers, make π_θ ≠ π_old before any update: the first ratio would not be 1.
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or "jitter" in name):
            setattr(config, name, 0.0)
    return config


def load_model(recipe: ModelConfig, config: Any, *, dtype: torch.dtype, weights: Path | None) -> Any:
    """The transformers model of a configuration, with weights of a directory or new ones; UserError for unfit ones."""
    from transformers import AutoModelForCausalLM

    if path := str(weights or recipe.path or ""):
        return _with_weights(path, config, dtype=dtype, trust_remote_code=recipe.trust_remote_code, own=bool(weights))
    try:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        for parameter in model.parameters():  # not buffers: rotary frequencies stay float32, as in a loaded model
            parameter.data = parameter.data.to(dtype)
        model(input_ids=torch.ones(1, 2, dtype=torch.long))  # numbers that do not fit raise only here
    except Exception as error:
        raise UserError(f"no model can be made: {one_line(error)}", where="model.architecture") from None
    return model


def max_positions(config: Any) -> int | None:
    """The longest sequence (prompt and response) that an architecture declares, in tokens."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def unloadable(path: str, error: Exception, *, part: str = "model", fix: str | None = None) -> UserError:
    """The error for a place from which transformers cannot load a model or a tokenizer."""
    if "trust_remote_code" in str(error):
        problem = "it brings Python code of its own, which is run only where the recipe allows it"
        fix = "read that code; to run it, set model.trust_remote_code: true"
    elif part == "model" and not Path(path).exists():
        problem, path = "neither a directory nor a hub id that can be reached from here", f"model.path: {path}"
        fix = "check the spelling and the network, or give the directory of a model"
    else:
        problem = f"no {part} can be loaded: {one_line(error)}"
    return UserError(problem, where=path, fix=fix)


def _read_config(recipe: ModelConfig) -> Any:
    from transformers import AutoConfig, PreTrainedConfig

    path = str(recipe.path)
    place = Path(path)
    if not place.exists() and (path.startswith((".", "~", os.sep)) or path.count("/") > 1):
        raise UserError("no such directory", where=f"model.path: {path}")
    if place.exists() and not (place / "config.json").is_file():
        raise UserError("no config.json here, so this is no model directory", where=path)
    if place.is_dir() and not any([*place.glob("*.safetensors"), *place.glob("*.bin")]):
        fix = "finish the download, or train a new model of this shape with model.architecture"
        raise UserError("the model directory has no weights (*.safetensors)", where=path, fix=fix)
    try:
        _check_layers(PreTrainedConfig.get_config_dict(path)[0], where=path)
        # Without trust_remote_code, transformers would ask on standard input and read the answer from there.
        return AutoConfig.from_pretrained(path, trust_remote_code=recipe.trust_remote_code)
    except UserError:
        raise
    except Exception as error:
        raise unloadable(path, error) from None


def _check_layers(tree: Mapping[str, Any], *, where: str) -> None:
    """UserError for a number that no model has: its configuration alone would take all memory, and hours."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _check_layers(value, where=where)
        elif name in _DEPTHS and isinstance(value, int) and value > MAX_LAYERS:
            raise UserError(f"{name} {value:,} is more than {MAX_LAYERS:,}", where=where, fix="correct the number")


def _made_config(architecture: dict[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind, where = str(architecture["model_type"]), "model.architecture"
    if kind not in CONFIG_MAPPING_NAMES:
        near = difflib.get_close_matches(kind, CONFIG_MAPPING_NAMES, n=3)
        fix = f"did you mean {', '.join(near)}?" if near else "give one that transformers knows, such as qwen3"
        raise UserError(f"unknown model_type {kind!r}", where=where, fix=fix)
    _check_layers(architecture, where=where)
    try:
        default = AutoConfig.for_model(kind)
        for key in architecture.keys() - {"model_type"}:
            # transformers keeps a misspelt key without using it. Some true keys are declared nowhere (head_dim).
            near = difflib.get_close_matches(key, default.to_dict(), n=1, cutoff=0.85)
            if near and not hasattr(default, key):
                raise UserError(f"{kind} has no key {key!r}", where=where, fix=f"did you mean {near[0]}?")
        return AutoConfig.for_model(**architecture)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"no model can be made: {one_line(error)}", where=where) from None


def _with_weights(path: str, config: Any, *, own: bool, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    options |= {"config": config, "use_safetensors": True if own else None}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    except Exception as error:
        raise unloadable(path, error) from None
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"{len(missing)} weights are missing, among them {missing[0]}", where=path)
    if unused := _unused(report["unexpected_keys"], model, config):
        problem = f"{len(unused)} weights of the files have no place in the model that config.json describes, such as "
        fix = "correct config.json (the number of layers, the model_type), or remove these weights from the files"
        raise UserError(f"{problem}{', '.join(unused[:3])}", where=path, fix=fix)
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(f"weight {name} holds NaN or infinity", where=path, fix="use a copy that is whole")
        # A loaded weight lies in the file's pages, wherever its header ends, and kernels round by alignment.
        parameter.data = parameter.data.clone()
    return model


def _unused(names: Iterable[str], model: Any, config: Any) -> list[str]:
    """The weights that the model has no place for, without the other parts of a checkpoint of text and images."""
    if config.get_text_config() is config:
        return sorted(names)
    parts = {model.base_model_prefix, *(name.partition(".")[0] for name in model.state_dict())}
    return sorted(name for name in names if name.partition(".")[0] in parts)
