"""LoRA: what is trained, what it computes, and what is written, against the formula and against peft's own reading."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.needs import needs

from gspo.engine.embedded import fast_decode
from gspo.engine.embedded.decoding import Means
from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.engine.embedded.proof import proven_means
from gspo.engine.engine import Completion
from gspo.engine.make import _lora_options, check_engine
from gspo.engine.server.probe import Probe
from gspo.errors import UserError
from gspo.merge import merge
from gspo.model import lora
from gspo.model.lora import (
    adapter_of,
    copied_adapter,
    merged_tensors,
    moved_adapter,
    read_adapter,
    with_adapter,
    without_effect,
)
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, checkpoint_gradients, load_policy, response_likelihood
from gspo.model.weights import weights_by_layer
from gspo.recipe.load import load_recipe
from gspo.recipe.sections import LoraConfig, ModelConfig, VllmConfig

pytestmark = needs("peft")
ROOT = Path(__file__).parents[2]
NewPolicy = Callable[..., Policy]
Adapted = Callable[..., Policy]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled by the root": {"rslora": True},
    "of rank 1": {"rank": 1},
    "DoRA": {"dora": True},
}
PAIRS = [(kind, family) for kind in KINDS for family in ("qwen3", "qwen3_moe", "gpt2")]
PAIRS.remove(("DoRA", "qwen3_moe"))  # which peft has not
PROMPT = (5, 3, 8, 4)
SEQUENCES = [
    TokenSequence(prompt_ids=PROMPT, response_ids=torch.tensor([6, 3, 9, 5, 7])),
    TokenSequence(prompt_ids=PROMPT, response_ids=torch.tensor([4, 4])),
    TokenSequence(prompt_ids=(7,), response_ids=torch.tensor([3, 8, 3])),
]


@pytest.fixture
def adapted(new_policy: NewPolicy, tmp_path: Path) -> Adapted:
    """A policy with an adapter beside the weights of a family's model, which lies in `tmp_path / family`."""

    def load(family: str = "qwen3", dtype: Any = "float32", **settings: Any) -> Policy:
        if not (directory := tmp_path / family).exists():
            new_policy(family).save(directory)
        recipe = ModelConfig(path=str(directory), device="cpu", dtype=dtype, lora=LoraConfig(**settings))
        return load_policy(recipe, new_policy(family).tokenizer, seed=0)

    return load


def plain(policy: Policy, tmp_path: Path, family: str = "qwen3") -> Policy:
    """The policy without an adapter."""
    return load_policy(ModelConfig(path=str(tmp_path / family), device="cpu"), policy.tokenizer, seed=0)


def give(policy: Policy, numbers: Any) -> None:
    """Change the adapter's own numbers."""
    for name, parameter in adapter_of(policy.model).items():
        parameter.data = numbers[name]


@torch.no_grad()
def logprobs(policy: Policy) -> torch.Tensor:
    return response_likelihood(policy, SEQUENCES).logprobs


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2", "gpt_oss"])
def test_training_begins_with_the_model_as_it_is_and_trains_the_adapter_alone(
    family: str, adapted: Adapted, tmp_path: Path
) -> None:
    policy = adapted(family)
    assert torch.equal(logprobs(policy), logprobs(plain(policy, tmp_path, family)))
    trained = {name for name, parameter in policy.model.named_parameters() if parameter.requires_grad}
    assert trained == adapter_of(policy.model).keys() == policy.weights().keys()
    assert not any("lm_head" in name or "router" in name or ".gate." in name for name in trained)
    assert any("experts" in name for name in trained) == (family in ("qwen3_moe", "gpt_oss"))
    again = adapted(family)
    assert all(torch.equal(own, again.weights()[name]) for name, own in policy.weights().items())


def test_merged_weights_are_those_of_the_formula(adapted: Adapted) -> None:
    for is_stabilised, factor in ((False, 6 / 4), (True, 6 / 4**0.5)):
        policy = adapted(rank=4, alpha=6, rslora=is_stabilised)
        give(policy, moved_adapter(policy.model))
        model = policy.model
        merged = merged_tensors(model, [name for name, _ in model.named_parameters()])
        own = {str(lora.without_adapter(name)): p for name, p in model.named_parameters() if ".lora_" not in name}
        assert merged.keys() == own.keys()
        for name, weight in own.items():
            prefix, expected = name.removesuffix(".weight"), weight.double()
            if f"{prefix}.lora_A.default.weight" in adapter_of(model):
                down, up = (adapter_of(model)[f"{prefix}.lora_{x}.default.weight"].double() for x in "AB")
                expected = expected + factor * up @ down
            torch.testing.assert_close(merged[name].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "family"), PAIRS)
