"""The transcript of a decoding: what was sampled so far, and the completions made of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.engine.engine import Completion
from gspo.types import Experts

_STEPS_A_COPY = 256  # of the experts that are joined on the device: a copy of all might not fit there


@dataclass(frozen=True, kw_only=True, eq=False)
class _Block:
    """The tokens of some steps on the CPU, by completion and, within one, in the order in which they were sampled.

    Example, of two steps of the completions 0 and 3: _Block(owner=tensor([0, 0, 3, 3]), step=tensor([4, 5, 4, 5]), …)
    """

    owner: Int[Tensor, "N"]
    step: Int[Tensor, "N"]
    token: Int[Tensor, "N"]
    logprob: Float[Tensor, "N"]
    full_logprob: Float[Tensor, "N"] | None
    experts: Integer[Tensor, "N L K"] | None

    def of(self, number: int) -> slice:
        """Return where a completion's own lie."""
        start, end = torch.searchsorted(self.owner, torch.tensor([number, number + 1])).tolist()
        return slice(start, end)


class Transcript:
    """Tokens, log-likelihoods and experts in the order in which they were sampled, and whose completion each is of.

    Each token is moved to the CPU and put in its place once, with the first completions that are asked for after it.
    """

    def __init__(self, version: int = 0) -> None:
        self.num_steps = 0
        self.prefixes: dict[int, Tensor] = {}  # the experts of a prompt's tokens but the last, where they are recorded
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]] = []  # since the last block
        self._blocks: list[_Block] = []
        self._versions = [version]  # of the weights
        self._changes: list[int] = []  # before which of the steps the weights were others

    def add(
        self,
        index: Int[Tensor, "R"],
        token: Int[Tensor, "R"],
        logprob: Float[Tensor, "R"],
        full_logprob: Float[Tensor, "R"] | None = None,
        experts: Integer[Tensor, "R L K"] | None = None,
    ) -> None:
        """Add a token to each of the completions `index`, and the experts that the token before it was sent to."""
        self._steps.append((index, token, logprob, full_logprob, experts))
        self.num_steps += 1

    def newest(self, count: int) -> Int[Tensor, "R n"]:
        """The tokens that were added last for the same completions, none of which was asked for since."""
        return torch.stack([step[1] for step in self._steps[-count:]], dim=1)

    def tokens_of(self, index: Int[Tensor, "R"]) -> list[list[int]]:
        """Return all tokens of these completions so far."""
        self._settle()
        return [
            [token for block in self._blocks for token in block.token[block.of(number)].tolist()]
            for number in index.tolist()
        ]

    def change_weights(self, version: int, *, is_next_drawn: bool) -> None:
        """Note that what is added from now on, or after the next tokens, was drawn with the weights of this version."""
        self._versions.append(version)
        self._changes.append(self.num_steps + is_next_drawn)

    def completions(self, numbers: Sequence[int], stop_ids: Sequence[int], ends: Mapping[int, int]) -> list[Completion]:
        """The completions of these numbers, in their order.

        One ends with its first stop token, or after as many tokens as `ends` says; a row that was decoded on beyond it
        has sampled the rest for nothing.
        """
        self._settle()
        stops = torch.tensor(stop_ids, dtype=torch.long)
        return [self._completion(number, stops, ends.get(number)) for number in numbers]

    def _completion(self, number: int, stops: Int[Tensor, "S"], end: int | None) -> Completion:
        places = [(block, block.of(number)) for block in self._blocks]

        def own(name: str, length: int | None = None) -> Tensor:
            pieces = [getattr(block, name)[place] for block, place in places if place.stop > place.start]
            return torch.cat(pieces)[:length]

        tokens = own("token", end)
        stopping = torch.isin(tokens, stops).nonzero()
        length = int(stopping[0]) + 1 if len(stopping) else len(tokens)
        newest = self._blocks[-1]
        drawn_by = torch.bucketize(own("step", length), torch.tensor(self._changes, dtype=torch.long), right=True)
        counts = drawn_by.bincount(minlength=len(self._versions)).tolist()
        experts = None
        if self.prefixes:
            experts = Experts(prefix=self.prefixes[number], row=own("experts", length).clone())
        return Completion(
            token_ids=tokens[:length],
            logprobs=own("logprob", length),
            full_logprobs=None if newest.full_logprob is None else own("full_logprob", length),
            versions=tuple((version, n) for version, n in zip(self._versions, counts, strict=True) if n),
            finish_reason="stop" if len(stopping) or end is not None else "length",
            experts=experts,
        )

    def _settle(self) -> None:
        """Make a block of the steps since the last."""
        if not self._steps:
            return
        *columns, full, recorded = zip(*self._steps, strict=True)
        owner, token, logprob = (torch.cat(column).cpu() for column in columns)
        order = owner.argsort(stable=True)
        first = self.num_steps - len(self._steps)
        sizes = torch.tensor([len(column) for column in columns[0]])
        block = _Block(
            owner=owner[order],
            step=torch.arange(first, self.num_steps).repeat_interleave(sizes)[order],
            token=token[order],
            logprob=logprob[order],
            full_logprob=None if full[0] is None else torch.cat(full).cpu()[order],
            experts=torch.cat([*_on_cpu(recorded)])[order] if self.prefixes else None,
        )
        self._blocks.append(block)
        self._steps = []


def _on_cpu(recorded: Sequence[Tensor]) -> Iterator[Tensor]:
    for start in range(0, len(recorded), _STEPS_A_COPY):
        yield torch.cat([*recorded[start : start + _STEPS_A_COPY]]).cpu()
