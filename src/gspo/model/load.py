"""What the recipe's model is made from: configuration, weights and tokenizer, read or new, with every fault named."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from gspo.errors import UserError, did_you_mean
from gspo.model.lora import CONFIG, merge_adapter
from gspo.model.prove import TOLERANCE, one_line
from gspo.model.sharding import Sharding, not_shardable, shard
from gspo.recipe.schema import Recipe
from gspo.recipe.sections import ModelConfig, QueriesConfig

MAX_LAYERS = 10_000
_NO_MODEL = "no model can be loaded"
# Arguments of from_pretrained that say where the files are; the others that are taken are keys of the configuration.
_OF_THE_HUB = ("revision", "code_revision", "subfolder", "variant", "cache_dir", "local_files_only", "force_download")
_OWN_KEYS = {"attn_implementation", "device_map", "dtype", "torch_dtype", "trust_remote_code"}
_QUANTISED = "its weights are quantised, and quantised weights cannot be trained"
_QUANTISED_FIX = "name the model that it was made from, or save it dequantised (transformers: model.dequantize())"
_FETCH = "fetch it again: the download did not end"
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
# Digits stand alone, so that arithmetic can be learned; a word or a mark includes the blanks beside it.
_PIECES = r"\d| ?</?[a-z]+>| ?[^\W\d_]+ ?| ?[^\w\s] ?|."


def load_config(recipe: ModelConfig, *, is_whole: bool = True) -> Any:
    """The transformers configuration of the recipe's model, as its files have it; UserError if there is none.

    Without `is_whole`, config.json is enough, and no weights need lie beside it.
    """
    for name in _OWN_KEYS & recipe.kwargs.keys():
        fix = "set model.attn_implementation, model.device, model.dtype or model.trust_remote_code"
        raise UserError(f"{name} is not taken here", where="model.kwargs", fix=fix)
    config = _read_config(recipe, is_whole) if recipe.architecture is None else _made_config(recipe.architecture)
    if recipe.attn_implementation is not None:
        config._attn_implementation = recipe.attn_implementation
    return config


def load_model(
    recipe: ModelConfig,
    config: Any,
    *,
    dtype: torch.dtype,
    weights: Path | None,
    sharding: Sharding | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Any:
    """The transformers model of a configuration, with weights of a directory or new ones; UserError for unfit ones.

    Of a sharded model each rank reads its own part of the weights. New ones it makes whole, and keeps its part.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    if weights is None and (base := base_of(recipe.path)) != recipe.path:
        if sharding is not None or quantization:
            what = "be quantised" if quantization else "be shared by ranks"
            fix = f"write a whole model: gspo merge {recipe.path}"
            raise UserError(f"a model cannot {what} while an adapter is merged", where=str(recipe.path), fix=fix)
        model = load_model(recipe.model_copy(update={"path": base}), config, dtype=dtype, weights=None)
        merge_adapter(model, Path(str(recipe.path)))
        with suppress(OSError):  # the tokens that end its responses
            model.generation_config = GenerationConfig.from_pretrained(recipe.path)
        return model
    if path := str(weights or recipe.path or ""):
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": recipe.trust_remote_code}
        options |= {"is_own": bool(weights), **({} if weights else _of_the_hub(recipe)), **(quantization or {})}
        if sharding is None:
            return _with_weights(AutoModelForCausalLM, path, config, **options)
        empty = empty_model(recipe, config)
        model = _with_weights(_sharded_class(type(empty), sharding), path, config, **options)
        if model.all_tied_weights_keys != empty.all_tied_weights_keys:
            raise not_shardable(model, "config.json says that two of its weights are one, and in the files they differ")
        return model
    with _faults_named("model.architecture", "no model can be made"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        for parameter in model.parameters():  # not buffers: rotary frequencies stay float32, as in a loaded model
            parameter.data = parameter.data.to(dtype)
        model(input_ids=torch.ones(1, 2, dtype=torch.long))  # numbers that do not fit raise only here
    if sharding is not None:
        shard(model, sharding)
    return model


def empty_model(recipe: ModelConfig, config: Any) -> Any:
    """The recipe's model without memory for its weights, to try what needs none; UserError where it cannot be made."""
    from transformers import AutoModelForCausalLM

    where, fix, foreign = recipe.path or "model.architecture", None, recipe.trust_remote_code
    if attention := recipe.attn_implementation:
        where, fix = f"model.attn_implementation: {attention}", "leave it out, or install the package that it needs"
    with _faults_named(where, "no model can be made", fix), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=foreign and recipe.architecture is None)


