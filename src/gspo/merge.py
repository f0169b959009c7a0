"""`gspo merge`: a whole model of a run that has trained an adapter, or of an adapter's directory."""

from pathlib import Path

import torch

from gspo.errors import UserError
from gspo.model.inputs import quiet_transformers
from gspo.model.load import base_of, load_config, load_model, load_tokenizer
from gspo.recipe.sections import ModelConfig
from gspo.run.checkpoint.store import RECIPE


def merge(target: Path, out: Path | None) -> list[str]:
    """Write the model that computes without an adapter what its own computes with it; return lines about it."""
    quiet_transformers()
    if not target.is_dir():
        raise UserError("no such directory", where=str(target), fix="name a run, or a directory with an adapter")
    path = str(target / "model" if (target / RECIPE).is_file() else target)
    if (base := base_of(path)) == path:
        fix = "a run with model.lora has one in model/, best_model/ and each checkpoint's model/"
        raise UserError("there is no adapter (adapter_config.json)", where=path, fix=fix)
    directory = out or Path(path).with_name(f"{Path(path).name}_merged")
    if directory.exists():
        fix = "name another directory with --out, or remove this one"
        raise UserError("this directory is there already", where=str(directory), fix=fix)
    recipe = ModelConfig(path=path, device="cpu")
    config = load_config(recipe)
    dtype = config.dtype or torch.float32  # in which its own files have it
    model = load_model(recipe, config, dtype=dtype, weights=None).eval()
    model.save_pretrained(directory)
    load_tokenizer(path).save_pretrained(directory)
    return [f"{directory}: {base} with the adapter of {path}, in {str(dtype).removeprefix('torch.')}"]
