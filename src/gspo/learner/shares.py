"""What each rank saves of what ranks share: copies, and files that every rank writes beside the training."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from gspo.errors import RunError
from gspo.learner.ranks import gathered, leave_note, rank, wait_for_note
from gspo.learner.state import tensors_file
from gspo.loop import in_thread
from gspo.model.parameters import saved_part
from gspo.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class OwnShare:
    """The copies of rank 0; the others wait to be told where theirs go.

    Example: OwnShare(weights={"lm_head.weight": …}, tensors={"optimizer/steps_taken": tensor(48), …}, number=3)
    """

    weights: Mapping[str, Tensor]  # of the whole policy
    tensors: Mapping[str, Tensor]  # by part and name: optimizer/…, critic/…, reference/…
    number: int  # of the copies made so far
    other_ranks: Sequence[int] = ()  # that have tensors to write

    def write(self, directory: Path, more: Mapping[str, Tensor]) -> None:
        """Write these tensors, and more, while other ranks write theirs; RunError where one of them could not."""
        self.tell_others(directory)
        save_file({**self.tensors, **more}, directory / tensors_file(0))
        for other in self.other_ranks:
            if problem := wait_for_note(f"share {self.number} of {other}", by=other):
                raise RunError(problem)

    def tell_others(self, directory: Path | None) -> None:
        """Say where the other ranks write their shares; None: nowhere."""
        if self.other_ranks:
            leave_note(f"share {self.number}", "" if directory is None else str(directory.absolute()))


class Shares:
    """Copies what this rank has, and on another rank than 0 writes it with a thread."""

    def __init__(self) -> None:
        self._number = 0
        self._written: Future[None] | None = None

    def copied(self, policy: Policy, states: Mapping[str, Mapping[str, Tensor]]) -> OwnShare:
        """Return copies on the CPU of the weights and of this rank's share of the states; all ranks call it."""
        self.wait()
        self._number += 1
        parts = {f"{part}/{name}": tensor for part, state in states.items() for name, tensor in state.items()}
        shares = {name: saved_part(tensor, is_first=rank() == 0) for name, tensor in parts.items()}
        tensors = {name: own.to("cpu", copy=True).contiguous() for name, own in shares.items() if own is not None}
        weights = policy.weights(is_first=rank() == 0)
        others = [number for number in gathered(rank() if tensors else 0) if number]
        if rank() in others:
            self._written = in_thread("share writer", _write, tensors, self._number)
        return OwnShare(weights=weights, tensors=tensors, number=self._number, other_ranks=others)

    def wait(self) -> None:
        """Wait until this rank writes nothing."""
        if self._written is not None:
            wait([self._written])


def _write(tensors: Mapping[str, Tensor], number: int) -> None:
    with suppress(RunError, RuntimeError):  # rank 0 is gone: the main thread will notice
        if directory := wait_for_note(f"share {number}", by=0):
            path, problem = Path(directory) / tensors_file(rank()), ""
            try:
                save_file(dict(tensors), path)
            except Exception as error:
                problem = f"{path.name}, of rank {rank()}: {error}"
            leave_note(f"share {number} of {rank()}", problem)