def test_what_it_computes_and_its_gradient_are_those_of_the_merged_model(
    kind: str, family: str, adapted: Adapted, tmp_path: Path
) -> None:
    policy, reference = adapted(family, **KINDS[kind]), plain(adapted(family), tmp_path, family)
    checkpoint_gradients(policy)
    start, weights = dict(moved_adapter(policy.model) or {}), torch.linspace(-1, 1, 10)
    give(policy, start)

    def merged(**moved: torch.Tensor) -> dict[str, torch.Tensor]:
        with with_adapter(policy.model, {**start, **moved}):
            return merged_tensors(policy.model, [name for name, _ in policy.model.named_parameters()])

    reference.model.load_state_dict(merged(), strict=False)
    losses = [response_likelihood(each, SEQUENCES).logprobs for each in (policy, reference)]
    for own in losses:
        (own * weights).sum().backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    of_weights = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
    found, expected, width = list[float](), list[float](), 1e-2
    for name, parameter in adapter_of(policy.model).items():
        if kind == "DoRA" and "magnitude" not in name:
            continue  # for these it takes the norm of a row as given (2402.09353, Section 4.3)
        way = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(found)))
        ends = [merged(**{name: start[name] + sign * width * way}) for sign in (1, -1)]
        slopes = {key: (ends[0][key] - ends[1][key]).double() / (2 * width) for key in of_weights}
        assert parameter.grad is not None
        found.append(float((parameter.grad * way).sum()))
        expected.append(float(sum((slopes[key] * of_weights[key]).sum() for key in slopes)))
    assert min(map(abs, found)) > 0
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-4 * max(map(abs, found)))
    assert all(p.grad is None for name, p in policy.model.named_parameters() if name not in start)


def test_only_layers_of_the_patterns_are_adapted(adapted: Adapted) -> None:
    names = adapter_of(adapted(targets=["*layers.1.*attn*", "up_proj"]).model)  # as a pattern, and as peft has names
    layers = {name.partition(".lora_")[0].removeprefix("model.layers.") for name in names}
    attention = {f"1.self_attn.{name}_proj" for name in "qkvo"}
    assert layers == attention | {"0.mlp.up_proj", "1.mlp.up_proj"}
    with pytest.raises(UserError, match=r"model.lora.targets: '\*atn\*' matches no parameter(.|\n)*self_attn.q_proj"):
        adapted(targets=["*atn*"])


def test_kernels_of_convolutions_are_no_experts(adapted: Adapted, new_policy: NewPolicy, tmp_path: Path) -> None:
    new_policy("lfm2", layer_types=["conv", "full_attention"]).save(tmp_path / "lfm2")
    names = adapter_of(adapted("lfm2").model)
    assert any(".conv.in_proj." in name for name in names) and not any(".conv.conv." in name for name in names)