def base_of(path: str | None) -> str | None:
    """The model that an adapter's directory belongs to; the path itself where that is none."""
    file = Path(path or "") / CONFIG
    if path is None or not file.is_file():
        return path
    if (Path(path) / "config.json").is_file():
        fix = f"remove {CONFIG}, or move the adapter to a directory of its own"
        raise UserError(f"a whole model (config.json) and an adapter ({CONFIG}) lie here together", where=path, fix=fix)
    try:
        base = str(json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError("it does not say which model it is of", where=str(file), fix="restore it from a copy") from None
    if Path(base).is_absolute() and not Path(base).is_dir():
        fix = "correct base_model_name_or_path there"
        raise UserError(f"it is of the model in {base}, and there is none", where=str(file), fix=fix)
    return base


def weights_left_out(config: Any) -> list[str]:
    """A sentence where the files may have layers that predict further tokens, which transformers does not load."""
    if not (number := _further_layers(config)):
        return []
    return [f"its files may have {number} layers that predict further tokens: they are neither trained nor saved"]


def max_positions(config: Any) -> int | None:
    """The longest sequence (prompt and response) that an architecture declares, in tokens."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def make_tokenizer(recipe: ModelConfig, texts: Iterable[str]) -> Any:
    """The recipe's tokenizer; `texts` are read only if it is to be fitted."""
    if recipe.tokenizer == "fit":
        if recipe.path is not None:
            raise UserError("model.tokenizer: fit is for a new model (model.architecture); model.path brings its own")
        return fit_tokenizer(texts)
    options = {} if recipe.tokenizer else _of_the_hub(recipe)
    return load_tokenizer(recipe.tokenizer or str(recipe.path), trust_remote_code=recipe.trust_remote_code, **options)


def load_tokenizer(path: str, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The Hugging Face tokenizer of a directory or hub id; UserError where there is none that yields tokens."""
    from transformers import AutoTokenizer

    _refuse_missing_directory(path, "model.tokenizer")
    fix = "copy the tokenizer's files beside the weights, or name another place with model.tokenizer"
    with _faults_named(path, "no tokenizer can be loaded", fix):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)
    if not tokenizer("The answer is 42.", add_special_tokens=False).input_ids:
        # Where tokenizer.json is missing, transformers builds an empty tokenizer without a word.
        problem = "the tokenizer maps text to no tokens: its files (tokenizer.json, …) are missing"
        raise UserError(problem, where=path, fix=fix)
    return tokenizer


def check_vocabulary(tokenizer: Any, num_embeddings: int, *, where: str) -> None:
    """Raise UserError where the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > num_embeddings:
        problem = f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only {num_embeddings}"
        raise UserError(problem, where=where, fix="use the tokenizer that belongs to the model (model.tokenizer)")


def models_beside(recipe: Recipe) -> dict[str, str]:
    """The models that a recipe names beside its own, which read the same tokens: paths or hub ids by their keys."""
    reference = recipe.actor.kl.reference if recipe.actor.kl.coefficient else None
    named = {"actor.kl.reference": reference, "teacher.path": recipe.teacher.path}
    return {name: path for name, path in named.items() if path is not None}


def check_tokens(path: str, tokenizer: Any, *, where: str, trust_remote_code: bool = False) -> None:
    """Raise UserError where a model beside the policy is absent or has another tokenizer; load no weights."""
    where = f"{where}: {path}"
    try:
        config = load_config(ModelConfig(path=path, trust_remote_code=trust_remote_code))
        vocabulary = load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab()
    except UserError as error:
        fix = error.fix or "name a directory with a model and its tokenizer, or a hub id"
        raise UserError(error.what, where=where, fix=fix) from None
    if vocabulary != (own := tokenizer.get_vocab()) or config.get_text_config().vocab_size < len(tokenizer):
        others = sorted(own.items() ^ vocabulary.items(), key=lambda pair: pair[::-1])[:1]
        which = "".join(f", such as {token!r}, number {number} in one of them" for token, number in others)
        fix = "name a model with the policy's own tokenizer, such as the one that the run started from"
        raise UserError(f"its tokens are not the policy's{which}", where=where, fix=fix)


def fit_tokenizer(texts: Iterable[str]) -> Any:
    """A word-level tokenizer with one token for each digit, word, mark and tag that occurs in the texts."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    split = Split(Regex(_PIECES), behavior="isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    pieces = sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)} - set(special.values()))
    vocabulary = {token: index for index, token in enumerate([*special.values(), *pieces])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def named_stop_ids(tokenizer: Any, stop_tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of rollout.stop_tokens; UserError for one that is not a single token of the tokenizer."""
    return tuple(token_id(token, tokenizer, where="rollout.stop_tokens") for token in stop_tokens)


def find_stop_ids(declared: Any, tokenizer: Any, stop_tokens: Sequence[str], num_embeddings: int) -> tuple[int, ...]:
    """The tokens that end a response: the model's `declared` eos_token_id, the tokenizer's, and those with a name."""
    declared = declared if isinstance(declared, list) else [declared]
    ids = [index for index in (*declared, tokenizer.eos_token_id) if index is not None]
    for index in ids:
        if not isinstance(index, int) or not 0 <= index < num_embeddings:
            fix = "correct it in generation_config.json or config.json"
            raise UserError(f"eos_token_id {index!r} is no token of the model's", where="model.path", fix=fix)
    stop_ids = (*ids, *named_stop_ids(tokenizer, stop_tokens))
    if not stop_ids:
        problem = "neither the model nor its tokenizer names an end token: no response could ever end"
        raise UserError(problem, where="model.path", fix="name one with rollout.stop_tokens")
    return tuple(sorted(set(stop_ids)))


def declared_ends(recipe: ModelConfig, config: Any, tokenizer: Any) -> Any:
    """The eos_token_id that the model has once it is loaded, whose weights this does not need."""
    from transformers import GenerationConfig

    if recipe.architecture is not None:
        return recipe.architecture.get("eos_token_id", tokenizer.eos_token_id)
    with suppress(OSError):
        return GenerationConfig.from_pretrained(str(recipe.path), **_of_the_hub(recipe)).eos_token_id
    return GenerationConfig.from_model_config(config).eos_token_id


def turn_end(tokenizer: Any, queries: QueriesConfig) -> tuple[str, ...]:
    """The token that the chat template writes behind an assistant's message, where it is applied and writes one."""
    text = "" if queries.chat is False else "".join(turn_marks(tokenizer, queries))
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False).input_ids[:1])
    return tuple(token for token in tokens if token in tokenizer.get_added_vocab() and text.startswith(token))


