"""`gspo merge`: a whole model of a run that has trained an adapter, or of an adapter's directory."""

import shutil
from pathlib import Path

import torch

from gspo.errors import UserError
from gspo.evaluate import sections_of_run
from gspo.model.inputs import quiet_transformers
from gspo.model.load import base_of, load_config, load_model, load_tokenizer
from gspo.recipe.sections import ModelConfig
from gspo.run.checkpoint.store import RECIPE


def merge(target: Path, out: Path | None) -> list[str]:
    """Write the model that computes without an adapter what its own computes with it; return lines about it."""
    quiet_transformers()
    if not target.is_dir():
        raise UserError("no such directory", where=str(target), fix="name a run, or a directory with an adapter")
    is_run = (target / RECIPE).is_file()
    recipe = ModelConfig(**sections_of_run(target)["model"] if is_run else {"path": str(target)})
    path = str(recipe.path)
    if (base := base_of(path)) == path:
        fix = "a run with model.lora has one in model/, best_model/ and each checkpoint's model/"
        raise UserError("there is no adapter (adapter_config.json)", where=path, fix=fix)
    directory = out or (target / "model_merged" if is_run else target.with_name(f"{target.name}_merged"))
    if directory.exists():
        fix = "name another directory with --out, or remove this one"
        raise UserError("this directory is there already", where=str(directory), fix=fix)
    config = load_config(recipe)
    dtype = config.dtype or torch.float32  # in which its own files have it
    model = load_model(recipe, config, dtype=dtype, weights=None).eval()
    try:
        model.save_pretrained(directory)
        load_tokenizer(path).save_pretrained(directory)
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise UserError(f"it cannot be written: {error}", where=str(directory), fix="name another with --out") from None
    return [f"{directory}: {base} with the adapter of {path}, in {str(dtype).removeprefix('torch.')}"]