@pytest.mark.parametrize("kind", KINDS)
def test_its_directory_is_one_of_pefts(kind: str, adapted: Adapted, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = adapted(**KINDS[kind])
    give(policy, moved_adapter(policy.model))
    policy.save(tmp_path / "adapter", policy.weights())
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 3, 8, 4, 6, 3]])
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=ids).logits, policy.model(input_ids=ids).logits)
    again = adapted(**KINDS[kind])
    read_adapter(again.model, tmp_path / "adapter")
    assert all(torch.equal(own, again.weights()[name]) for name, own in policy.weights().items())
    assert again.weights().keys() == policy.weights().keys()
    for other in (adapted(rank=2), adapted(targets=["*attn*"])):
        with pytest.raises(UserError, match="does not fit the model: it has other layers, or another rank"):
            read_adapter(other.model, tmp_path / "adapter")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_adapters_directory_is_merged_where_a_model_is_named(
    family: str, adapted: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = adapted(family)
    give(policy, moved_adapter(policy.model))
    policy.save(tmp_path / "run" / "model")
    recipe = ModelConfig(path=str(tmp_path / "run" / "model"), device="cpu")
    loaded = load_policy(recipe, policy.tokenizer, seed=0)
    assert loaded.stop_ids == policy.stop_ids and not adapter_of(loaded.model)
    torch.testing.assert_close(logprobs(loaded), logprobs(policy), rtol=0, atol=1e-5)
    assert all(parameter.requires_grad for parameter in loaded.model.parameters())
    (line,) = merge(tmp_path / "run" / "model", tmp_path / "whole")
    assert str(tmp_path / "whole") in line
    whole = load_policy(ModelConfig(path=str(tmp_path / "whole"), device="cpu"), policy.tokenizer, seed=0)
    assert torch.equal(logprobs(whole), logprobs(loaded))
    with pytest.raises(UserError, match="is there already"):
        merge(tmp_path / "run" / "model", tmp_path / "whole")
    with pytest.raises(UserError, match="there is no adapter"):
        merge(tmp_path / "whole", None)
    monkeypatch.setattr(lora, "_merged", lambda layer: layer.base_layer)
    with pytest.raises(UserError, match="cannot be merged: it computes something else"):
        load_policy(recipe, policy.tokenizer, seed=0)


def test_adapters_that_peft_has_made_are_merged_or_refused(adapted: Adapted, tmp_path: Path) -> None:
    from peft import LoraConfig as Settings
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    policy = adapted()
    policy.tokenizer.save_pretrained(tmp_path / "adapter")
    recipe = ModelConfig(path=str(tmp_path / "adapter"), device="cpu")

    def made(**settings: Any) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3")
        made = get_peft_model(model, Settings(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **settings)).eval()
        made.save_pretrained(tmp_path / "adapter")
        with torch.no_grad():
            return made(input_ids=torch.tensor([[5, 3, 8]])).logits

    merged: list[dict[str, Any]] = [
        {"target_modules": ["q_proj"], "lora_dropout": 0.5},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"target_modules": "all-linear", "use_dora": True},
    ]
    for settings in merged:
        expected = made(**settings)
        loaded = load_policy(recipe, policy.tokenizer, seed=0)
        with torch.no_grad():
            logits = loaded.model(input_ids=torch.tensor([[5, 3, 8]])).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    others: list[dict[str, Any]] = [{"modules_to_save": ["norm"]}, {"target_modules": ["embed_tokens"]}]
    for settings in others:
        made(**{"target_modules": ["q_proj"], **settings})
        with pytest.raises(UserError, match="merge_and_unload"):
            load_policy(recipe, policy.tokenizer, seed=0)


def test_half_precision_is_merged_once_and_from_float32(adapted: Adapted) -> None:
    policy = adapted(dtype="bfloat16", rank=4, alpha=4)
    assert {parameter.dtype for parameter in adapter_of(policy.model).values()} == {torch.float32}
    give(policy, moved_adapter(policy.model))
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    layer = policy.model.model.layers[0].mlp.up_proj
    for _ in range(3):
        merged = merged_tensors(policy.model, [name for name, _ in policy.model.named_parameters()])
    up, down = (layer.lora_B["default"].weight, layer.lora_A["default"].weight)
    expected = (layer.base_layer.weight.float() + up @ down).bfloat16()
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"], expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())


