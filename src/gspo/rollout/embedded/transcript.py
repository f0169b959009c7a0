"""What the engine has sampled so far, and the responses it becomes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from gspo.types import Experts, FinishReason


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One sampled response; its log-likelihoods are those of softmax(logits / temperature) over all tokens."""

    ids: Int[Tensor, "T"]  # on the CPU, as the next
    logprobs: Float[Tensor, "T"]
    finish_reason: FinishReason
    experts: Experts | None  # None: not recorded


class Transcript:
    """Tokens, log-likelihoods and experts of all responses; written in stretches in which the rows stay the same."""

    def __init__(self, num_responses: int, max_new_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_responses, max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_responses, max_new_tokens, device=device)
        self.experts: Tensor | None = None  # responses x tokens x L x K, on the CPU, once there are any
        self.prefixes: list[Tensor] = []  # the experts of each prompt's tokens but the last
        self._stretch: list[tuple[Tensor, Tensor]] = []
        self._experts: list[Tensor] = []

    def add(
        self, token: Int[Tensor, "R"], logprob: Float[Tensor, "R"], experts: Integer[Tensor, "R L K"] | None = None
    ) -> None:
        """One more token a row, and the experts that the token before it was sent to."""
        self._stretch.append((token, logprob))
        if experts is not None:
            self._experts.append(experts)

    def write(self, index: Int[Tensor, "R"], sampled: Int[Tensor, "R"]) -> None:
        """End a stretch, in which row r was response `index[r]` and after which it has `sampled[r]` tokens."""
        if not self._stretch:
            return
        token, logprob = (torch.stack(values, dim=1) for values in zip(*self._stretch, strict=True))
        columns = sampled[:, None] - token.shape[1] + torch.arange(token.shape[1], device=token.device)
        self.tokens[index[:, None], columns], self.logprobs[index[:, None], columns] = token, logprob
        if self._experts:
            experts = torch.stack(self._experts, dim=1).cpu()
            if self.experts is None:
                self.experts = experts.new_zeros(*self.tokens.shape, *experts.shape[2:])
            self.experts[index[:, None].cpu(), columns.cpu()] = experts
        self._stretch, self._experts = [], []

    def responses(self, stop_ids: Int[Tensor, "S"]) -> list[Response]:
        """Each up to its first stop token; what a finished row sampled after it is dropped here."""
        ends = torch.isin(self.tokens, stop_ids)
        stopped = ends.any(-1)
        lengths = torch.where(stopped, ends.int().argmax(-1) + 1, ends.shape[1]).tolist()
        # Copies: what was made in inference mode may not be kept for a backward pass.
        tokens, logprobs = self.tokens.cpu().clone(), self.logprobs.cpu().clone()
        experts = self._experts_of(lengths)
        return [
            Response(
                ids=tokens[number, :length],
                logprobs=logprobs[number, :length],
                finish_reason="stop" if stop else "length",
                experts=experts[number],
            )
            for number, (length, stop) in enumerate(zip(lengths, stopped.tolist(), strict=True))
        ]

    def _experts_of(self, lengths: list[int]) -> list[Experts | None]:
        if self.experts is None:
            return [None] * len(lengths)
        prefixes = [prefix.cpu().clone() for prefix in self.prefixes]
        group_size = len(lengths) // len(prefixes)
        return [
            Experts(prefix=prefixes[number // group_size], row=rows[:length].clone())
            for number, (rows, length) in enumerate(zip(self.experts.cpu(), lengths, strict=True))
        ]