def turn_marks(tokenizer: Any, queries: QueriesConfig) -> list[str]:
    """Return what the chat template writes behind an assistant's last message, and before a user's next one."""
    answer, asked_on, behind = "Answer 8264.", "Question 3907?", [""]
    said = [{"role": "user", "content": "Question 5173?"}, {"role": "assistant", "content": answer}]
    for messages in (said, [*said, {"role": "user", "content": asked_on}]):
        with suppress(Exception):  # there is no template, or it refuses an assistant at the end
            whole = tokenizer.apply_chat_template(messages, tokenize=False, **queries.chat_template_kwargs)
            behind.append(whole.partition(answer)[2].partition(asked_on)[0].strip().removeprefix(behind[-1]).strip())
    return [mark for mark in behind if mark]


def token_id(token: str, tokenizer: Any, *, where: str) -> int:
    """The id of a text; UserError where it is not a single token of the tokenizer."""
    ids = tokenizer(token, add_special_tokens=False).input_ids
    if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
        return int(ids[0])
    shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(ids[:8]))) or "no token at all"
    fix = "name a single one, such as <|im_end|>: tokenizer.json lists them"
    raise UserError(f"{token!r} is not a single token of this tokenizer, but {shown}", where=where, fix=fix)


def _read_config(recipe: ModelConfig, is_whole: bool) -> Any:
    from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

    path = str(recipe.path)
    place = Path(path)
    _refuse_missing_directory(path, "model.path")
    if is_whole:
        _check_whole(place)
    if (base := base_of(path)) != path:  # which is read in its place
        return _read_config(recipe.model_copy(update={"path": base}), is_whole)
    if place.exists() and not (place / "config.json").is_file():
        raise UserError("no config.json here, so this is no model directory", where=path)
    if is_whole and place.is_dir() and not any([*place.glob("*.safetensors"), *place.glob("*.bin")]):
        fix = "finish the download, or train a new model of this shape with model.architecture"
        raise UserError("the model directory has no weights (*.safetensors)", where=path, fix=fix)
    with _faults_named(path):
        if (place / "generation_config.json").is_file():  # transformers passes over a damaged one
            GenerationConfig.from_pretrained(place)
        _check_layers(PreTrainedConfig.get_config_dict(path, **_of_the_hub(recipe))[0] | recipe.kwargs, where=path)
        # Without trust_remote_code, transformers would ask on standard input and read the answer from there.
        config = AutoConfig.from_pretrained(path, trust_remote_code=recipe.trust_remote_code, **recipe.kwargs)
    for name in recipe.kwargs.keys() - {*_OF_THE_HUB, "experts_implementation"}:
        if not hasattr(config, name):
            fix = did_you_mean(name, [*config.to_dict(), *_OF_THE_HUB], "docs/guides/models.md says what it takes")
            raise UserError(f"{name!r} is no key of this model's configuration", where="model.kwargs", fix=fix)
    _refuse_quantised(config, where=path)
    return config