def test_a_reference_is_the_same_model_with_other_numbers(adapted: Adapted, tmp_path: Path) -> None:
    policy = adapted()
    base = logprobs(policy)
    reference = replace(policy, adapter=copied_adapter(policy.model))
    give(policy, moved_adapter(policy.model))
    moved = logprobs(policy)
    assert torch.equal(logprobs(reference), base) and not torch.equal(moved, base)
    assert torch.equal(logprobs(policy), moved)  # its own are back
    reference.take_weights(policy)
    assert torch.equal(logprobs(reference), moved)
    assert all(torch.equal(own, reference.weights()[name]) for name, own in policy.weights().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_decoder_that_is_written_out_has_the_adapter(
    dtype: str, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert proven_means(adapted(dtype=dtype)) is Means.FAST
    assert proven_means(adapted(dora=True)) is Means.OWN_MODULES
    for factor in (0.0, 2.0):  # dropped, doubled
        monkeypatch.setattr(fast_decode, "parts_of", partial(_scaled, factor))
        assert proven_means(adapted(dtype=dtype)) is Means.OWN_MODULES


def _scaled(factor: float, layer: Any) -> Any:
    parts = lora.parts_of(layer)
    return parts and (*parts[:3], factor * parts[3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_takes_the_adapter_over_bit_by_bit_and_nothing_else(dtype: str, adapted: Adapted) -> None:
    policy, copy = adapted(dtype=dtype), adapted(dtype=dtype)
    base = {name: tensor.clone() for name, tensor in copy.model.state_dict().items() if ".lora_" not in name}
    engine = EmbeddedEngine(policy, copy=copy, at_publish="recompute")
    for version in range(3):
        engine.publish(version)
        assert torch.equal(logprobs(copy), logprobs(policy))
        give(
            policy, {name: tensor / 10 ** (3 - version) for name, tensor in (moved_adapter(policy.model) or {}).items()}
        )
        assert dtype == "bfloat16" or not torch.equal(logprobs(copy), logprobs(policy))
    assert all(torch.equal(tensor, copy.model.state_dict()[name]) for name, tensor in base.items())
    engine.close()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt2"])
def test_engines_get_the_tensors_of_the_merged_model(family: str, adapted: Adapted, tmp_path: Path) -> None:
    policy = adapted(family)
    give(policy, moved_adapter(policy.model))
    policy.save(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "whole")
    found = {name: tensor for layer in weights_by_layer(policy) for name, tensor in layer.items()}
    files = (tmp_path / "whole").glob("*.safetensors")
    expected = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("family", "settings", "vllm", "rank"),
    [
        ("qwen3", {"rank": 4}, {}, 8),
        ("qwen3", {"rank": 129, "rslora": True}, {}, 256),
        ("qwen3", {"rank": 513}, {}, None),  # no server reserves so many
        ("qwen3", {"dora": True}, {}, None),
        ("gpt2", {}, {}, None),
        ("qwen3_moe", {"targets": ("q_proj",)}, {}, None),
        ("qwen3", {}, {"urls": ("http://127.0.0.1:8000",)}, None),
        ("qwen3", {}, {"weights": "nccl"}, None),
        ("qwen3", {}, {"adapters": False}, None),
    ],
    ids=str,
)
def test_vllm_gets_the_adapter_alone_where_it_can(
    family: str, settings: dict[str, Any], vllm: dict[str, Any], rank: int | None, adapted: Adapted
) -> None:
    found = lora_options(adapted(family, **settings), "cuda", vllm)
    assert found == ({"enable_lora": True, "max_lora_rank": rank, "max_loras": 4} if rank else {})


def lora_options(policy: Policy, device: str, vllm: dict[str, Any]) -> dict[str, Any]:
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", ["rollout.max_staleness=2", "actor.old_logprobs=engine"])
    rollout = recipe.rollout.model_copy(update={"vllm": VllmConfig(**vllm)})
    on_device: Any = SimpleNamespace(model=policy.model, device=torch.device(device))
    return _lora_options(recipe.model_copy(update={"rollout": rollout}), on_device)


def test_on_a_cpu_vllm_gets_the_adapter_alone_where_the_recipe_says_so(adapted: Adapted) -> None:
    assert lora_options(adapted("qwen3"), "cpu", {}) == {}
    assert lora_options(adapted("qwen3", rank=4), "cpu", {"adapters": True})["max_lora_rank"] == 8


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("qwen3", {"rank": 513}, "a rank of 512 at most, and this is 513"),
        ("gpt2", {}, "for linear layers alone, and others have one"),
        ("qwen3_moe", {"targets": ("q_proj",)}, "none for a mixture of experts"),
    ],
    ids=str,
)
def test_an_adapter_that_vllm_cannot_take_is_refused_before_a_run_starts_where_the_recipe_wants_it_alone(
    family: str, settings: dict[str, Any], words: str, adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, cpu = adapted(family, **settings), torch.device("cpu")
    message = rf"rollout\.vllm\.adapters: true: .*{words}\n  fix: leave it out"
    with pytest.raises(UserError, match=message):
        lora_options(policy, "cpu", {"adapters": True})
    monkeypatch.setattr("gspo.engine.make.check_settings", lambda *_, **__: None)  # no interpreter has vLLM here
    model = ModelConfig(path="somewhere", lora=LoraConfig(**settings))
    recipe = load_recipe(ROOT / "tests" / "tiny.yaml", ["rollout.engine=vllm"]).model_copy(update={"model": model})
    rollout = recipe.rollout.model_copy(update={"vllm": VllmConfig(adapters=True)})
    with pytest.raises(UserError, match=message):
        check_engine(
            recipe.model_copy(update={"rollout": rollout}), policy.model.config, device=cpu, longest_sequence=9
        )


def test_engines_get_weights_of_4_bits_in_whole_numbers(adapted: Adapted, monkeypatch: Any) -> None:
    policy = adapted(targets=("*attn*",))  # some layers have no adapter, and are quantised all the same
    expected = {name: tensor for layer in weights_by_layer(policy) for name, tensor in layer.items()}
    give(policy, moved_adapter(policy.model))
    merged = {name: tensor for layer in weights_by_layer(policy) for name, tensor in layer.items()}

    def dequantize(data: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        assert data.dtype == torch.uint8 and data.shape != state.shape
        return state

    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", SimpleNamespace(dequantize_4bit=dequantize))
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Linear) and module is not policy.model.lm_head and module.out_features > 16:
            whole = module.weight.data
            packed = torch.nn.Parameter(torch.zeros(whole.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
            packed.quant_state = whole  # type: ignore[attr-defined]
            module.weight = packed
    found = {name: tensor for layer in weights_by_layer(policy) for name, tensor in layer.items()}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in merged.items())
    assert not all(torch.allclose(found[name], tensor, atol=1e-6) for name, tensor in expected.items())


def test_weights_of_4_bits_are_for_one_gpu() -> None:
    settings, gpu, cpu = LoraConfig(quantize="nf4"), torch.device("cuda", 0), torch.device("cpu")
    assert lora.quantization(LoraConfig(), cpu, torch.float32, is_sharded=True) == {}
    for device, is_sharded, words in (
        (cpu, False, "model.device is cpu"),
        (gpu, True, "ranks cannot share weights of"),
    ):
        with pytest.raises(UserError, match=rf"model\.lora\.quantize: nf4: .*{words}(.|\n)*fix: leave it out"):
            lora.quantization(settings, device, torch.bfloat16, is_sharded=is_sharded)


@pytest.mark.parametrize("rounding", [1e-6, 1e-2])
@pytest.mark.parametrize("share", [0.0, 1.0, 2.0])
def test_a_server_without_the_adapter_or_with_it_twice_is_noticed_within_the_tolerance(
    share: float, rounding: float, adapted: Adapted
) -> None:
    policy = adapted()
    small = {name: tensor * 0.25 for name, tensor in (moved_adapter(policy.model) or {}).items()}
    give(policy, small)
    probe = Probe(policy, torch.bfloat16, 1.0)
    completions, generator = list[Completion](), torch.Generator().manual_seed(0)
    for request in probe.requests("label", 0):
        (prompt,) = request.prompts
        ids = torch.randint(3, 9, (16,), generator=generator)
        sequence = [TokenSequence(prompt_ids=prompt.ids, response_ids=ids)]
        with torch.no_grad():
            own = response_likelihood(policy, sequence).logprobs
            base = response_likelihood(replace(policy, adapter=without_effect(policy.model)), sequence).logprobs
        noise = rounding * torch.randn(16, generator=generator)
        completions.append(
            Completion(
                token_ids=ids,
                logprobs=base + share * (own - base) + noise,
                full_logprobs=None,
                versions=(),
                finish_reason="length",
                experts=None,
            )
        )
    gap = probe.gap(completions)
    assert gap.mean < gap.tolerance / 2  # by itself it shows nothing
    assert gap.adapter == pytest.approx(share, abs=0.1) and gap.is_closed == (share == 1.0)
    assert ("times the adapter" in str(gap)) == (share != 1.0)


def test_what_a_merge_into_half_precision_rounds_away_is_no_fault_of_a_server(adapted: Adapted) -> None:
    policy = adapted(dtype="bfloat16")
    give(policy, {name: tensor * 0.25 for name, tensor in (moved_adapter(policy.model) or {}).items()})
    base = replace(policy, adapter=without_effect(policy.model))
    probe, completions = Probe(policy, torch.bfloat16, 1.0), list[Completion]()
    for request in probe.requests("label", 0):
        ids = torch.arange(16) % 8 + 3
        sequence = [TokenSequence(prompt_ids=request.prompts[0].ids, response_ids=ids)]
        with torch.no_grad():
            own = response_likelihood(base, sequence).logprobs
        kept: dict[str, Any] = {"full_logprobs": None, "versions": (), "finish_reason": "length", "experts": None}
        completions.append(Completion(token_ids=ids, logprobs=own, **kept))
    assert probe.gap(completions).adapter == 1.0


def test_directories_that_are_no_adapter_are_refused(adapted: Adapted, tmp_path: Path) -> None:
    policy = adapted()
    policy.save(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"no tensors")
    recipe = ModelConfig(path=str(tmp_path / "adapter"), device="cpu")
    with pytest.raises(UserError, match="this adapter does not fit the model"):
        load_policy(recipe, policy.tokenizer, seed=0)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(UserError, match="of the kind IA3"):
        load_policy(recipe, policy.tokenizer, seed=0)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(UserError, match="does not say which model it is of"):
        load_policy(recipe, policy.tokenizer, seed=0)
    (tmp_path / "adapter" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"lie here together(.|\n)*remove adapter_config\.json"):
        load_policy(recipe, policy.tokenizer, seed=0)
