"""`gspo merge`: a whole model of a run that has trained an adapter, or of an adapter's directory."""

from pathlib import Path

import torch

from gspo.errors import UserError
from gspo.model.inputs import quiet_transformers
from gspo.model.load import base_of, load_config, load_model, load_tokenizer
from gspo.recipe.load import load_recipe
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
    own = load_recipe(target / RECIPE).model if path != str(target) else ModelConfig(path=path)
    keys = {"path": path, "device": "cpu", "lora": None}
    recipe = own.model_copy(update=keys)  # with the run's model.kwargs
    config = load_config(recipe)
    dtype = config.dtype or torch.float32  # in which its own files have it
    model = load_model(recipe, config, dtype=dtype, weights=None).eval()
    try:
        model.save_pretrained(directory)
        load_tokenizer(path).save_pretrained(directory)
    except OSError as error:
        raise UserError(f"it cannot be written: {error}", where=str(directory), fix="name another with --out") from None
    return [f"{directory}: {base} with the adapter of {path}, in {str(dtype).removeprefix('torch.')}"]