def _check_whole(place: Path) -> None:
    """Raise UserError where a file of the model's weights is missing, or shorter than its header says."""
    index, names = place / "model.safetensors.index.json", ["model.safetensors"]
    is_split = index.is_file() and not (place / names[0]).exists()
    if is_split:
        with _faults_named(str(index), "it is no index of weights"):
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    for file in (place / name for name in names):
        if is_split and not file.exists():
            raise UserError(f"{index.name} names it, and it is not here", where=str(file), fix=_FETCH)
        try:
            if file.is_file():
                with safe_open(file, framework="pt"):  # which reads the header alone
                    pass
        except SafetensorError as error:
            raise UserError(f"it is no whole file of weights: {error}", where=str(file), fix=_FETCH) from None


def _refuse_quantised(config: Any, *, where: str) -> None:
    """Have transformers turn quantised weights into ordinary numbers; UserError for a method without such a way."""
    from transformers.quantizers.auto import AutoHfQuantizer

    trees, reason = (config, config.get_text_config()), ""
    if (declared := next(filter(None, (getattr(t, "quantization_config", None) for t in trees)), None)) is None:
        return
    declared["dequantize"] = True  # else a GPU that computes in FP8 would keep it
    with suppress(Exception):  # of methods that it does not know, or cannot use here
        quantizer = AutoHfQuantizer.from_config(dict(declared))
        if quantizer.quantization_config.dequantize is True:
            try:
                quantizer.validate_environment(device_map=None)
                return
            except ImportError as error:  # a package that this way needs, and gspo does not
                reason = f": {one_line(error)}"
    raise UserError(f"{_QUANTISED}{reason}", where=where, fix=_QUANTISED_FIX)


def _of_the_hub(recipe: ModelConfig) -> dict[str, Any]:
    return {name: value for name, value in recipe.kwargs.items() if name in _OF_THE_HUB}


def _refuse_missing_directory(path: str, key: str) -> None:
    if path.endswith(".gguf") and Path(path).is_file():
        fix = f"gspo get {path} makes a model directory of it"
        raise UserError("this is a GGUF file, and not a directory", where=f"{key}: {path}", fix=fix)
    if not Path(path).exists() and (path.startswith((".", "~", os.sep)) or path.count("/") > 1):
        fix = f"the path is relative to the working directory, {Path.cwd()}"
        raise UserError("no such directory", where=f"{key}: {path}", fix=fix)


