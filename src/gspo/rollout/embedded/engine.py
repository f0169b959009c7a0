"""The embedded engine: decodes with the policy's own weights, in the process that trains them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from gspo.model.policy import Policy
from gspo.model.routing import Routing, traced
from gspo.recipe.schema import RolloutConfig
from gspo.rollout.embedded.cache import in_place_cache, is_in_place
from gspo.rollout.embedded.one_token import Decoder, additive, decoder_of
from gspo.rollout.embedded.sampling import sample
from gspo.rollout.embedded.transcript import Response, Transcript

_COMPACT_BELOW = 0.9  # rows are dropped once fewer than this fraction of those decoded are still alive
# Waiting prompts are taken in once fewer than this fraction of max_rows are decoded. On a CPU a step costs as much as
# its rows, so that taking in gains nothing over waiting until all have ended, and costs copies of the cache.
_REFILL_BELOW = {"cpu": 0.0, "cuda": 0.75}
_LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have ended: on a GPU a look stalls it


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    sampling: RolloutConfig,
    *,
    group_size: int,
    seed: int,
    record_experts: bool = False,
    check_stop: Callable[[], None] = lambda: None,
) -> list[list[Response]]:
    """Sample `group_size` responses to each prompt; the same inputs and seed give the same responses.

    Each prompt is read once for its whole group, a finished response costs no further computation, and its row is
    taken over by a prompt that waits (at most `sampling.max_rows` responses are decoded side by side).
    """
    with _inference_mode(policy.model):
        engine = _Engine(
            policy=policy,
            routing=policy.routing if record_experts else None,
            decoder=decoder_of(policy.trunk),
            sampling=sampling,
            group_size=group_size,
            generator=torch.Generator(policy.device).manual_seed(seed),
            transcript=Transcript(len(prompts) * group_size, sampling.max_new_tokens, policy.device),
            stop_ids=torch.tensor(policy.stop_ids, device=policy.device),
            check_stop=check_stop,
        )
        rows: _Rows | None = None
        num_read = 0
        while num_read < len(prompts) or rows is not None:
            if num_read < len(prompts) and _has_room(engine, rows):
                room = sampling.max_rows - (0 if rows is None else len(rows.index))
                number = max(1, room // group_size)  # a group larger than max_rows is decoded by itself
                read = prompts[num_read : num_read + number]
                new = _prefill(engine, read, num_read * group_size)
                rows = new if rows is None else _joined(rows, new)
                num_read += number
            assert rows is not None
            rows = _decode(engine, rows, others_wait=num_read < len(prompts))
    responses = engine.transcript.responses(engine.stop_ids)
    return [responses[start : start + group_size] for start in range(0, len(responses), group_size)]


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
    """The responses under way, each padded on the left to the same width."""

    index: Int[Tensor, "R"]  # which response each row is
    cache: Any
    position: Int[Tensor, "R 1"]  # of the token to be read next: as many tokens have been read
    padding: Int[Tensor, "R 1"] | None  # columns before a row's first token; None: no row has any
    width: int  # columns read so far, padding included; not every kind of cache can tell
    sampled: Int[Tensor, "R"]  # tokens of the response so far
    alive: Bool[Tensor, "R"]
    logits: Float[Tensor, "R V"]  # for the next token
    experts: Integer[Tensor, "R L K"] | None  # of the token whose hidden state gave the logits, where they are recorded

    def keep(self, rows: Int[Tensor, "K"]) -> None:
        self.index, self.position, self.sampled = self.index[rows], self.position[rows], self.sampled[rows]
        self.padding = None if self.padding is None else self.padding[rows]
        self.alive = self.alive[rows]
        self.cache.reorder_cache(rows)

    @property
    def mask(self) -> Bool[Tensor, "R T"] | None:
        """True where a column is a token of the row."""
        return None if self.padding is None else torch.arange(self.width, device=self.padding.device) >= self.padding


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """What does not change while responses are decoded."""

    policy: Policy
    routing: Routing | None  # records where the model has routers and it is wanted
    decoder: Decoder | None
    sampling: RolloutConfig
    group_size: int
    generator: torch.Generator
    transcript: Transcript
    stop_ids: Int[Tensor, "S"]
    check_stop: Callable[[], None]  # may raise, between two tokens


def _has_room(engine: _Engine, rows: _Rows | None) -> bool:
    if rows is None:
        return True
    num_rows, max_rows = len(rows.index), engine.sampling.max_rows
    few = num_rows < _REFILL_BELOW.get(rows.index.device.type, 0.0) * max_rows
    return few and num_rows + engine.group_size <= max_rows and is_in_place(rows.cache)


def _decode(engine: _Engine, rows: _Rows, *, others_wait: bool) -> _Rows | None:
    """Sample until no row is left (None), or until there is room for prompts that wait."""
    max_new_tokens, transcript = engine.sampling.max_new_tokens, engine.transcript
    left = max_new_tokens - int(rows.sampled.max())  # tokens until the first row is full
    while True:
        until_look = min(_LOOK_EVERY.get(rows.index.device.type, 1), left)
        for step in range(until_look):
            engine.check_stop()
            token, logprob = sample(rows.logits, engine.sampling, engine.generator)
            transcript.add(token, logprob, rows.experts)
            rows.sampled += 1
            rows.alive &= ~torch.isin(token, engine.stop_ids)
            if step + 1 < until_look:
                _advance(engine, rows, token)
        left -= until_look
        if left == 0:
            rows.alive &= rows.sampled < max_new_tokens
        num_alive = int(rows.alive.sum())
        if num_alive < _COMPACT_BELOW * len(rows.alive) or left == 0:
            transcript.write(rows.index, rows.sampled)
            if num_alive == 0:
                return None
            kept = rows.alive.nonzero()[:, 0]
            token = token[kept]
            rows.keep(kept)
            left = max_new_tokens - int(rows.sampled.max())
        _advance(engine, rows, token)
        if others_wait and _has_room(engine, rows):
            transcript.write(rows.index, rows.sampled)
            return rows


def _prefill(engine: _Engine, prompts: Sequence[Sequence[int]], first_index: int) -> _Rows:
    """Read every prompt once (padded on the left), then repeat its cache for the group."""
    policy = engine.policy
    device = policy.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
    width = int(lengths.max())
    padded = [[policy.pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    padding = width - lengths
    column = torch.arange(width, device=device)
    uniform = min(map(len, prompts)) == width
    cache = in_place_cache(policy.model.config, most=width + engine.sampling.max_new_tokens)
    with traced(engine.routing) as trace:
        output = policy.trunk(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=None if uniform else (column >= padding).long(),
            position_ids=(column - padding).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
        )
    repeat = torch.arange(len(prompts), device=device).repeat_interleave(engine.group_size)
    experts = None if trace is None else trace.experts.unflatten(0, (len(prompts), width))
    if experts is not None:
        engine.transcript.prefixes += [
            own[width - len(prompt) : -1] for own, prompt in zip(experts, prompts, strict=True)
        ]
    cache.reorder_cache(repeat)
    return _Rows(
        index=first_index + torch.arange(len(repeat), device=device),
        cache=cache,
        position=lengths[repeat],
        padding=None if uniform else padding[repeat],
        width=width,
        sampled=torch.zeros(len(repeat), dtype=torch.long, device=device),
        alive=torch.ones(len(repeat), dtype=torch.bool, device=device),
        logits=policy.logits(output.last_hidden_state[:, -1])[repeat],
        experts=None if experts is None else experts[repeat, -1],
    )


def _joined(old: _Rows, new: _Rows) -> _Rows:
    """Both as one, no wider than its longest row."""
    position = torch.cat([old.position, new.position])
    width = int(position.max())
    for own, theirs in zip(old.cache.layers, new.cache.layers, strict=True):
        own.join(theirs, width)
    return _Rows(
        index=torch.cat([old.index, new.index]),
        cache=old.cache,
        position=position,
        padding=width - position,
        width=width,
        sampled=torch.cat([old.sampled, new.sampled]),
        alive=torch.cat([old.alive, new.alive]),
        logits=torch.cat([old.logits, new.logits]),
        experts=None if old.experts is None or new.experts is None else torch.cat([old.experts, new.experts]),
    )


def _advance(engine: _Engine, rows: _Rows, token: Int[Tensor, "R"]) -> None:
    """Read one more token a row."""
    rows.width += 1
    mask = rows.mask
    with traced(engine.routing) as trace:
        if engine.decoder is not None:
            added = None if mask is None else additive(mask, engine.decoder.dtype)
            hidden = engine.decoder.step(token, rows.position, rows.cache, added)
        else:
            hidden = engine.policy.trunk(
                input_ids=token[:, None],
                attention_mask=None if mask is None else mask.long(),
                position_ids=rows.position,
                past_key_values=rows.cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
    rows.position = rows.position + 1
    rows.logits = engine.policy.logits(hidden)
    rows.experts = None if trace is None else trace.experts
