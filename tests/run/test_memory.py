"""The formula of memory has what models, optimisers, caches and passes really hold; and says what does not fit."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.needs import needs

import gspo
from gspo import cli
from gspo.engine.embedded.cache import in_place_cache
from gspo.engine.embedded.fast_decode import read_tokens
from gspo.learner.optimizer import Optimizer
from gspo.learner.torch_optimizers import torch_optimizers
from gspo.model.packing import TokenSequence, pack
from gspo.model.trunk import enable_packing, packed_pass
from gspo.recipe.load import load_recipe, make_recipe
from gspo.run import memory
from gspo.run.console import Display
from gspo.run.memory import Memory, disk_line, memory_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def config_of(**shape: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**SHAPE, **shape})


def model_of(**shape: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config_of(**shape))


def computed(
    device: torch.device = CPU, actor: Mapping[str, Any] | None = None, num_ranks: int = 1, **sections: Any
) -> Memory:
    rollout = {"queries_per_step": 8, "group_size": 4, "max_new_tokens": 50, **sections.pop("rollout", {})}
    tree = {"name": "m", "steps": 1, "model": {"path": "m"}, "evaluation": {"num_queries": 0}, **sections}
    recipe = make_recipe({**tree, "rollout": rollout, "actor": actor or {}})
    return memory_of(recipe, config_of(), prompt_tokens=10, device=device, num_ranks=num_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_masters_moments_and_gradient_are_those_that_an_optimiser_holds(dtype: torch.dtype) -> None:
    model = model_of().to(dtype)
    optimizer = Optimizer(
        model, make_recipe({"name": "m", "steps": 1, "model": {"path": "m"}}).actor.optimizer, total_steps=1
    )
    gradient = sum(own.nbytes for own in optimizer.gradient())
    optimizer.step()
    state = optimizer.state()
    held = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "moments": sum(own.nbytes for name, own in state.items() if name.startswith("exp_avg")),
        "gradient": gradient,
        "masters": sum(own.nbytes for name, own in state.items() if name.startswith("master/")),
    }
    parts = computed(model={"path": "m", "dtype": str(dtype).removeprefix("torch.")})["in the update"]
    assert {name: parts.get(name, 0) for name in held} == held


@needs("peft")
def test_qlora_keeps_linear_layers_but_the_head_in_4_bits() -> None:
    whole, quantised = (
        computed(GPU, model={"path": "m", "lora": {"quantize": kind}})["in the update"] for kind in ("none", "nf4")
    )
    linear = 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 160)  # q, k, v and o, and the three of the MLP
    assert whole["weights"] - quantised["weights"] == pytest.approx((2 - 4.127 / 8) * linear)
    assert {part: size for part, size in whole.items() if quantised[part] != size}.keys() == {"weights"}


def test_a_gpu_has_bfloat16_unless_the_recipe_says_otherwise_and_a_cpu_float32() -> None:
    on_gpu, on_cpu = computed(GPU)["in the update"], computed()["in the update"]
    assert (on_cpu["weights"], "masters" in on_cpu) == (2 * on_gpu["weights"], False)
    assert on_gpu["masters"] == 2 * on_gpu["weights"]
    assert computed(GPU, model={"path": "m", "dtype": "float32"})["in the update"]["weights"] == on_cpu["weights"]


def test_reference_value_model_and_the_gradients_copy_take_what_they_hold() -> None:
    weights, trunk = (
        computed()["in the update"]["weights"],
        4.0 * sum(p.numel() for p in model_of().base_model.parameters()),
    )
    assert computed(actor={"kl": {"coefficient": 0.1}})["while sampling"]["reference"] == weights
    assert computed(actor={"gradient_noise": True})["in the update"]["gradient's copy"] == weights
    ppo = computed(actor={"surrogate": "ppo"})
    assert ppo["in the update"]["value model"] == weights + 2 * trunk
    assert ppo["in the update"]["gradient"] == weights + trunk
    assert ppo["in the update"]["activations"] == 2 * computed()["in the update"]["activations"]
    assert "value model" not in computed(actor={"surrogate": "ppo"}, critic={"trunk": "shared"})["in the update"]


def test_what_is_frozen_has_weights_alone_and_other_optimisers_other_moments() -> None:
    whole, embedding = computed()["in the update"], 4.0 * SHAPE["vocab_size"] * SHAPE["hidden_size"]
    frozen = computed(model={"path": "m", "frozen": ["*embed_tokens*"]})["in the update"]
    assert frozen["weights"] == whole["weights"]
    assert frozen["gradient"] == whole["gradient"] - embedding and frozen["moments"] == whole["moments"] - 2 * embedding
    kl = {"coefficient": 0.1, "refresh_steps": 2}
    copies = [computed(actor={"kl": own})["while sampling"]["checkpoint's copy"] for own in ({"coefficient": 0.1}, kl)]
    assert copies[1] - copies[0] == whole["weights"]


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, EXPERTS])
def test_of_muon_embeddings_heads_norms_and_stacked_experts_have_two_moments(shape: dict[str, Any]) -> None:
    tree = {"name": "m", "steps": 1, "model": {"path": "m"}, "actor": {"optimizer": {"name": "torch.optim.Muon"}}}
    recipe, model, held = make_recipe(tree), model_of(**shape), 0
    for own in torch_optimizers(model, dict(model.named_parameters()), recipe.actor.optimizer, where="here"):
        for parameter in (parameter for group in own.param_groups for parameter in group["params"]):
            parameter.grad = torch.ones_like(parameter)
        own.step()
        tensors = [tensor for kept in own.state.values() for tensor in kept.values() if torch.is_tensor(tensor)]
        held += sum(tensor.nbytes for tensor in tensors if tensor.ndim)
    assert memory_of(recipe, config_of(**shape), prompt_tokens=10, device=CPU)["in the update"]["moments"] == held


@pytest.mark.parametrize("num_ranks", [2, 4, 16])
@pytest.mark.parametrize(
    "sections",
    [{}, {"model": {"path": "m", "dtype": "bfloat16"}}, {"actor": {"kl": {"coefficient": 0.1, "refresh_steps": 2}}}],
    ids=["float32", "bfloat16", "refreshed reference"],
)
def test_ranks_copy_together_what_a_process_copies_alone_and_rank_0_all_weights_of_it(
    sections: dict[str, Any], num_ranks: int
) -> None:
    alone, shared = (computed(**sections, num_ranks=number)["while sampling"] for number in (1, num_ranks))
    weights, copies = alone["weights"], [parts["checkpoint's copy"] for parts in (alone, shared)]
    assert num_ranks * (copies[1] - weights) + weights == copies[0]


def test_ranks_share_what_is_sampled_and_what_the_optimiser_holds_but_not_a_copied_model() -> None:
    alone, shared = computed(), computed(num_ranks=4)
    for stage, part in (("while sampling", "cache"), ("in the update", "moments"), ("in the update", "gradient")):
        assert 4 * shared[stage][part] == alone[stage][part]
    copied = computed(num_ranks=4, trainer={"sharding": "none"})
    assert copied["in the update"]["moments"] == alone["in the update"]["moments"]
    assert copied["while sampling"]["checkpoint's copy"] == alone["while sampling"]["checkpoint's copy"]


def test_the_cache_is_that_of_all_rows_at_their_longest_and_a_layer_more() -> None:
    model, rows, tokens = model_of(), 12, 60
    cache = in_place_cache(model.config, most=tokens)
    with torch.inference_mode():
        ids = torch.ones(rows, tokens, dtype=torch.long)
        read_tokens(model.model, ids, None, torch.arange(tokens).expand(rows, -1), cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    layers = model.config.num_hidden_layers
    assert computed(rollout={"max_rows": rows})["while sampling"]["cache"] == held * (layers + 1) / layers
    whole = computed()["while sampling"]["cache"]  # 8 × 4 responses, fewer than max_rows
    assert whole == held * 32 / rows * (layers + 1) / layers
    evaluated = computed(evaluation={"num_queries": 100, "samples": 3})
    assert evaluated["while sampling"]["cache"] == whole * 300 / 32


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_servers_cache_is_not_the_trainers(engine: str) -> None:
    alone, with_server = computed(), computed(rollout={"engine": engine})
    assert with_server["in the update"] == alone["in the update"]
    missing = alone["while sampling"].keys() - with_server["while sampling"].keys()
    assert missing == {"cache", "token logits"}


def test_an_engine_that_samples_while_the_policy_is_trained_has_weights_and_a_cache_beside_the_update() -> None:
    alone, beside = computed(), computed(rollout={"max_staleness": 1})
    for parts in beside.values():
        assert parts["engine's weights"] == alone["while sampling"]["weights"]
        assert parts["cache"] == alone["while sampling"]["cache"]
    assert computed(rollout={"max_staleness": 1, "in_turn": True}) == alone


@pytest.mark.parametrize(
    "shape", [{}, {"model_type": "llama"}, {"intermediate_size": 640}, {"hidden_size": 256}, EXPERTS]
)
def test_activations_are_about_those_that_a_pass_keeps(shape: dict[str, Any]) -> None:
    model, kept = model_of(**shape), dict[int, int]()
    assert enable_packing(model, model.base_model, model.config.hidden_size)
    sequences = [
        TokenSequence(prompt_ids=(query,) * 10, response_ids=torch.arange(3, 3 + length))
        for query in range(6)
        for length in (30, 45, 50, 40)
    ]
    layout = pack(sequences, device=CPU, hidden_size=model.config.hidden_size)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() in weights else storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_pass(model.base_model, layout)
    formula = 4 * len(layout.ids) * memory._kept(model.config, False)
    assert 0.8 < formula / sum(kept.values()) < 1.25


def test_a_pass_has_as_many_tokens_as_a_micro_batch_but_no_more_than_there_are_nor_less_than_the_longest() -> None:
    def tokens(**actor: Any) -> float:
        return computed(actor=actor)["in the update"]["activations"] / (4 * memory._kept(config_of(), False))

    assert tokens(micro_batch_tokens=300) == 300
    assert tokens(micro_batch_tokens=10) == 10 + 50
    assert tokens() == 2 * (10 + 4 * 50)  # a mini-batch of two queries, whose prompts are shared
    recomputed = computed(actor={"gradient_checkpointing": True})["in the update"]["activations"]
    assert recomputed < computed()["in the update"]["activations"] / 2


def test_check_says_what_a_run_needs_and_notes_what_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = __file__.replace("run/test_memory.py", "tiny.yaml")
    assert cli.main(["check", tiny]) == 0
    said = capsys.readouterr().out.splitlines()
    place = next(number for number, line in enumerate(said) if line.startswith("memory      about"))
    assert "in the update: libraries" in said[place] and "while sampling" in said[place + 1]
    assert said[place + 2].endswith("that this machine has (cpu)")
    assert said[place + 3].startswith("disk        about ") and "3 × " in said[place + 3]  # two are kept
    assert not any(line.startswith("note") for line in said)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**20)
    assert cli.main(["check", tiny]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]
    assert len(said) == 2 and all("too much" in line and "docs/guides/memory.md" in line for line in said)


@pytest.mark.parametrize("keys", [(), ("checkpoint.keep=4", "model.dtype=bfloat16"), ("checkpoint.best=reward/mean",)])
def test_the_disk_that_a_run_needs_is_that_of_its_checkpoints_and_models(
    keys: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    size = "model.architecture.hidden_size=512"  # so that what goes by parameters is most of a file
    base = (size, "steps=1", "cold_start={steps: 0}", "evaluation.num_queries=0", "rollout.max_new_tokens=1")
    recipe = load_recipe(Path(__file__).parents[1] / "tiny.yaml", [*base, *keys])
    outcome = gspo.train(recipe, display=Display(quiet=True))
    written = sum(path.stat().st_size for path in max(Path("runs/tiny/checkpoints").iterdir()).rglob("*.safetensors"))
    weights = sum(path.stat().st_size for path in outcome.model.rglob("*.safetensors"))
    config = config_of(**json.loads((outcome.model / "config.json").read_text()))
    said, has_room = disk_line(recipe, config)
    needed = (recipe.checkpoint.keep + 1) * written + weights * (1 + bool(recipe.checkpoint.best))
    number, unit = re.findall(r"[\d.]+ [MG]iB", said)[0].split()
    assert float(number) * 2 ** (20 if unit == "MiB" else 30) == pytest.approx(needed, rel=0.15) and has_room
    full = SimpleNamespace(free=1)
    monkeypatch.setattr("gspo.run.memory.shutil.disk_usage", lambda place: full)
    assert not disk_line(recipe, config)[1]


def test_check_of_several_processes_says_what_does_not_fit_all_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = __file__.replace("run/test_memory.py", "tiny.yaml")
    stages = {"while sampling": {"libraries": 80.0, "checkpoint's copy": 30.0}}
    monkeypatch.setattr(memory, "memory_of_inputs", lambda *_: stages)

    def notes(available: float) -> list[str]:
        monkeypatch.setattr(memory, "available_bytes", lambda device: available)
        assert cli.main(["check", tiny, "--processes", "3"]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("note")]

    assert notes(331.0) == []
    assert "too much while sampling" in notes(329.0)[-1]


def test_check_goes_on_where_a_model_cannot_be_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_trained_model", lambda *_, **__: 1 / 0)
    assert cli.main(["check", __file__.replace("run/test_memory.py", "tiny.yaml")]) == 0
    assert "memory      cannot be computed: division by zero" in capsys.readouterr().out


def test_the_guides_table_of_model_sizes_is_the_formulas() -> None:
    from benchmarks.memory import table

    guide = Path(__file__).parents[2] / "docs" / "guides" / "memory.md"
    assert table() in guide.read_text(encoding="utf-8")


def test_ranks_gather_two_layers_beside_activations_or_all_the_rest_when_these_are_freed() -> None:
    """By MemTracker (benchmarks/tracked_memory.py); of weights in bfloat16, whose gradients are added in float32."""
    outside = (2 * 100 + 1) * 64
    layer = 2 * 64 * 4 * 16 + 2 * 64 * 2 * 16 + 3 * 64 * 160 + 2 * 64 + 2 * 16
    short = {"queries_per_step": 4, "group_size": 2, "max_new_tokens": 1}
    few = {"actor": {"micro_batch_tokens": 11, "gradient_checkpointing": True}, "rollout": short}
    many = computed(GPU, num_ranks=2, rollout={"max_new_tokens": 400})
    assert many["in the update"]["a layer, gathered"] == 6 * 2 * layer + 2 * outside
    model = {"architecture": {**SHAPE, "vocab_size": 50_000}, "tokenizer": "fit"}
    wide = memory_of(
        make_recipe(
            {
                "name": "m",
                "steps": 1,
                "model": model,
                "queries": {"procedural": {"task": "chain_sum"}},
                "reward": "math",
                **few,
            }
        ),
        config_of(vocab_size=50_000),
        prompt_tokens=10,
        device=GPU,
        num_ranks=2,
    )["in the update"]
    assert wide["a layer, gathered"] == 8 * (2 * 50_000 + 1) * 64 - wide["activations"]
