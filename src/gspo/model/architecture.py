"""The shape of a model: its transformers configuration, read or made, and checked before any weight is loaded."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.recipe.sections import ModelConfig

MAX_LAYERS = 10_000
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


def load_config(recipe: ModelConfig) -> Any:
    """The transformers configuration of the recipe's model, without dropout and jitter; UserError if there is none."""
    if recipe.architecture is not None:
        config = _made_config(recipe.architecture)
    else:
        config = _read_config(str(recipe.path), trust_remote_code=recipe.trust_remote_code)
    # Dropout, and the jitter of some routers, make π_θ ≠ π_old before any update: the first ratio would not be 1.
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop") or "jitter" in name):
            setattr(config, name, 0.0)
    return config


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
        problem = f"no {part} can be loaded: {short(error)}"
    return UserError(problem, where=path, fix=fix)


def short(error: Exception) -> str:
    """The text of an error on one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


def check_depth(path: str) -> None:
    """UserError where the config.json of a directory or hub id asks for a number of layers that no model has."""
    from transformers import PreTrainedConfig

    try:
        tree = PreTrainedConfig.get_config_dict(path)[0]
    except Exception:  # a tokenizer needs no config.json; whoever reads one reports its faults
        return
    _check_layers(tree, where=path)


def _read_config(path: str, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    place = Path(path)
    if not place.exists() and (path.startswith((".", "~", os.sep)) or path.count("/") > 1):
        raise UserError("no such directory", where=f"model.path: {path}")
    if place.exists() and not (place / "config.json").is_file():
        raise UserError("no config.json here, so this is no model directory", where=path)
    if place.is_dir() and not any([*place.glob("*.safetensors"), *place.glob("*.bin")]):
        fix = "finish the download, or train a new model of this shape with model.architecture"
        raise UserError("the model directory has no weights (*.safetensors)", where=path, fix=fix)
    check_depth(path)
    try:
        # Without trust_remote_code, transformers would ask on standard input and read the answer from there.
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
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
        raise UserError(f"no model can be made: {short(error)}", where=where) from None
