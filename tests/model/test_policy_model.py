"""Model directories: those that load and compute the same, and those that are refused with a reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import FAMILIES
from transformers import PreTrainedTokenizerFast

from gspo.errors import UserError
from gspo.model.head import Head
from gspo.model.load import fit_tokenizer, load_config, load_tokenizer, make_tokenizer, weights_left_out
from gspo.model.policy import Policy, load_policy, try_save
from gspo.recipe.sections import ModelConfig

NewPolicy = Callable[..., Policy]
IDS = torch.tensor([[3, 7, 5, 4, 9]])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def load(directory: Path, **settings: Any) -> Policy:
    recipe = ModelConfig(path=str(directory), device="cpu", **settings)
    return load_policy(recipe, make_tokenizer(recipe, []), seed=0)


@pytest.fixture
def saved(new_policy: NewPolicy, tmp_path: Path) -> Path:
    new_policy("qwen3").save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_a_saved_policy_loads_again_and_computes_the_same(family: str, new_policy: NewPolicy, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = new_policy(family, seed=5)
    policy.save(tmp_path)
    text = "a cat sat: 1 + 2 = 3\n"
    ids = policy.tokenizer(text).input_ids
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(theirs.eval()), logits(policy.model))
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == ids
    ours = load(tmp_path)
    assert torch.equal(logits(ours.model), logits(policy.model))
    assert ours.tokenizer(text).input_ids == ids
    assert ours.stop_ids == policy.stop_ids
    assert ours.max_positions == 128
    assert ours.num_parameters == policy.num_parameters


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bfloat16") for family in FAMILIES), ("qwen3", "float32"), ("gpt_oss", "float32")]
)
def test_saved_weights_stand_in_for_the_recipes_bit_by_bit(
    family: str, dtype: str, new_policy: NewPolicy, tmp_path: Path
) -> None:
    policy = new_policy(family, dtype)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    policy.save(tmp_path, policy.weights())
    again = new_policy(family, dtype, seed=1, weights=tmp_path)
    expected, found = policy.model.state_dict(), again.model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == expected[name].dtype and weight.equal(expected[name]), name
    assert {p.dtype for p in again.model.parameters()} == {getattr(torch, dtype)}
    assert len(list(again.model.parameters())) == len(list(policy.model.parameters()))  # tied ones stay tied
    ids = torch.arange(100)[None] % 8 + 3  # far enough for every rotary frequency to count
    with torch.no_grad():
        assert torch.equal(*(one.model(input_ids=ids).logits for one in (again, policy)))
    assert (again.stop_ids, again.supports_packing) == (policy.stop_ids, policy.supports_packing)


def test_saved_weights_stand_in_for_those_of_a_directory_too(
    saved: Path, new_policy: NewPolicy, tmp_path: Path
) -> None:
    policy = load(saved, dtype="bfloat16")
    with torch.no_grad():
        policy.model.model.norm.weight.add_(1)
    policy.save(tmp_path / "trained", policy.weights())
    recipe = ModelConfig(path=str(saved), device="cpu", dtype="bfloat16")
    again = load_policy(recipe, policy.tokenizer, seed=0, weights=tmp_path / "trained")
    assert torch.equal(logits(again.model), logits(policy.model))
    assert not torch.equal(logits(again.model), logits(load(saved, dtype="bfloat16").model))


def test_the_same_seed_makes_the_same_new_model_and_another_seed_another(new_policy: NewPolicy) -> None:
    assert torch.equal(logits(new_policy(seed=1).model), logits(new_policy(seed=1).model))
    assert not torch.equal(logits(new_policy(seed=1).model), logits(new_policy(seed=2).model))


def test_the_recipes_dtype_is_that_of_the_weights(saved: Path) -> None:
    assert {p.dtype for p in load(saved, dtype="bfloat16").model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in load(saved).model.parameters()} == {torch.float32}


def test_dropout_of_a_model_directory_is_switched_off(new_policy: NewPolicy, tmp_path: Path) -> None:
    new_policy("gpt2", resid_pdrop=0.5).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path).model
    model.train()  # which a policy's model does not do
    assert torch.equal(logits(model), logits(model))


def test_dropout_of_a_new_model_is_switched_off(new_policy: NewPolicy) -> None:
    model = new_policy("llama", attention_dropout=0.5).model
    model.train()
    assert torch.equal(logits(model), logits(model))


def test_stop_ids_are_those_of_model_tokenizer_and_recipe(saved: Path) -> None:
    tokenizer = load_tokenizer(str(saved))
    generation = json.loads((saved / "generation_config.json").read_text())
    (saved / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [4, 6]}))
    policy = load_policy(ModelConfig(path=str(saved), device="cpu"), tokenizer, seed=0, stop_tokens=["7"])
    (extra,) = tokenizer("7", add_special_tokens=False).input_ids
    assert policy.stop_ids == tuple(sorted({4, 6, tokenizer.eos_token_id, extra}))


def test_a_stop_token_of_several_tokens_is_refused(saved: Path) -> None:
    with pytest.raises(UserError, match="stop_tokens"):
        load_policy(
            ModelConfig(path=str(saved), device="cpu"), load_tokenizer(str(saved)), seed=0, stop_tokens=["1 + 2"]
        )


def test_a_directory_without_weights_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights") as caught:
        load(saved)
    assert str(saved) in str(caught.value)


def test_a_directory_without_config_is_refused(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json"):
        load_policy(ModelConfig(path=str(saved)), fit_tokenizer(["a"]), seed=0)


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    recipe = ModelConfig(path=str(tmp_path / "absent"))
    with pytest.raises(UserError, match="absent"):
        make_tokenizer(recipe, [])
    with pytest.raises(UserError, match="absent"):
        load_policy(recipe, fit_tokenizer(["a"]), seed=0)


@pytest.mark.parametrize("left", ["nothing", "tokenizer_config.json"])
def test_a_directory_without_tokenizer_files_is_refused(left: str, saved: Path) -> None:
    for path in saved.glob("*token*"):
        if path.name != left:
            path.unlink()
    assert not (saved / "tokenizer.json").exists()
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_tokenizer(str(saved))
    assert str(saved) in str(caught.value)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(saved: Path) -> None:
    tokenizer = fit_tokenizer([" ".join(map(chr, range(97, 123))), "one two three four five six seven"])
    with pytest.raises(UserError, match="tokenizer has"):
        load_policy(ModelConfig(path=str(saved)), tokenizer, seed=0)


def test_a_missing_weight_is_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    gone = next(name for name in tensors if "layers.1" in name and "q_proj" in name)
    save_file({name: tensor.clone() for name, tensor in tensors.items() if name != gone}, path, {"format": "pt"})
    with pytest.raises(UserError, match=gone):
        load(saved)


def edit(path: Path, **changed: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_weights_beyond_the_configs_layers_are_named_and_counted(saved: Path) -> None:
    num_weights = sum("layers.1." in name for name in load_file(saved / "model.safetensors"))
    layer_types = json.loads((saved / "config.json").read_text())["layer_types"]
    edit(saved / "config.json", num_hidden_layers=1, layer_types=layer_types[:1])
    with pytest.raises(UserError, match=rf"{num_weights} weights .* such as model\.layers\.1\.") as caught:
        load(saved)
    assert str(saved) in str(caught.value) and "config.json" in str(caught.value)


def test_weights_that_this_kind_of_model_leaves_out_may_be_there(saved: Path) -> None:
    path = saved / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as checkpoints of some years ago have it
    save_file({**load_file(path), **old}, path, {"format": "pt"})
    load(saved)


def test_of_a_checkpoint_of_text_and_images_the_text_model_is_loaded(saved: Path, tmp_path: Path) -> None:
    from transformers import Llama4Config, Llama4ForConditionalGeneration

    tokenizer = load_tokenizer(str(saved))
    text = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16, "intermediate_size_mlp": 16}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    text |= {"num_local_experts": 2, "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    vision |= {"vision_output_dim": 16, "image_size": 28, "patch_size": 14}
    vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    config = Llama4Config(text_config=text, vision_config=vision)
    Llama4ForConditionalGeneration(config).save_pretrained(tmp_path / "both")
    tokenizer.save_pretrained(tmp_path / "both")
    assert type(load(tmp_path / "both").model).__name__ == "Llama4ForCausalLM"
    edit(tmp_path / "both" / "config.json", text_config={**text, "num_hidden_layers": 1})
    with pytest.raises(UserError, match=r"such as language_model\.model\.layers\.1\."):
        load(tmp_path / "both")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_named(value: float, saved: Path) -> None:
    path = saved / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = value
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight holds NaN or infinity"):
        load(saved)


@pytest.mark.parametrize("index", ["</s>", 10**9, -1, [2, "x"]])
def test_an_end_token_that_is_none_of_the_models_is_refused(index: Any, saved: Path) -> None:
    edit(saved / "generation_config.json", eos_token_id=index)
    with pytest.raises(UserError):
        load(saved)


def test_a_damaged_generation_config_is_refused_for_it_names_end_tokens(saved: Path) -> None:
    path = saved / "generation_config.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="generation_config"):
        load(saved)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["[1, 2]", '{"model": {"type": "NoSuchKind"}}', '"text"', "3"])
def test_tokenizer_files_of_another_kind_are_refused(name: str, text: str, saved: Path) -> None:
    (saved / name).write_text(text)
    if (name, text[0]) != ("tokenizer_config.json", "{"):  # which is a mapping without anything that is known
        with pytest.raises(UserError, match="tokenizer"):
            load_tokenizer(str(saved))


def test_a_number_of_layers_that_no_model_has_is_refused_before_any_is_made(saved: Path) -> None:
    edit(saved / "config.json", num_hidden_layers=10**9, layer_types=None)
    with pytest.raises(UserError, match="num_hidden_layers 1,000,000,000 is more than"):
        load_config(ModelConfig(path=str(saved)))
    architecture = {"model_type": "qwen3", "num_hidden_layers": 10**9}
    with pytest.raises(UserError, match="num_hidden_layers 1,000,000,000 is more than"):
        load_config(ModelConfig(architecture=architecture, tokenizer="fit"))


def test_a_damaged_weight_file_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(UserError):
        load(saved)


def test_a_damaged_config_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    with pytest.raises(UserError):
        load_policy(ModelConfig(path=str(saved)), fit_tokenizer(["a"]), seed=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "no_such_model"},
        {"model_type": "t5"},  # no causal language model
        {"head_dim": 7},  # rotary positions need an even number
        {"hidden_size": "wide"},
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 8},
    ],
    ids=["unknown", "not-causal", "odd-head", "no-number", "heads", "experts"],
)
def test_an_architecture_that_cannot_be_is_refused(changes: dict[str, Any], fitted_tokenizer: Any) -> None:
    shape = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    recipe = ModelConfig(architecture={**shape, "intermediate_size": 8, **changes}, tokenizer="fit", device="cpu")
    with pytest.raises(UserError):
        load_policy(recipe, fitted_tokenizer, seed=0)


def test_logits_that_are_transformed_in_an_unknown_way_are_refused(
    new_policy: NewPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Head, "logits", lambda self, hidden: torch.nn.functional.linear(hidden, self.weight).float())
    new_policy("llama")
    for family in ("gemma2", "granite", "cohere"):
        with pytest.raises(UserError, match="transforms its logits"):
            new_policy(family)


def test_a_copied_directory_is_the_same_model(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    assert torch.equal(logits(load(saved).model), logits(load(tmp_path / "copy").model))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "top_p": 0.6},
        {"num_beams": 1, "early_stopping": True},
        {"typical_p": 0.5, "of_another_program": [1, {"a": 2}]},
        {"min_length": 20, "max_length": 5, "length_penalty": 2.0},
        {"do_sample": False, "top_k": 7, "num_return_sequences": 1},
    ],
)
def test_generation_settings_are_saved_as_they_were_with_the_end_tokens_of_training(
    settings: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **settings}))
    policy = load(saved)
    try_save(policy.model, policy.tokenizer, where=str(saved))
    policy.save(tmp_path / "trained")
    written = json.loads((tmp_path / "trained" / "generation_config.json").read_text())
    assert {**written, **settings, "eos_token_id": list(policy.stop_ids)} == written
    recipe = ModelConfig(path=str(saved), device="cpu")
    again = load_policy(recipe, policy.tokenizer, seed=0, weights=tmp_path / "trained")  # as a resumed run does
    again.save(tmp_path / "resumed")
    assert json.loads((tmp_path / "resumed" / "generation_config.json").read_text()) == written


class _OfAService(PreTrainedTokenizerFast):
    def save_pretrained(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("this vocabulary has no file")


@pytest.mark.parametrize("part", ["tokenizer", "configuration", "generation configuration"])
def test_what_cannot_be_saved_is_found_out_without_weights(part: str, new_policy: NewPolicy) -> None:
    policy = new_policy("qwen3")
    tokenizer = policy.tokenizer
    if part == "tokenizer":
        tokenizer = _OfAService(tokenizer_object=tokenizer.backend_tokenizer)
    elif part == "configuration":
        policy.model.config.helper = object()
    else:
        policy.model.generation_config.helper = object()
    with pytest.raises(UserError, match=r"here: .* cannot be saved: "):
        try_save(policy.model, tokenizer, where="here")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "hqq", "quanto", "nobody_knows"])
def test_quantised_weights_are_refused_by_the_configuration(method: str, saved: Path) -> None:
    edit(saved / "config.json", quantization_config={"quant_method": method, "bits": 4, "load_in_4bit": True})
    with pytest.raises(UserError, match="quantised weights cannot be trained") as caught:
        load_config(ModelConfig(path=str(saved)))
    assert "install" not in str(caught.value)  # which would not help


def test_weights_that_transformers_dequantises_may_be_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package that it needs is there, which is none of ours; what is saved since is plain."""
    edit(saved / "config.json", quantization_config={"quant_method": "fp8"})
    recipe, needed = ModelConfig(path=str(saved), device="cpu"), "is_accelerate_available"
    monkeypatch.setattr(f"transformers.quantizers.quantizer_finegrained_fp8.{needed}", lambda: False)
    with pytest.raises(UserError, match="accelerate"):
        load_config(recipe)
    monkeypatch.setattr(f"transformers.quantizers.quantizer_finegrained_fp8.{needed}", lambda: True)
    assert load_config(recipe).quantization_config == {"quant_method": "fp8", "dequantize": True}
    policy = load_policy(recipe, load_tokenizer(str(saved)), seed=0, weights=saved)
    assert getattr(policy.model.config, "quantization_config", None) is None


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("qwen3", "num_nextn_predict_layers"),
        ("glm4_moe", "num_nextn_predict_layers"),
        ("llama", "num_mtp_layers"),
        ("olmoe", "mtp_num_layers"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out_and_said(
    family: str, key: str, new_policy: NewPolicy, tmp_path: Path
) -> None:
    few = {"n_routed_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2} if family == "glm4_moe" else {}
    new_policy(family, num_hidden_layers=3, **few).save(tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=2, layer_types=None, **{key: 1})
    policy = load(tmp_path)
    assert policy.model.config.num_hidden_layers == 2
    assert weights_left_out(policy.model.config) == [
        "its files may have 1 layers that predict further tokens: they are neither trained nor saved"
    ]
    edit(tmp_path / "config.json", num_hidden_layers=1)
    with pytest.raises(UserError, match=r"such as model\.layers\.2\."):  # only as many as are announced
        load(tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=2, **{key: 0})
    with pytest.raises(UserError, match=r"such as model\.layers\.2\."):
        load(tmp_path)
