"""A run of each kind with the shapes of all tensor functions checked, which other tests do where SHAPES is all."""

import os
import subprocess
import sys
from pathlib import Path

TINY = Path(__file__).with_name("tiny.yaml")
RUN = """
import sys
from jaxtyping import install_import_hook
install_import_hook(sys.argv[2].split(), "beartype.beartype")
import gspo

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "dense": ["actor.gradient_noise=true", "rollout.dynamic_sampling=true", "actor.clip_fraction=0.15"],
    "experts": [
        *(f"model.architecture.{key}={value}" for key, value in EXPERTS.items()),
        "actor.routing_replay=engine",
        "actor.router_aux_loss=0.01",
        "actor.gradient_checkpointing=true",
        "model.dtype=bfloat16",
    ],
    "values": ["actor.surrogate=ppo", "actor.kl.coefficient=0.01", "actor.entropy_bonus=0.01", "actor.correction=tis"],
}
for name, overrides in KINDS.items():
    recipe = gspo.load_recipe(sys.argv[1], [f"name={name}", "steps=1", *overrides])
    gspo.train(recipe, reward=lambda completions, **_: [float(len(text)) for text in completions])
"""


def test_every_tensor_of_a_run_has_the_shape_that_is_written(tmp_path: Path) -> None:
    from tests.conftest import SHAPED

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN, str(TINY), " ".join(SHAPED)]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"dense", "experts", "values"}
