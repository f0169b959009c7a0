"""A model directory made of a GGUF file: weights in float32, and the tokenizer and template that the file carries."""

from math import isclose, log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from gspo.errors import UserError

# How text is split before its bytes are merged, by the name that a file gives it: llama.cpp, src/llama-vocab.cpp.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}
_CONTROL, _USER_DEFINED = 3, 4  # types of a token in the file
_ENGLISH = "The capital of France is Paris."
_TEXTS = (_ENGLISH, "In 2026, 1048 + 7 = 1055!", "def f(x):\n    return  x\n\n", "Ünïcödé 你好 🙂")


def convert(file: Path, directory: Path) -> list[str]:
    """Write a GGUF file's model as a directory that transformers loads, and return lines about it.

    Each weight is the number that the quantised file stands for. UserError for a file that cannot be proven right.
    """
    fields, num_numbers, kinds = _contents(file)
    try:
        tokenizer = _tokenizer(file, fields)
        model = _model(file, fields, num_numbers)
    except KeyError as error:
        raise _unproven(file, f"it does not say its {error}") from error
    ends = {tokenizer.eos_token_id, fields.get("tokenizer.ggml.eot_token_id")} - {None}
    for config in (model.config, model.generation_config):
        config.eos_token_id = min(ends) if len(ends) == 1 else sorted(ends)
        config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    directory.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as scratch:  # a file that is refused leaves nothing behind
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _check_saved(file, scratch, model, tokenizer)
        Path(scratch).chmod(0o755)
        Path(scratch).rename(directory)
        Path(scratch).mkdir()
    ids = torch.tensor([tokenizer.encode(_ENGLISH)])
    with torch.no_grad():
        nats, chance = float(model(input_ids=ids, labels=ids).loss), log(len(tokenizer))
    doubt = "" if nats < 0.8 * chance else ": this one knows no English, or the file was read wrongly"
    stops = ", ".join(tokenizer.convert_ids_to_tokens(sorted(ends)))
    return [
        f"{directory}: {model.config.model_type}, {model.num_parameters():,} parameters in float32, from {kinds}; "
        f"{len(tokenizer):,} tokens; ends with {stops}",
        f"{_ENGLISH!r} has {nats:.1f} nats a token; a model that has learned nothing needs {chance:.1f}{doubt}",
    ]


def _contents(file: Path) -> tuple[dict[str, Any], int, str]:
    """Read what the file says of itself, how many numbers its tensors have, and how they are stored."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, IndexError) as error:
        what, fix = f"this is no GGUF file: {error}", "give a whole file in the format of llama.cpp"
        raise UserError(what, where=str(file), fix=fix) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    scaled = [name for name in fields if ".rope.scaling." in name]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    if scaled:
        raise _unproven(file, f"it scales positions ({scaled[0]}), which transformers does not read from GGUF")
    kinds = " and ".join(sorted({tensor.tensor_type.name for tensor in reader.tensors}))
    return fields, sum(int(tensor.n_elements) for tensor in reader.tensors), kinds


def _tokenizer(file: Path, fields: dict[str, Any]) -> Any:
    """Make the tokenizer: each token has the number that the file gives it, and texts come back as they were."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    own = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    if own.get("model") != "gpt2" or own.get("pre") not in _SPLITS:
        raise _unproven(file, f"its tokenizer ({own.get('model')}, {own.get('pre')}) is none of {', '.join(_SPLITS)}")
    tokens, types = own["tokens"], own["token_type"]
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=own["pre"] == "llama-bpe"))
    if own["pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[own["pre"]]]
    own_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, own_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    added = [number for number, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)]
    for number in added:
        tokenizer.add_tokens([AddedToken(tokens[number], normalized=False, special=types[number] == _CONTROL)])
    named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    given = {name: own.get(f"{short}_token_id") for name, short in named.items()}
    special = {name: tokens[number] for name, number in given.items() if number is not None}
    if own.get("add_bos_token", own["pre"] == "llama-bpe"):  # as llama.cpp
        begin = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, own["bos_token_id"])]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    made.chat_template = own.get("tokenizer.chat_template")
    if made.convert_ids_to_tokens(range(len(tokens))) != tokens or len(made) != len(tokens):
        raise _unproven(file, "its tokens do not come out with the numbers that it gives them")
    for text in _TEXTS:
        if made.decode(made.encode(text, add_special_tokens=False)) != text:
            raise _unproven(file, f"its tokenizer changes the text {text!r}")
    return made


def _model(file: Path, fields: dict[str, Any], num_numbers: int) -> Any:
    """Make the model of the file: it has each number that the file says of its shape, and each of its weights once."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
        model.load_state_dict(tensors, strict=False)
    except Exception as error:
        raise _unproven(file, f"transformers does not read it: {error}") from error
    _check_shape(file, fields, config)
    if missing := dict(model.named_parameters()).keys() - tensors.keys():
        raise _unproven(file, f"it has no tensor for {min(missing)}")
    if num_numbers != model.num_parameters():
        raise _unproven(file, f"it has {num_numbers:,} numbers, and its model takes {model.num_parameters():,}")
    return model.eval()


def _check_shape(file: Path, fields: dict[str, Any], config: Any) -> None:
    """Raise UserError for what the file says of its shape and the configuration lacks, KeyError for uncounted heads.

    Without their number transformers leaves the rows of queries and keys in the order that llama.cpp has them in.
    """
    from transformers.integrations import GGUF_CONFIG_MAPPING

    tree = config.to_dict()
    tree |= tree.get("rope_parameters") or {}
    head = tree.get("head_dim") or config.hidden_size // config.num_attention_heads
    implied = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), head)
    names, prefix = GGUF_CONFIG_MAPPING[config.model_type], f"{fields['general.architecture']}."
    for name, value in fields.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            known = tree.get(names.get(key) or "", implied.get(key))
            is_known = isclose(known, value, rel_tol=1e-6) if isinstance(known, float) else known == value
            if not is_known:
                raise _unproven(file, f"transformers makes no use of its {name}, {value}")
    if (counted := f"{prefix}attention.head_count_kv") not in fields:
        raise KeyError(counted)


def _check_saved(file: Path, directory: str, model: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()
    if not all(torch.equal(own, saved[name]) for name, own in model.state_dict().items()):
        raise _unproven(file, f"the weights in {directory} are not the file's")
    again = AutoTokenizer.from_pretrained(directory)
    if [again.encode(text) for text in _TEXTS] != [tokenizer.encode(text) for text in _TEXTS]:
        raise _unproven(file, f"the tokenizer in {directory} is not the file's")


def _unproven(file: Path, what: str) -> UserError:
    return UserError(what, where=str(file), fix="use the model's own directory from its hub, with config.json")
