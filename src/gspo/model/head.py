"""Log-likelihood and entropy from hidden states, a chunk of tokens at a time, forward and backward."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from gspo.model.linear import linear

MAX_LOGITS = 2**25  # the number that exist at once: 128 MiB in float32, whatever the vocabulary


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last linear layer of a causal language model, and the scale and soft cap of its logits."""

    weight: Tensor  # V x H
    bias: Tensor | None = None
    scale: float = 1.0  # Cohere multiplies, Granite divides
    cap: float | None = None  # Gemma: cap · tanh(logits / cap)

    def logits(self, hidden: Float[Tensor, "M H"]) -> Float[Tensor, "M V"]:
        """Logits in float32, also of bfloat16 states: rounded to bfloat16, logits near 16 would be 0.125 apart."""
        logits = _product(hidden.to(self.weight.dtype), self.weight.T)  # some trunks add up in float32
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1:
            logits *= self.scale
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)


def token_likelihood(
    head: Head, hidden: Float[Tensor, "N H"], targets: Int[Tensor, "N"], temperature: float
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """log softmax(logits / temperature) at the N targets, and the entropy of each distribution, both in nats.

    Memory does not grow with tokens × vocabulary: only one chunk's logits exist at a time, also in the backward pass.
    Those of a single chunk are kept for it.
    """
    states = hidden.to(head.weight.dtype)
    logprobs, entropy = _TokenLikelihood.apply(states, head.weight, head.bias, targets, head, temperature)
    return logprobs, entropy


@torch.no_grad()
def token_squared_errors(
    head: Head, hidden: Float[Tensor, "N H"], targets: Int[Tensor, "N"], temperature: float
) -> Float[Tensor, "N"]:
    """|1[y] - π|² = 1 - 2π(y) + Σ_v π_v² of the N targets, in the memory that `token_likelihood` takes."""
    result = hidden.new_empty(len(hidden), dtype=torch.float32)
    for rows in _chunks(len(hidden), len(head.weight)):
        errors = torch.softmax(head.logits(hidden[rows]).div_(temperature), -1)
        errors[torch.arange(len(errors), device=errors.device), targets[rows]] -= 1
        result[rows] = errors.square_().sum(-1)
    return result


class _TokenLikelihood(torch.autograd.Function):
    """A gradient by hand: autograd would keep all tokens' probabilities, and a weight gradient for each chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: Head, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, highest, total = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        buffer: Tensor | None = None  # new memory for every chunk costs more than the exponentials that fill it
        chunks = _chunks(len(hidden), len(weight))
        for rows in chunks:
            scores = head.logits(hidden[rows]).div_(temperature)
            highest[rows] = scores.amax(-1)
            scores -= highest[rows, None]  # or large logits would round the rest away
            chosen = scores.gather(-1, targets[rows, None])[:, 0]
            buffer = torch.empty_like(scores) if buffer is None else buffer[: len(scores)]  # the last may be smaller
            weights = torch.exp(scores, out=buffer)
            total[rows] = weights.sum(-1)
            logprobs[rows] = chosen - total[rows].log()
            # A token of probability 0 has entropy 0, not 0 · (-inf).
            mean = torch.bmm(weights[:, None], scores.clamp_(min=-1e4)[:, :, None])[:, 0, 0] / total[rows]
            entropy[rows] = total[rows].log() - mean
        ctx.save_for_backward(hidden, weight, bias, targets, highest, total, entropy)
        ctx.head, ctx.temperature = head, temperature
        # The backward pass comes next: what one chunk holds need not be computed again.
        ctx.scores = scores if len(chunks) == 1 and head.cap is None else None
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, highest, total, entropy = ctx.saved_tensors
        head, temperature = ctx.head, ctx.temperature
        gradient = torch.zeros_like(total) if gradient is None else gradient
        hidden_gradient = torch.empty_like(hidden)
        # Accumulated over chunks in float32: bfloat16 would lose small summands.
        is_trained = ctx.needs_input_grad[1]  # and not frozen
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _chunks(len(hidden), len(weight)):
            scores, bend, ctx.scores = ctx.scores, None, None  # a second backward pass finds none
            if scores is None:
                logits = head.logits(hidden[rows])
                bend = None if head.cap is None else 1 - (logits / head.cap) ** 2
                scores = logits.div_(temperature).sub_(highest[rows, None])
            bonus = None
            if entropy_gradient is not None:  # d H / d logits = -p (log p + H)
                surprise = (scores - total[rows, None].log()).clamp_(min=-1e4)
                bonus = surprise.exp() * (surprise + entropy[rows, None]) * -entropy_gradient[rows, None]
            # d log p(y) / d logits = 1[y] - p
            error = scores.exp_().mul_(-(gradient / total)[rows, None])
            error[torch.arange(len(error), device=error.device), targets[rows]] += gradient[rows]
            if bonus is not None:
                error += bonus
            if head.scale != temperature:
                error *= head.scale / temperature
            if bend is not None:
                error *= bend
            if bias_gradient is not None:
                bias_gradient += error.sum(0)
            error = error.to(weight.dtype)
            hidden_gradient[rows] = linear(error, weight.T)
            if weight_gradient is not None and weight.dtype == torch.float32:
                weight_gradient.addmm_(error.T, hidden[rows])
            elif weight_gradient is not None:
                weight_gradient += _product(error.T, hidden[rows])
        bias_gradient = None if bias is None or bias_gradient is None else bias_gradient.to(bias.dtype)
        weight_gradient = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def _product(left: Float[Tensor, "M K"], right: Float[Tensor, "K N"]) -> Float[Tensor, "M N"]:
    """The matrix product, accumulated and returned in float32."""
    if left.dtype == torch.float32:
        return linear(left, right.T)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # the CPU has no product of two precisions


def _chunks(num_tokens: int, vocabulary: int) -> list[slice]:
    """Slices of nearly equal size, whose logits stay within MAX_LOGITS."""
    size = math.ceil(num_tokens / math.ceil(num_tokens * vocabulary / MAX_LOGITS)) if num_tokens else 1
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
