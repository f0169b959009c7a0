"""The weights of a model as servers get them, in files: `weights DIRECTORY key=value …` in place of a command."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.pretended_gpu import gpu

from gspo.engine.server.vllm_transfer import Source
from gspo.engine.server.weights import weight_files, write_safetensors
from gspo.model.load import make_tokenizer
from gspo.model.policy import load_policy
from gspo.recipe.load import load_recipe

TINY = Path(__file__).parents[1] / "tiny.yaml"


def write_weights(name: str, keys: Sequence[str]) -> int:
    """Write what goes by files, true and scrambled, and what vLLM's sender would read; only waits of these count."""
    settings = load_recipe(TINY, keys).model
    policy = load_policy(settings, make_tokenizer(settings, ["ab"]), seed=0)
    gpu.waits.clear()
    gpu.copies.clear()
    for kind in ("true", "scrambled"):
        with weight_files(policy, name, scrambled=kind == "scrambled") as paths:
            shutil.copytree(Path(paths[0]).parent, Path(name, kind))
    source = Source(policy)
    source.look(scrambled=False)
    with Path(name, "sent.safetensors").open("wb") as file:
        write_safetensors(file, dict(source))
    return 0
