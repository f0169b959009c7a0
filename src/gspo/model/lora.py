"""LoRA (arXiv 2106.09685), by peft: small matrices beside linear layers are trained, and the model's weights are not.

A layer computes W x + (alpha / rank) B A x. B begins as zero, so that training begins with the model as it is.
"""

import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gspo.errors import UserError
from gspo.model.parameters import matching, trunk_of
from gspo.model.prove import disagreement, one_line, trunk_states
from gspo.model.routing import routers_in
from gspo.recipe.sections import LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # the files of an adapter's directory
_NAME, _PREFIX = "default", "base_model.model."  # of the adapter in a model, and of what peft has in its files
_MARK = ".lora_"  # in the names of its parameters


def add_lora(model: Any, settings: LoraConfig, *, base: str = "", is_sharded: bool) -> None:
    """Put an adapter into a model, and leave nothing else to train; `base` is where the model's own weights lie.

    UserError where peft is missing or cannot adapt a layer. Its random numbers come from torch's generator.
    """
    layers, experts = _targets(model, settings)
    if is_sharded and (experts or settings.dora):
        what, fix = "ranks cannot share a model with DoRA", "leave out model.lora.dora"
        if experts:
            what, fix = "ranks cannot share experts that have adapters", "set model.lora.targets: ['*attn*']"
        raise UserError(what, where="model.lora", fix=f"{fix}, or train on one process")
    adapter = _peft().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=layers,
        target_parameters=experts or None,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        task_type="CAUSAL_LM",
    )
    try:
        with _whole_shapes(model.get_submodule(name) for name in layers):
            _peft().inject_adapter_in_model(adapter, model, _NAME)  # transformers' own way wants one release of peft
    except Exception as error:  # such as of a kind of layer that peft does not know
        what = f"peft cannot adapt {type(model).__name__}: {error}"
        raise UserError(what, where="model.lora", fix="name other layers with model.lora.targets") from None
    written = model.peft_config[_NAME]
    written.target_modules = sorted(written.target_modules or ())  # a set has another order in each process
    written.base_model_name_or_path = str(Path(base).absolute()) if Path(base).is_dir() else base
    for parameter in adapter_of(model).values():
        parameter.data = parameter.data.float()  # its own master, whatever the model computes in


def quantization(settings: LoraConfig | None, device: torch.device, dtype: torch.dtype, *, is_sharded: bool) -> Any:
    """Arguments of `from_pretrained` that quantise what is beneath an adapter; UserError where that cannot be used."""
    if settings is None or settings.quantize == "none":
        return {}
    absent = [name for name in ("bitsandbytes", "accelerate") if importlib.util.find_spec(name) is None]
    problems = {
        f"weights of 4 bits are for a GPU's memory, and model.device is {device.type}": device.type != "cuda",
        "ranks cannot share weights of 4 bits": is_sharded,
        f"this needs the package {' and '.join(absent)} (pip install -e '.[qlora]' in the checkout)": absent,
    }
    if problem := next((text for text, is_so in problems.items() if is_so), None):
        fix = "leave it out: the model is then kept in model.dtype"
        raise UserError(problem, where=f"model.lora.quantize: {settings.quantize}", fix=fix)
    from transformers import BitsAndBytesConfig

    options = {"bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=settings.quantize, **options)
    return {"quantization_config": config, "device_map": {"": device}}


def has_adapter(model: Any) -> bool:
    """Tell whether a model has an adapter, and trains nothing else."""
    return bool(getattr(model, "peft_config", None))


def adapter_of(model: Any) -> dict[str, nn.Parameter]:
    """The parameters of a model's adapter, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if _MARK in name}


def copied_adapter(model: Any) -> dict[str, Tensor]:
    """A copy of the numbers of a model's adapter."""
    return {name: parameter.detach().clone() for name, parameter in adapter_of(model).items()}


def read_adapter(model: Any, directory: Path) -> None:
    """Give a model's adapter the numbers of a directory; UserError where that is of other layers or ranks."""
    try:
        saved = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / WEIGHTS).items()}
        of_model = _peft().get_peft_model_state_dict(model)
        if _shapes(saved) != _shapes(of_model):
            raise ValueError("it has other layers, or another rank")
        _peft().set_peft_model_state_dict(model, saved)
    except Exception as error:
        what = f"this adapter does not fit the model: {error}"
        raise UserError(what, where=str(directory), fix="restore it from a copy, or name the model it is of") from None


