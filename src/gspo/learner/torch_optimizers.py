"""The optimisers of torch and of other packages: the class that a recipe names, its arguments, and what it steps."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gspo.errors import UserError
from gspo.model.parameters import matching
from gspo.recipe.callables import load_callable
from gspo.recipe.sections import OptimizerConfig

OWN_KEYS = ("lr", "betas", "eps", "weight_decay")  # of the section, for every class that takes them


def torch_optimizers(
    model: nn.Module, masters: Mapping[str, Tensor], settings: OptimizerConfig, *, where: str
) -> list[torch.optim.Optimizer]:
    """Return what steps the masters; UserError where there is no such class or a pattern of `no_decay` is wrong.

    Muon steps matrices alone: embeddings, heads, norms, biases and stacked experts go to AdamW, as its authors have it.
    """
    kind = _optimizer_class(settings, where=where)
    exempt = matching(settings.no_decay, masters, where=f"{where}.no_decay")
    parts: list[tuple[Any, Mapping[str, Any], list[str]]] = [(kind, settings.options, list(masters))]
    if issubclass(kind, torch.optim.Muon):
        matrices = matrices_of(model, masters)
        others = [name for name in masters if name not in matrices]
        parts = [(kind, settings.options, matrices), (torch.optim.AdamW, {}, others)]
    made: list[torch.optim.Optimizer] = []
    for owner, options, names in parts:
        rate = {"initial_lr": options.get("lr", settings.lr)}  # torch's name for what a schedule multiplies
        decaying = {"params": [masters[name] for name in names if name not in exempt], **rate}
        spared = {"params": [masters[name] for name in names if name in exempt], **rate, "weight_decay": 0.0}
        if groups := [group for group in (decaying, spared) if group["params"]]:
            made.append(owner(groups, **{**_own_arguments(owner, settings), **options}))
    return made


def matrices_of(model: nn.Module, masters: Mapping[str, Tensor]) -> list[str]:
    """The names of those of the masters that Muon steps: matrices that are no embedding and no head."""
    outside = _embeddings_and_heads(model)
    return [name for name, master in masters.items() if master.ndim == 2 and name not in outside]


def _optimizer_class(settings: OptimizerConfig, *, where: str) -> Any:
    """The class that the section names; UserError where there is none."""
    name, where = settings.name, f"{where}.name: {settings.name}"
    if name == "adamw":
        return torch.optim.AdamW
    if not name.startswith("torch.optim.") and ":" not in name:
        fix = "write adamw, torch.optim.NAME such as torch.optim.Muon, or module:Class of an installed package"
        raise UserError("no such optimiser", where=where, fix=fix)
    return load_callable(name if ":" in name else f"torch.optim:{name.removeprefix('torch.optim.')}", where=where)


def _own_arguments(kind: Any, settings: OptimizerConfig) -> dict[str, Any]:
    """The section's keys that the class takes, and as AdamW does: Adafactor's `eps`, say, is two numbers."""
    taken = inspect.signature(kind).parameters
    values = {key: getattr(settings, key) for key in OWN_KEYS if key in taken}
    same = [key for key in values if isinstance(values[key], tuple) == isinstance(taken[key].default, tuple)]
    return {key: values[key] for key in same} | ({"fused": True} if kind is torch.optim.AdamW else {})


def _embeddings_and_heads(model: nn.Module) -> set[str]:
    """The names of the parameters that translate between tokens, or values, and states."""
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "head", None))()
    outside: Iterable[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is head]
    weights = {id(parameter) for module in outside for parameter in module.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in weights}
