"""The embedded engine: decodes with the policy's own modules, in the process that trains them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gspo.config import Rollout as Sampling
from gspo.policy.model import Policy
from gspo.records import FinishReason
from gspo.rollout.cache import in_place_cache

_COMPACT_BELOW = 0.9  # rows are dropped once fewer than this fraction of those decoded are still alive


@dataclass(frozen=True, kw_only=True)
class Response:
    """One sampled response; its log-likelihoods are those of softmax(logits / temperature) over all tokens."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def generate(
    policy: Policy, prompts: Sequence[Sequence[int]], sampling: Sampling, *, group_size: int, seed: int
) -> list[list[Response]]:
    """Sample `group_size` responses to each prompt; the same inputs and seed give the same responses.

    Each prompt is read once for its whole group, and a finished response costs no further computation.
    """
    generator = torch.Generator(policy.device).manual_seed(seed)
    prompts_at_once = max(1, sampling.max_rows // group_size)
    groups: list[list[Response]] = []
    with _inference_mode(policy.model):
        for start in range(0, len(prompts), prompts_at_once):
            groups += _decode_wave(policy, prompts[start : start + prompts_at_once], sampling, group_size, generator)
    return groups


@contextmanager
def _inference_mode(model: Any) -> Iterator[None]:
    """Out of training mode, in which gradient checkpointing makes transformers drop the cache."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


@dataclass(kw_only=True)
class _Rows:
    """The responses under way: what shrinks as they end."""

    index: Int[Tensor, "R"]  # which response of the wave each row is
    cache: Any
    mask: Int[Tensor, "R T"] | None  # 1 where a token is real; None: no row is padded
    position: Int[Tensor, "R 1"]  # of the token to be read next
    alive: Bool[Tensor, "R"]
    width: int  # columns read so far, padding included; not every kind of cache can tell

    def keep(self, rows: Int[Tensor, "K"]) -> None:
        self.index, self.position, self.alive = self.index[rows], self.position[rows], self.alive[rows]
        self.mask = None if self.mask is None else self.mask[rows]
        self.cache.reorder_cache(rows)


class _Transcript:
    """The tokens and log-likelihoods sampled so far; written in stretches between which the rows stay the same."""

    def __init__(self, num_responses: int, max_new_tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(num_responses, max_new_tokens, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num_responses, max_new_tokens, device=device)
        self._start = 0
        self._stretch: list[tuple[Tensor, Tensor]] = []

    def add(self, token: Int[Tensor, "R"], logprob: Float[Tensor, "R"]) -> None:
        self._stretch.append((token, logprob))

    def write(self, index: Int[Tensor, "R"]) -> None:
        """End a stretch, in which row r was response `index[r]`."""
        columns = slice(self._start, self._start + len(self._stretch))
        token, logprob = (torch.stack(values, dim=1) for values in zip(*self._stretch, strict=True))
        self.tokens[index, columns], self.logprobs[index, columns] = token, logprob
        self._start, self._stretch = columns.stop, []


def _decode_wave(
    policy: Policy, prompts: Sequence[Sequence[int]], sampling: Sampling, group_size: int, generator: torch.Generator
) -> list[list[Response]]:
    rows, logits = _prefill(policy, prompts, group_size, reserve=sampling.max_new_tokens)
    stop_ids = torch.tensor(policy.stop_ids, device=policy.device)
    transcript = _Transcript(len(rows.index), sampling.max_new_tokens, policy.device)
    for step in range(sampling.max_new_tokens):
        token, logprob = _sample(logits, sampling, generator)
        transcript.add(token, logprob)
        rows.alive &= (token[:, None] != stop_ids).all(-1)
        num_alive = int(rows.alive.sum())
        if num_alive == 0 or step + 1 == sampling.max_new_tokens:
            break
        if num_alive < _COMPACT_BELOW * len(rows.alive):
            kept = rows.alive.nonzero()[:, 0]
            token = token[kept]
            transcript.write(rows.index)
            rows.keep(kept)
        logits = _advance(policy, rows, token)
    transcript.write(rows.index)
    return _collect(transcript, set(policy.stop_ids), group_size)


def _prefill(
    policy: Policy, prompts: Sequence[Sequence[int]], group_size: int, *, reserve: int
) -> tuple[_Rows, Float[Tensor, "R V"]]:
    """Read every prompt once (padded on the left), then repeat its cache for the group."""
    lengths = torch.tensor([len(p) for p in prompts], device=policy.device)
    width = int(lengths.max())
    padded = [[policy.pad_id] * (width - len(p)) + list(p) for p in prompts]
    ids = torch.tensor(padded, device=policy.device)
    column = torch.arange(width, device=policy.device)[None]
    is_real = column >= (width - lengths)[:, None]
    uniform = bool(is_real.all())
    cache = in_place_cache(policy.model.config)
    output = policy.trunk(
        input_ids=ids,
        attention_mask=None if uniform else is_real.long(),
        position_ids=(column - (width - lengths)[:, None]).clamp(min=0),
        past_key_values=cache,
        use_cache=True,
    )
    repeat = torch.arange(len(prompts), device=policy.device).repeat_interleave(group_size)
    cache.reorder_cache(repeat)
    mask = None
    if not uniform:
        mask = torch.ones(len(repeat), width + reserve, dtype=torch.long, device=policy.device)
        mask[:, :width] = is_real[repeat]
    rows = _Rows(
        index=torch.arange(len(repeat), device=policy.device),
        cache=cache,
        mask=mask,
        position=lengths[repeat][:, None],
        alive=torch.ones(len(repeat), dtype=torch.bool, device=policy.device),
        width=width,
    )
    return rows, policy.logits(output.last_hidden_state[:, -1])[repeat]


def _advance(policy: Policy, rows: _Rows, token: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
    """Read one more token a row and return the logits for the next."""
    rows.width += 1
    mask = None if rows.mask is None else rows.mask[:, : rows.width]
    output = policy.trunk(
        input_ids=token[:, None],
        attention_mask=mask,
        position_ids=rows.position,
        past_key_values=rows.cache,
        use_cache=True,
    )
    rows.position = rows.position + 1
    return policy.logits(output.last_hidden_state[:, -1])


def _sample(
    logits: Float[Tensor, "R V"], sampling: Sampling, generator: torch.Generator
) -> tuple[Int[Tensor, "R"], Float[Tensor, "R"]]:
    """Draw a token a row, from the top-k / top-p part where asked; its log-likelihood is that of the whole softmax."""
    log_probabilities = (logits / sampling.temperature).log_softmax(-1)
    kept = _truncate(log_probabilities, sampling)
    # One uniform number a row through the cumulated probabilities, whatever they sum to; noise for every token of a
    # large vocabulary would cost more than the model.
    cumulated = kept.exp().cumsum(-1, dtype=torch.float64)  # float32 would lose the small ones of a large vocabulary
    uniform = torch.rand(len(logits), 1, generator=generator, device=logits.device, dtype=torch.float64)
    uniform = uniform * cumulated[:, -1:]
    token = torch.searchsorted(cumulated, uniform, right=True).clamp_(max=logits.shape[-1] - 1)
    return token[:, 0], log_probabilities.gather(-1, token)[:, 0]


def _truncate(log_probabilities: Float[Tensor, "R V"], sampling: Sampling) -> Float[Tensor, "R V"]:
    """-inf outside the top k tokens and outside the smallest set of probability ≥ top_p."""
    if 0 < sampling.top_k < log_probabilities.shape[-1]:
        threshold = log_probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        log_probabilities = log_probabilities.masked_fill(log_probabilities < threshold, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = log_probabilities.softmax(-1).sort(dim=-1, descending=True)
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p  # the mass before the token already suffices
        outside = torch.zeros_like(outside).scatter(-1, order, outside)
        log_probabilities = log_probabilities.masked_fill(outside, -torch.inf)
    return log_probabilities


def _collect(transcript: _Transcript, stop: set[int], group_size: int) -> list[list[Response]]:
    """The responses, each up to its first stop token; what a finished row sampled after it is dropped here."""
    responses = []
    for ids, values in zip(transcript.tokens.tolist(), transcript.logprobs.tolist(), strict=True):
        length = next((position for position, token in enumerate(ids, start=1) if token in stop), len(ids))
        reason: FinishReason = "stop" if ids[length - 1] in stop else "length"
        responses.append(Response(ids=tuple(ids[:length]), logprobs=tuple(values[:length]), finish_reason=reason))
    return [responses[i : i + group_size] for i in range(0, len(responses), group_size)]
