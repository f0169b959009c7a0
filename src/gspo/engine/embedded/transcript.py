"""The transcript of a decoding: what was sampled so far, and the completions made of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.engine.engine import Completion
from gspo.types import Experts

_MOST_PIECES = 32  # of a completion: each tensor takes some hundred bytes beside its numbers
_STEPS_A_COPY = 256  # of the experts that are joined on the device: a copy of all might not fit there


class Transcript:
    """Tokens, log-likelihoods and experts in the order in which they were sampled, and whose completion each is of.

    Each token is moved to the CPU and put in its place once, with the first completions that are asked for after it.
    """

    def __init__(self, version: int = 0) -> None:
        self.prefixes: dict[int, Tensor] = {}  # the experts of a prompt's tokens but the last, where they are recorded
        self.num_steps = 0
        self._version = self._next_version = version  # of the weights that draw the next token, and those after it
        # Since they were moved last: index, token, logprob, full_logprob, experts and version of each step.
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, int]] = []
        # By completion, in their order: tokens, versions, logprobs and, where there are any, full_logprobs and experts.
        self._pieces: defaultdict[int, list[list[Tensor | None]]] = defaultdict(list)

    def add(
        self,
        index: Int[Tensor, "R"],
        token: Int[Tensor, "R"],
        logprob: Float[Tensor, "R"],
        full_logprob: Float[Tensor, "R"] | None = None,
        experts: Integer[Tensor, "R L K"] | None = None,
    ) -> None:
        """Add a token to each of the completions `index`, and the experts that the token before it was sent to."""
        self._steps.append((index, token, logprob, full_logprob, experts, self._version))
        self._version = self._next_version
        self.num_steps += 1

    def newest(self, count: int) -> Int[Tensor, "R n"]:
        """The tokens that were added last for the same completions, none of which was asked for since."""
        return torch.stack([step[1] for step in self._steps[-count:]], dim=1)

    def tokens_of(self, index: Int[Tensor, "R"]) -> list[list[int]]:
        """Return all tokens of these completions so far."""
        self._settle()
        return [_joined(self._pieces[n])[0].tolist() if n in self._pieces else [] for n in index.tolist()]

    def change_weights(self, version: int, *, is_next_drawn: bool) -> None:
        """Note that what is added from now on, or after the next tokens, was drawn with the weights of this version."""
        self._next_version = version
        if not is_next_drawn:
            self._version = version

    def completions(self, numbers: Sequence[int], stop_ids: Sequence[int], ends: Mapping[int, int]) -> list[Completion]:
        """The completions of these numbers, in their order.

        One ends with its first stop token, or after as many tokens as `ends` says; a row that was decoded on beyond it
        has sampled the rest for nothing.
        """
        self._settle()
        stops = torch.tensor(stop_ids, dtype=torch.long)
        return [self._completion(number, stops, ends.get(number)) for number in numbers]

    def _completion(self, number: int, stops: Int[Tensor, "S"], end: int | None) -> Completion:
        tokens, versions, logprobs, full_logprobs, experts = _joined(self._pieces[number])
        stopping = torch.isin(tokens[:end], stops).nonzero()
        length = int(stopping[0]) + 1 if len(stopping) else len(tokens[:end])
        found, counts = versions[:length].unique_consecutive(return_counts=True)
        own_experts = None
        if experts is not None:
            own_experts = Experts(prefix=self.prefixes[number], row=experts[:length].clone())
        return Completion(
            token_ids=tokens[:length],
            logprobs=logprobs[:length],
            full_logprobs=None if full_logprobs is None else full_logprobs[:length],
            versions=tuple(zip(found.tolist(), counts.tolist(), strict=True)),
            finish_reason="stop" if len(stopping) or end is not None else "length",
            experts=own_experts,
        )

    def _settle(self) -> None:
        """Sort the steps since the last time by completion."""
        if not self._steps:
            return
        index, token, logprob, full, experts, versions = zip(*self._steps, strict=True)
        self._steps = []
        sizes = torch.tensor([len(own) for own in index])
        owner = torch.cat(index).cpu()
        order = owner.argsort(stable=True)
        numbers, counts = owner[order].unique_consecutive(return_counts=True)
        columns = [
            torch.cat(token).cpu(),
            torch.tensor(versions).repeat_interleave(sizes),
            torch.cat(logprob).cpu(),
            None if full[0] is None else torch.cat(full).cpu(),
            None,
        ]
        if self.prefixes:
            parts = [experts[start : start + _STEPS_A_COPY] for start in range(0, len(experts), _STEPS_A_COPY)]
            columns[-1] = torch.cat([torch.cat(part).cpu() for part in parts])
        split = [
            [None] * len(numbers) if column is None else column[order].split(counts.tolist()) for column in columns
        ]
        for number, *pieces in zip(numbers.tolist(), *split, strict=True):
            own = self._pieces[number]
            own.append(pieces)
            if len(own) == _MOST_PIECES:
                self._pieces[number] = [_joined(own)]


def _joined(pieces: list[list[Any]]) -> list[Any]:
    """All that is known of a completion, column by column; None for a column that is not there."""
    return [None if column[0] is None else torch.cat(column) for column in zip(*pieces, strict=True)]