def save_adapter(model: Any, directory: Path, tensors: Mapping[str, Tensor] | None) -> None:
    """Write a model's adapter as peft does, with these numbers or its own."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(saved_adapter(model, tensors), directory / WEIGHTS, metadata={"format": "pt"})
    save_adapter_config(model, directory)
    model.generation_config.save_pretrained(directory)  # the tokens that end a response, which peft does not save


def saved_adapter(model: Any, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """These numbers of a model's adapter, or its own, under the names that peft's files have."""
    named = dict(adapter_of(model) if tensors is None else tensors)
    saved = _peft().get_peft_model_state_dict(model, state_dict=named)
    return {f"{_PREFIX}{name}": tensor.detach().contiguous() for name, tensor in saved.items()}


def save_adapter_config(model: Any, directory: Path) -> None:
    """Write what peft has to know of a model's adapter beside its numbers."""
    model.peft_config[_NAME].save_pretrained(str(directory))


def plain_rank(model: Any) -> int | None:
    """The rank of an adapter whose layers all compute W x + factor · B A x; None of others, and without one."""
    layers = [layer for layer in model.modules() if _is_adapted(layer)]
    are_plain = all(isinstance(layer.base_layer, nn.Linear) and not layer.lora_variant for layer in layers)
    return int(model.peft_config[_NAME].r) if layers and are_plain else None


