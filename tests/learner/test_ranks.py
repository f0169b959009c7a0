"""Several ranks train as one process does: the same gradient, step, weights and report, however the work is dealt."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.cost import Shape
from tests.conftest import FAMILIES, SHAPE
from tests.learner.rank_jobs import ALL, JOBS, OF_FOUR, RUNS, jobs_of
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from gspo.errors import UserError
from gspo.learner.balance import attention_share, cost, shares
from gspo.model.policy import load_policy
from gspo.model.sharding import Sharding
from gspo.recipe.sections import ModelConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What came of a job, by its name, how many ranks did it, and how many tokens a micro-batch had."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.learner.rank_jobs", str(directory)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return lambda job: torch.load(directory / job, weights_only=True)


def difference(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The norm of the whole difference, relative to the norm."""
    assert own.keys() == other.keys()
    squares = [((own[name].double() - other[name].double()) ** 2).sum() for name in own]
    return float((sum(squares) / sum((tensor.double() ** 2).sum() for tensor in other.values())) ** 0.5)


# Noise is measured between two passes of each rank, whose sums one process adds up in another order.
@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if "gradient_noise" not in job.keys])
def test_two_ranks_have_the_gradient_of_one_process_that_cuts_as_they_do_bit_by_bit(name: str, done: Any) -> None:
    ranks, one = done(f"{name} 2 {ALL}"), done(f"{name} 1 {ALL} as 2")
    assert all(torch.equal(ranks["gradient"][key], one["gradient"][key]) for key in one["gradient"])


@pytest.mark.parametrize(
    ("number", "tokens", "name"),
    [(number, tokens, name) for number in (2, 4) for tokens, _ in RUNS[number] for name in jobs_of(number)],
)
def test_a_step_on_ranks_is_that_of_one_process(name: str, tokens: int, number: int, done: Any) -> None:
    ranks, one = done(f"{name} {number} {tokens}"), done(f"{name} 1 {ALL}")
    bound = 2e-2 if name == "bfloat16" else 2e-6
    assert difference(ranks["gradient"], one["gradient"]) <= bound
    assert difference({"": ranks["old"]}, {"": one["old"]}) <= bound
    assert ranks["numbers"] == pytest.approx(one["numbers"], rel=max(bound, 1e-5), abs=bound)
    assert ranks["ratios"] == pytest.approx(one["ratios"], rel=bound)
    assert ranks["noise"] == (one["noise"] and pytest.approx(one["noise"], rel=1e-4))
    assert ranks["weights"].keys() == one["weights"].keys()
    assert difference(ranks["weights"], one["weights"]) <= max(bound, 1e-4)


@pytest.mark.parametrize("name", [name for name in JOBS if name != "bfloat16"])
def test_responses_are_those_of_one_process(name: str, done: Any) -> None:
    alone = done(f"{name} 1 {ALL}")["sampled"]
    assert done(f"{name} 2 60")["sampled"] == alone
    assert name not in OF_FOUR or done(f"{name} 4 60")["sampled"] == alone


@pytest.mark.parametrize("name", JOBS)
def test_the_engine_decodes_as_on_one_process(name: str, done: Any) -> None:
    """The decoder that is written out is fast, and is proven with the whole model."""
    alone = done(f"{name} 1 {ALL}")["description"]
    assert done(f"{name} 2 60")["description"] == alone
    assert name not in OF_FOUR or done(f"{name} 4 60")["description"] == alone
    assert alone["decoder written out"] == "True"


@pytest.fixture
def sharding() -> Iterator[Sharding]:
    """Over a single rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Sharding(mesh=init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()


@pytest.mark.parametrize(("family", "reason"), [("gpt_oss", "packs"), ("opt", "layers")])
def test_models_that_ranks_cannot_run_alike_are_refused(
    family: str, reason: str, sharding: Sharding, fitted_tokenizer: Any
) -> None:
    architecture = {"model_type": family, **SHAPE, **FAMILIES.get(family, {"word_embed_proj_dim": 16, "ffn_dim": 8})}
    recipe = ModelConfig(architecture=architecture, tokenizer="fit", device="cpu")
    with pytest.raises(UserError, match=f"cannot be sharded: .*{reason}"):
        load_policy(recipe, fitted_tokenizer, seed=0, sharding=sharding)


def test_weights_that_are_tied_but_differ_are_refused(
    new_policy: Any, tmp_path: Path, sharding: Sharding, fitted_tokenizer: Any
) -> None:
    new_policy().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    recipe = ModelConfig(path=str(tmp_path), device="cpu")
    with pytest.raises(UserError, match=r"cannot be sharded: .*differ"):
        load_policy(recipe, fitted_tokenizer, seed=0, sharding=sharding)


def test_tied_weights_stay_tied(done: Any) -> None:
    weights = done("tied 2 60")["weights"]
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"] or (
        weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    )


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 2}, {"head_dim": 32}, {"intermediate_size": 200}])
def test_the_cost_of_a_sequence_is_that_of_its_products(changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model("qwen3", vocab_size=50, **{**SHAPE, **changes})
    shape, costs = Shape.of(config), [cost(tokens, attention_share(config)) for tokens in (10, 1000, 40_000)]
    products = [shape.trunk_flops(n, n * n // 2) + shape.head_flops(n) for n in (10, 1000, 40_000)]
    assert [own / costs[0] for own in costs] == pytest.approx([own / products[0] for own in products])


def test_of_a_mixture_the_experts_of_a_token_count() -> None:
    sizes = {**SHAPE, "vocab_size": 50, "num_experts": 64, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    mixture, dense = AutoConfig.for_model("qwen3_moe", **sizes), AutoConfig.for_model("qwen3", **sizes)
    dense.intermediate_size = 3 * 40
    assert attention_share(mixture) == attention_share(dense)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_shares_are_even_and_have_everything_once(number: int) -> None:
    costs = [[5.0, 1.0, 2.0], [100.0], [7.0] * 8, [1.0], [3.0] * 5]
    own = shares(costs, number)
    assert sorted(place for places in own for place in places) == [*range(18)]
    flat = [cost for group in costs for cost in group]
    totals = [sum(flat[place] for place in places) for places in own]
    assert max(totals) <= max(100.0, 1.05 * sum(totals) / number)  # one long response is not cut
    assert min(totals) >= (sum(totals) - 100.0) / max(1, number - 1) - 8.0 or number == 1


def test_groups_stay_together_where_that_costs_little() -> None:
    assert shares([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]], 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert shares([[1.0] * 4], 2) == [[0, 2], [1, 3]]
