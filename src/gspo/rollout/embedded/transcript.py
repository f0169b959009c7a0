"""What has been sampled so far, and the responses that it makes."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.types import Experts, FinishReason

Response = tuple[Int[Tensor, "T"], Float[Tensor, "T"], FinishReason, Experts | None]


class Transcript:
    """Tokens, log-likelihoods and experts in the order in which they were sampled, and whose response each is of."""

    def __init__(self, group_size: int) -> None:
        self.prefixes: list[Tensor] = []  # the experts of each prompt's tokens but the last, where they are recorded
        self._group_size = group_size
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._experts: list[Tensor] = []

    def add(
        self,
        index: Int[Tensor, "R"],
        token: Int[Tensor, "R"],
        logprob: Float[Tensor, "R"],
        experts: Integer[Tensor, "R L K"] | None = None,
    ) -> None:
        """One more token for each of the responses `index`, and the experts that the token before it was sent to."""
        self._steps.append((index, token, logprob))
        if experts is not None:
            self._experts.append(experts)

    def responses(self, stop_ids: Sequence[int]) -> Iterator[Response]:
        """Token ids, log-likelihoods, finish reason and experts of each response, all on the CPU.

        A response ends with its first stop token; a row that was decoded on beyond it has sampled the rest for nothing.
        """
        if not self._steps:
            return
        index, token, logprob = (torch.cat(column).cpu() for column in zip(*self._steps, strict=True))
        order = index.argsort(stable=True)
        token, logprob = token[order], logprob[order]
        experts = torch.cat([rows.cpu() for rows in self._experts])[order] if self._experts else None
        prefixes = [prefix.cpu().clone() for prefix in self.prefixes]
        is_stop = torch.isin(token, torch.tensor(stop_ids)).tolist()
        start = 0
        for number, num_sampled in enumerate(index.bincount().tolist()):
            stopped = True in is_stop[start : start + num_sampled]
            end = is_stop.index(True, start) + 1 if stopped else start + num_sampled
            own = None
            if experts is not None:
                own = Experts(prefix=prefixes[number // self._group_size], row=experts[start:end].clone())
            yield token[start:end], logprob[start:end], "stop" if stopped else "length", own
            start += num_sampled