@contextmanager
def with_adapter(model: Any, numbers: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Have a model compute with these numbers in its adapter, for passes without gradients; None: with its own."""
    own = {name: parameter.data for name, parameter in adapter_of(model).items()} if numbers else {}
    parameters = dict(model.named_parameters()) if numbers else {}
    try:
        for name, tensor in (numbers or {}).items():
            parameters[name].data = tensor
        yield
    finally:
        for name, tensor in own.items():
            parameters[name].data = tensor


def moved_adapter(model: Any) -> Mapping[str, Tensor] | None:
    """Numbers with which an adapter changes what its model computes, for proofs: new ones change nothing."""
    if not has_adapter(model):
        return None
    generator = torch.Generator().manual_seed(0)
    own = {name: parameter.detach() for name, parameter in adapter_of(model).items()}
    drawn = {name: torch.randn(tensor.shape, generator=generator).to(tensor) for name, tensor in own.items()}
    # Small enough for what follows to stay in range; magnitudes of DoRA become a little larger.
    return {
        name: tensor * 1.1 if "magnitude" in name else drawn[name] / (4 * tensor.shape[-1] ** 0.5)
        for name, tensor in own.items()
    }


def without_effect(model: Any) -> dict[str, Tensor] | None:
    """Numbers with which an adapter changes nothing; None where there is none, or where there are no such (DoRA)."""
    own = adapter_of(model)
    if not own or any("magnitude" in name for name in own):
        return None
    return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor.data for name, tensor in own.items()}


def without_adapter(name: str) -> str | None:
    """A tensor's name in the model that has no adapter; None for the adapter's own."""
    return None if _MARK in name else name.replace(".base_layer", "")


@torch.no_grad()
def merged_tensors(model: Any, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of these names in the model that computes the same without an adapter, by their names there.

    What is adapted is merged in float32 and in a copy, never in place: to and fro, half precision would drift.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, nn.Module] = {}
    for name in names:
        if (plain := without_adapter(name)) is None:
            continue
        module, _, leaf = name.rpartition(".")
        place, adapted, within = module.partition(".base_layer")
        if adapted:
            if place not in layers:
                layers[place] = _merged(model.get_submodule(place))
            tensor = getattr(layers[place].get_submodule(f"base_layer{within}"), leaf)
        else:
            tensor = _whole(getattr(model.get_submodule(module), leaf))
        tensors[plain] = tensor.detach()
    return tensors


@torch.no_grad()
def merge_adapter(model: Any, directory: Path) -> None:
    """Merge the adapter of a directory into a model, which becomes a plain one; UserError where that cannot be.

    The proof is that the model computes the same before and after.
    """
    settings = _peft().PeftConfig.from_pretrained(str(directory))
    try:
        if (kind := getattr(settings.peft_type, "value", settings.peft_type)) != "LORA":
            raise ValueError(f"it is of the kind {kind}, not LORA")
        _peft().inject_adapter_in_model(settings, model, _NAME)
        if settings.modules_to_save or any("lora_embedding" in name for name in adapter_of(model)):
            raise ValueError("it changes embeddings, or has whole layers beside its matrices")
        for parameter in adapter_of(model).values():
            parameter.data = parameter.data.float()
        read_adapter(model, directory)
        adapted = trunk_states(trunk_of(model.eval()))  # an adapter may have dropout
        _put_merged_in(model)
        if reason := disagreement(lambda: adapted, lambda: trunk_states(trunk_of(model))):
            raise ValueError(reason)
    except UserError:
        raise
    except Exception as error:  # of peft's, about its many other kinds
        fix = "merge it with peft: merge_and_unload"
        raise UserError(f"this adapter cannot be merged: {one_line(error)}", where=str(directory), fix=fix) from None


def _put_merged_in(model: Any) -> None:
    """Put what each adapted layer is merged to in its place, so that the model has no adapter."""
    for place, layer in [(place, layer) for place, layer in model.named_modules() if _is_adapted(layer)]:
        if ".base_layer" not in place:
            plain = _merged(layer)
            while _is_adapted(plain):
                plain = plain.base_layer
            parent, _, name = place.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)
    del model.peft_config
    model.requires_grad_(True)


def parts_of(layer: Any) -> tuple[nn.Linear, nn.Linear, nn.Linear, float] | None:
    """The linear layer, A, B and the factor of an adapted layer that computes W x + factor · B A x; None of others."""
    base = getattr(layer, "base_layer", None)
    if type(base) is not nn.Linear or layer.lora_variant:  # such as DoRA
        return None
    return base, layer.lora_A[_NAME], layer.lora_B[_NAME], layer.scaling[_NAME]


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _is_adapted(layer: Any) -> bool:
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def _merged(layer: Any) -> Any:
    """A copy of an adapted layer, in which its base and those within have taken the adapter in."""
    base = layer.base_layer
    if hasattr(getattr(base, "weight", None), "quant_state"):
        own = _whole(base.weight)
        weight = (own.float() + layer.get_delta_weight(_NAME)).to(own.dtype)
        plain = {"weight": nn.Parameter(weight, requires_grad=False), "bias": base.bias}
        return nn.ModuleDict({"base_layer": nn.ParameterDict(plain)})
    dtype = next(tensor for name, tensor in layer.named_parameters() if "lora_" not in name).dtype
    copy = deepcopy(layer).float()
    for module in reversed([module for module in copy.modules() if _is_adapted(module)]):
        module.merge()
    return copy.to(dtype)


def _whole(tensor: Tensor) -> Tensor:
    """The numbers that a tensor of bitsandbytes stands for; any other as it is."""
    if (state := getattr(tensor, "quant_state", None)) is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(tensor.data, state)


def _targets(model: Any, settings: LoraConfig) -> tuple[list[str], list[str]]:
    """The names of the linear layers and of the experts' tensors that the recipe chooses.

    A name without a `*` is the end of one, as peft has it: `q_proj`.
    """
    left_out = {id(module) for router in routers_in(model) for module in router.modules()}
    left_out.add(id(model.get_output_embeddings()))
    kinds = (nn.Linear, _peft().tuners.lora.layer.Conv1D)
    layers = [name for name, m in model.named_modules() if isinstance(m, kinds) and id(m) not in left_out]
    experts = [name for name, p in model.named_parameters() if p.dim() == 3 and ".experts." in name]
    patterns = [name if "*" in name else f"*.{name}" for name in settings.targets]
    chosen = matching(patterns, [*layers, *experts], where="model.lora.targets")
    return [name for name in layers if name in chosen], [name for name in experts if name in chosen]


@contextmanager
def _whole_shapes(layers: Iterable[Any]) -> Iterator[None]:
    """Have weights that ranks share stand there as what every rank has: of others peft takes a rank's rows for all."""
    shared = [(layer, layer.weight) for layer in layers if isinstance(layer.weight, DTensor)]
    try:
        for layer, weight in shared:
            empty = torch.zeros(1, device=weight.device).expand(weight.shape)
            layer._parameters["weight"] = nn.Parameter(empty, requires_grad=False)
        yield
    finally:
        for layer, weight in shared:
            layer._parameters["weight"] = weight


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        fix = "pip install -e '.[lora]' in the checkout"
        raise UserError("this needs the package peft", where="model.lora", fix=fix) from None
    return peft
