"""A run of each kind in which the shapes of all tensors are checked, and that they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import shapes
from tests.needs import needs

import gspo
from gspo.objective import kl_estimate
from gspo.objective.surrogate import Surrogate
from gspo.run.console import Display

pytestmark = needs("beartype")
TINY = Path(__file__).with_name("tiny.yaml")
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "dense": ["rollout.dynamic_sampling=true", "actor.clip_fraction=0.15", "actor.correction=tis"],
    "experts": [
        *(f"model.architecture.{key}={value}" for key, value in EXPERTS.items()),
        "actor.routing_replay=engine",
        "actor.router_aux_loss=0.01",
        "actor.gradient_checkpointing=true",
        "model.dtype=bfloat16",
    ],
    "values": ["actor.surrogate=ppo", "actor.kl.coefficient=0.01", "actor.entropy_bonus=0.01"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_run_has_the_shape_that_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = gspo.load_recipe(TINY, ["steps=1", *KINDS[kind]])
    with shapes.checked():
        outcome = gspo.train(recipe, reward=lengths, display=Display(quiet=True))
    assert outcome.metrics[-1]["policy/grad_norm"] > 0


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def test_a_tensor_of_another_shape_is_refused_where_shapes_are_checked() -> None:
    matrix = torch.zeros(2, 3)
    if not shapes.ALWAYS:
        kl_estimate(matrix, matrix, "k1")
    with shapes.checked(), pytest.raises(Exception, match="kl_estimate"):
        kl_estimate(matrix, matrix, "k1")
    flags = torch.zeros(3, dtype=torch.bool)
    with shapes.checked(), pytest.raises(Exception, match="Surrogate"):
        Surrogate(per_sequence=matrix, clipped=flags, masked=flags, sequence_ratio=torch.zeros(2))