def _check_layers(tree: Mapping[str, Any], *, where: str) -> None:
    """Raise UserError for a number that no model has: its configuration alone would take all memory, and hours."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            _check_layers(value, where=where)
        elif name in _DEPTHS and isinstance(value, int) and value > MAX_LAYERS:
            raise UserError(f"{name} {value:,} is more than {MAX_LAYERS:,}", where=where, fix="correct the number")


def _made_config(architecture: dict[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kind, where = str(architecture["model_type"]), "model.architecture"
    if kind not in CONFIG_MAPPING_NAMES:
        fix = did_you_mean(kind, CONFIG_MAPPING_NAMES, "give one that transformers knows, such as qwen3", most=3)
        raise UserError(f"unknown model_type {kind!r}", where=where, fix=fix)
    _check_layers(architecture, where=where)
    with _faults_named(where, "no model can be made"):
        default = AutoConfig.for_model(kind)
        for key in architecture.keys() - {"model_type"}:
            # transformers keeps a misspelt key without using it. Some true keys are declared nowhere (head_dim).
            fix = did_you_mean(key, default.to_dict(), "", cutoff=0.85)
            if fix and not hasattr(default, key):
                raise UserError(f"{kind} has no key {key!r}", where=where, fix=fix)
        return AutoConfig.for_model(**architecture)


def _sharded_class(kind: Any, sharding: Sharding) -> Any:
    """A class of models like `kind` that are spread over ranks before transformers reads their weights."""

    def make(model: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(model, *arguments, **options)
        for tied, source in model.all_tied_weights_keys.items():  # transformers does so only once it has read them
            module, _, name = tied.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(source))
        shard(model, sharding)

    return type(kind.__name__, (kind,), {"__init__": make, "__module__": kind.__module__})


def _with_weights(kind: Any, path: str, config: Any, *, is_own: bool, **options: Any) -> Any:
    options |= {"config": config, "use_safetensors": True if is_own else None}
    if is_own and getattr(config, "quantization_config", None):  # which its first load has turned into plain ones
        del config.quantization_config
    with _faults_named(path):
        model, report = kind.from_pretrained(path, output_loading_info=True, **options)
    if is_quantised := "quantization_config" in options:
        del model.config.quantization_config  # what engines and files get is not
    elif getattr(model, "hf_quantizer", None) or not all(p.dtype in TOLERANCE for p in model.parameters()):
        raise UserError(_QUANTISED, where=path, fix=_QUANTISED_FIX)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"{len(missing)} weights are missing, among them {missing[0]}", where=path)
    if unused := _unused(report["unexpected_keys"], model, config):
        problem = f"{len(unused)} weights of the files have no place in the model that config.json describes, such as "
        fix = "correct config.json (the number of layers, the model_type), or remove these weights from the files"
        raise UserError(f"{problem}{', '.join(unused[:3])}", where=path, fix=fix)
    for name, parameter in () if is_quantised else model.named_parameters():
        part = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if not part.isfinite().all():
            raise UserError(f"weight {name} holds NaN or infinity", where=path, fix="use a copy that is whole")
        # A loaded weight lies in the file's pages, wherever its header ends, and kernels round by alignment.
        if isinstance(parameter, DTensor):
            parameter._local_tensor = part.clone()
        else:
            parameter.data = part.clone()
    return model


def _unused(names: Iterable[str], model: Any, config: Any) -> list[str]:
    """The weights that the model has no place for, without parts of a checkpoint that are known to be left out."""
    text = config.get_text_config()
    first, number = getattr(text, "num_hidden_layers", 0), _further_layers(config)
    further = [f"layers.{layer}." for layer in range(first, first + number)]
    names = [name for name in names if not any(layer in name for layer in further)]
    if config.get_text_config() is config:
        return sorted(names)
    parts = {model.base_model_prefix, *(name.partition(".")[0] for name in model.state_dict())}
    return sorted(name for name in names if name.partition(".")[0] in parts)


def _further_layers(config: Any) -> int:
    """The number of layers behind the last one that predict further tokens: num_nextn_predict_layers, by any name."""
    trees = [vars(config), vars(config.get_text_config())]
    numbers = [n for tree in trees for key, n in tree.items() if "nextn" in key or "mtp" in key.split("_")]
    return max((n for n in numbers if type(n) is int and n < MAX_LAYERS), default=0)


@contextmanager
def _faults_named(path: str, problem: str = _NO_MODEL, fix: str | None = None) -> Iterator[None]:
    """Turn whatever transformers raises within into a UserError about the place from which it loads."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself
        if "trust_remote_code" in str(error):
            reason = "it brings Python code of its own, which is run only where the recipe allows it"
            fix = "read that code; to run it, set model.trust_remote_code: true"
        elif problem == _NO_MODEL and not Path(path).exists():
            reason, path = "neither a directory nor a hub id that can be reached from here", f"model.path: {path}"
            fix = "check the spelling and the network, or give the directory of a model"
        else:
            reason = f"{problem}: {one_line(error)}"
        raise UserError(reason, where=path, fix=fix) from None
