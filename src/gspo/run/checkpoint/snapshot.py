"""A copy of a run's whole state, and how it becomes a directory."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.errors import RunError
from gspo.learner.critic import Critic
from gspo.learner.optimizer import Optimizer
from gspo.model.policy import Policy
from gspo.run.checkpoint.codec import encode
from gspo.run.checkpoint.files import clear, copy_beginning, move_into_place, seal, verified, write_tensors, write_text
from gspo.run.checkpoint.position import Position
from gspo.run.checkpoint.store import Store
from gspo.run.plain_files import sync
from gspo.run.progress import Progress

STATE, TENSORS, RECIPE = "state.json", "state.safetensors", "recipe.yaml"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What `write` needs; nothing in it changes while the run goes on."""

    position: Position
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]  # optimizer/…, critic/…, random/…, records/…
    progress: Any  # as JSON
    rollouts: Sequence[Path]  # files that are not known to be on the disk yet
    log_bytes: Mapping[str, int]  # how much of each log belongs to it
    home: Path  # the run's directory, with the logs
    policy: Policy  # knows how weights are saved; its own go on changing
    recipe: str  # YAML
    about: Mapping[str, Any]  # for the manifest: environment, digest of the data

    @property
    def num_bytes(self) -> int:
        """About what the checkpoint takes on the disk."""
        different = {tensor.data_ptr(): tensor.nbytes for tensor in (*self.weights.values(), *self.tensors.values())}
        return sum(different.values()) + sum(self.log_bytes.values())


def take_snapshot(
    *,
    policy: Policy,
    optimizer: Optimizer | None,
    critic: Critic | None = None,
    progress: Progress,
    random: Mapping[str, Tensor],
    home: Path,
    rollouts: Sequence[Path],
    log_bytes: Mapping[str, int],
    recipe: str,
    about: Mapping[str, Any],
) -> Snapshot:
    """Copy what the run will change; only this costs its loop time."""
    tree, records = encode(progress)
    groups = {
        "optimizer": {} if optimizer is None else optimizer.state(),
        "critic": {} if critic is None else critic.state(),
        "random": random,
        "records": records,
    }
    return Snapshot(
        position=progress.position,
        weights=policy.weights(),
        tensors={
            f"{group}/{key}": t.to("cpu", copy=True) for group, found in groups.items() for key, t in found.items()
        },
        progress=tree,
        rollouts=tuple(rollouts),
        log_bytes=log_bytes,
        home=home,
        policy=policy,
        recipe=recipe,
        about=about,
    )


def write(snapshot: Snapshot, store: Store) -> None:
    """Write a snapshot, have it on the disk, read it back, and only then let it count.

    Raises RunError for weights that are not finite, OSError or SafetensorError where it cannot be written, and
    DamagedError where it does not read back as written.
    """
    if not all(weight.isfinite().all() for weight in snapshot.weights.values() if weight.is_floating_point()):
        raise RunError("the weights are not finite: they are not saved over what is whole")
    unfinished = store.unfinished(snapshot.position)
    clear(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for path in (*snapshot.rollouts, *{path.parent for path in snapshot.rollouts}, store.root.parent):
        with suppress(FileNotFoundError):  # somebody has tidied up
            sync(path)
    snapshot.policy.save(unfinished / "model", snapshot.weights)
    write_tensors(unfinished / TENSORS, snapshot.tensors)
    write_text(unfinished / STATE, json.dumps(snapshot.progress))
    write_text(unfinished / RECIPE, snapshot.recipe)
    for name, size in snapshot.log_bytes.items():
        copy_beginning(snapshot.home / name, unfinished / name, size)
    about = {
        **snapshot.about,
        "weights_sha256": digest_of(snapshot.weights),
        "recipe_sha256": text_digest(snapshot.recipe),
    }
    seal(unfinished, about)
    verified(unfinished)
    move_into_place(unfinished, store.path(snapshot.position))


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes and bytes of tensors on the CPU: equal if and only if they are, bit by bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(f"{name} {weights[name].dtype} {list(weights[name].shape)}".encode())
        digest.update(weights[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
