"""What the engine has sampled so far, and the responses it becomes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gspo.records import FinishReason


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One sampled response; its log-likelihoods are those of softmax(logits / temperature) over all tokens."""

    ids: Int[Tensor, "T"]  # on the CPU, as the next
    logprobs: Float[Tensor, "T"]
    finish_reason: FinishReason


class Transcript:
    """Tokens and log-likelihoods of all responses; written in stretches between which the rows stay the same."""

    def __init__(self, num_responses: int, max_new_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_responses, max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_responses, max_new_tokens, device=device)
        self._stretch: list[tuple[Tensor, Tensor]] = []

    def add(self, token: Int[Tensor, "R"], logprob: Float[Tensor, "R"]) -> None:
        """One more token a row."""
        self._stretch.append((token, logprob))

    def write(self, index: Int[Tensor, "R"], sampled: Int[Tensor, "R"]) -> None:
        """End a stretch, in which row r was response `index[r]` and after which it has `sampled[r]` tokens."""
        if not self._stretch:
            return
        token, logprob = (torch.stack(values, dim=1) for values in zip(*self._stretch, strict=True))
        columns = sampled[:, None] - token.shape[1] + torch.arange(token.shape[1], device=token.device)
        self.tokens[index[:, None], columns], self.logprobs[index[:, None], columns] = token, logprob
        self._stretch = []

    def responses(self, stop_ids: Int[Tensor, "S"]) -> list[Response]:
        """Each up to its first stop token; what a finished row sampled after it is dropped here."""
        ends = torch.isin(self.tokens, stop_ids)
        stopped = ends.any(-1)
        lengths = torch.where(stopped, ends.int().argmax(-1) + 1, ends.shape[1]).tolist()
        # Copies: what was made in inference mode may not be kept for a backward pass.
        tokens, logprobs = self.tokens.cpu().clone(), self.logprobs.cpu().clone()
        return [
            Response(ids=ids[:length], logprobs=values[:length], finish_reason="stop" if stop else "length")
            for ids, values, length, stop in zip(tokens, logprobs, lengths, stopped.tolist(), strict=True)
        ]
