"""The state of any torch optimiser as tensors by name, which a checkpoint can hold, and back: nothing is pickled."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = "plain"  # the name of all that is no tensor, as JSON in bytes; absent where there is nothing, as of AdamW
_INNER = "$tensor"  # marks the place of a tensor within a list or mapping
_ELSEWHERE = "on the CPU"  # the names of tensors that lie there while the parameters do not, such as step counts


def flat(tree: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The tensors of a tree, no copies; TypeError where there is anything else but numbers, text, lists and mappings.

    Example: flat({"step/w": 3, "mean/w": t}, device) == {"mean/w": t, "plain": the bytes of '{"step/w": 3}'}
    """
    tensors = {name: value for name, value in tree.items() if isinstance(value, Tensor)}

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {_INNER: name}
        if isinstance(value, Mapping):
            return {key: plain(own, f"{name}.{key}") for key, own in value.items()}
        return [plain(own, f"{name}.{i}") for i, own in enumerate(value)] if isinstance(value, list | tuple) else value

    rest = {name: plain(value, f"within {name}") for name, value in tree.items() if name not in tensors}
    if elsewhere := [name for name, tensor in tensors.items() if tensor.device != device]:
        rest[_ELSEWHERE] = elsewhere
    if rest:
        text = json.dumps(rest, sort_keys=True)
        tensors[_PLAIN] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return tensors


def tree_of(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """What `flat` was given, with copies of its tensors on the device; tuples come back as lists."""
    rest = json.loads(bytes(tensors[_PLAIN].tolist())) if _PLAIN in tensors else {}
    elsewhere = rest.pop(_ELSEWHERE, ())
    copies = {
        name: tensor.to("cpu" if name in elsewhere else device, copy=True)
        for name, tensor in tensors.items()
        if name != _PLAIN
    }

    def value_of(node: Any) -> Any:
        if isinstance(node, dict):
            return copies.pop(node[_INNER]) if _INNER in node else {key: value_of(own) for key, own in node.items()}
        return [value_of(own) for own in node] if isinstance(node, list) else node

    values = {name: value_of(node) for name, node in rest.items()}
    return copies | values
