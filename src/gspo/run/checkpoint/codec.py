"""The run's records as plain JSON and a few flat tensors, and back; nothing else can be read, so nothing can be run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gspo.learner.optimizer import Noise, StepReport
from gspo.learner.update import MiniBatchReport
from gspo.learner.volatility import Activation
from gspo.run.progress import Progress
from gspo.types import Batch, Experts, Failure, Group, Query, Sample, Score, SequenceStats

_KINDS = (
    *(Activation, Batch, Experts, Failure, Group, MiniBatchReport, Noise),
    *(Progress, Sample, Score, SequenceStats, StepReport),
)
_KIND_OF = {kind.__name__: kind for kind in _KINDS}
# Marks of what JSON has no form for; a mapping of the records never has such a key.
_TENSOR, _QUERY, _RECORD, _PAIRS = "$tensor", "$query", "$record", "$pairs"


def encode(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A record, or a nesting of records, as JSON and, by dtype, flat tensors."""
    pieces = _Pieces()
    tree = _encode(value, pieces)
    return tree, {dtype: torch.cat(parts) for dtype, parts in pieces.parts.items()}


def decode(tree: Any, tensors: Mapping[str, Tensor], queries: Mapping[str, Query]) -> Any:
    """What `encode` was given, its lists as tuples; queries are named by id and looked up."""
    if isinstance(tree, list):
        return tuple(decode(entry, tensors, queries) for entry in tree)
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        dtype, start, shape = tree[_TENSOR]
        return tensors[dtype][start : start + torch.Size(shape).numel()].reshape(shape)
    if _QUERY in tree:
        return queries[tree[_QUERY]]
    if _PAIRS in tree:
        return {key: decode(entry, tensors, queries) for key, entry in tree[_PAIRS]}
    fields = {name: decode(entry, tensors, queries) for name, entry in tree.items() if name != _RECORD}
    return _KIND_OF[tree[_RECORD]](**fields) if _RECORD in tree else fields


class _Pieces:
    """Tensors to be laid end to end, by dtype."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = {}
        self._ends: dict[str, int] = {}
        # A group's members share the experts of their prompt, in memory that they share after a resume, too.
        self._places: dict[tuple[Any, ...], tuple[Tensor, list[Any]]] = {}

    def add(self, tensor: Tensor) -> list[Any]:
        """Where the tensor will lie: dtype, start, shape."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key in self._places:
            return self._places[key][1]
        dtype = str(tensor.dtype).removeprefix("torch.")
        start = self._ends.get(dtype, 0)
        self._ends[dtype] = start + tensor.numel()
        self.parts.setdefault(dtype, []).append(tensor.detach().cpu().flatten())
        place = [dtype, start, list(tensor.shape)]
        self._places[key] = (tensor, place)  # held, so that no other tensor comes to lie there
        return place


def _encode(value: Any, pieces: _Pieces) -> Any:
    if isinstance(value, Tensor):
        return {_TENSOR: pieces.add(value)}
    if isinstance(value, Query):
        return {_QUERY: value.id}
    if dataclasses.is_dataclass(value):
        if type(value) not in _KINDS:
            raise TypeError(f"{type(value).__name__} is no record of a run: it could not be read back")
        entries = {field.name: _encode(getattr(value, field.name), pieces) for field in dataclasses.fields(value)}
        return {_RECORD: type(value).__name__, **entries}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _encode(entry, pieces) for key, entry in value.items()}
        return {_PAIRS: [[key, _encode(entry, pieces)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_encode(entry, pieces) for entry in value]
    return value
