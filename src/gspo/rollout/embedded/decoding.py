"""Decoding: all responses to some prompts, many side by side, with the policy's own weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from gspo.model.policy import Policy
from gspo.model.routing import traced
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.embedded.cache import in_place_cache, is_in_place
from gspo.rollout.embedded.one_token import read_tokens, written_out
from gspo.rollout.embedded.sampling import sample_tokens, uniform_numbers
from gspo.rollout.shaping import biased_ids
from gspo.rollout.stop_strings import StopStrings
from gspo.types import Experts, FinishReason, ShowProgress

_COMPACT_BELOW = 0.9  # rows are dropped once fewer than this fraction of those decoded are still alive
# Waiting prompts are taken in once fewer than this fraction of max_rows are decoded. On a CPU a step costs as much as
# its rows, so that taking in gains nothing over waiting until all have ended, and costs copies of the cache.
_REFILL_BELOW = {"cpu": 0.0, "cuda": 0.75}
_LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have ended: on a GPU a look stalls it
_DRAW_AHEAD = 256  # random numbers a row, so that a GPU waits for them once in as many tokens

Response = tuple[Int[Tensor, "T"], Float[Tensor, "T"], Float[Tensor, "T"] | None, FinishReason, Experts | None]


class Transcript:
    """Tokens, log-likelihoods and experts in the order in which they were sampled, and whose response each is of."""

    def __init__(self, group_size: int) -> None:
        self.prefixes: list[Tensor] = []  # the experts of each prompt's tokens but the last, where they are recorded
        self._group_size = group_size
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]] = []

    def add(
        self,
        index: Int[Tensor, "R"],
        token: Int[Tensor, "R"],
        logprob: Float[Tensor, "R"],
        full_logprob: Float[Tensor, "R"] | None = None,
        experts: Integer[Tensor, "R L K"] | None = None,
    ) -> None:
        """One more token for each of the responses `index`, and the experts that the token before it was sent to."""
        self._steps.append((index, token, logprob, full_logprob, experts))

    def newest(self, count: int) -> Int[Tensor, "R n"]:
        """The tokens that were added last, for the same responses."""
        return torch.stack([step[1] for step in self._steps[-count:]], dim=1)

    def responses(self, stop_ids: Sequence[int], ends: Mapping[int, int] | None = None) -> Iterator[Response]:
        """Token ids, log q, log π where q is not π, finish reason and experts of each response, all on the CPU.

        A response ends with its first stop token, or after as many tokens as `ends` says; a row that was decoded on
        beyond it has sampled the rest for nothing.
        """
        if not self._steps:
            return
        *columns, full, recorded = zip(*self._steps, strict=True)
        index, token, logprob = (torch.cat(column).cpu() for column in columns)
        order = index.argsort(stable=True)
        token, logprob = token[order], logprob[order]
        full_logprob = None if full[0] is None else torch.cat(full).cpu()[order]
        experts = torch.cat([rows.cpu() for rows in recorded])[order] if self.prefixes else None
        is_stop = torch.isin(token, torch.tensor(stop_ids)).tolist()
        prefixes = [prefix.cpu().clone() for prefix in self.prefixes]
        start, ends = 0, ends or {}
        for number, num_sampled in enumerate(index.bincount().tolist()):
            length = ends.get(number, num_sampled)
            stopped = True in is_stop[start : start + length]
            end = is_stop.index(True, start) + 1 if stopped else start + length
            stopped |= number in ends
            own = None
            if experts is not None:
                own = Experts(prefix=prefixes[number // self._group_size], row=experts[start:end].clone())
            full_own = None if full_logprob is None else full_logprob[start:end]
            yield token[start:end], logprob[start:end], full_own, "stop" if stopped else "length", own
            start += num_sampled


@dataclass(kw_only=True)
class Rows:
    """The responses under way, each padded on the left to the same width."""

    index: Int[Tensor, "R"]  # which response each row is
    cache: Any
    position: Int[Tensor, "R 1"]  # of the token to be read next: as many tokens have been read
    width: int  # columns read so far, padding included; not every kind of cache can tell
    is_padded: bool
    sampled: Int[Tensor, "R"]  # tokens of the response so far
    alive: Bool[Tensor, "R"]
    uniform: Float[Tensor, "R n"]  # the random numbers of the next tokens
    logits: Float[Tensor, "R V"]  # for the next token
    experts: Integer[Tensor, "R L K"] | None  # of the token whose hidden state gave the logits, where they are recorded
    seen: Bool[Tensor, "R V"] | None  # the tokens of prompt and response so far, where a penalty asks for them

    @property
    def mask(self) -> Bool[Tensor, "R T"] | None:
        """True where a column is a token of the row; None: everywhere."""
        if not self.is_padded:
            return None
        return torch.arange(self.width, device=self.index.device) >= self.width - self.position

    def keep(self, rows: Int[Tensor, "K"]) -> None:
        """Drop the other rows; logits and experts are those of the next token, and not known yet."""
        for name in ("index", "position", "sampled", "alive", "uniform", "seen"):
            if (value := getattr(self, name)) is not None:
                setattr(self, name, value[rows])
        self.cache.reorder_cache(rows)

    def join(self, new: "Rows") -> "Rows":
        """Take in other rows; all are then no wider than the longest of them. Returns the rows themselves."""
        self.uniform, new.uniform = self.uniform[:, :0], new.uniform[:, :0]  # they have not as many ahead
        for name in ("index", "position", "sampled", "alive", "uniform", "logits", "experts", "seen"):
            values = [getattr(self, name), getattr(new, name)]
            setattr(self, name, None if values[0] is None else torch.cat(values))
        self.width, self.is_padded = int(self.position.max()), True
        for layer, new_layer in zip(self.cache.layers, new.cache.layers, strict=True):
            layer.join(new_layer, self.width)
        return self


@dataclass(kw_only=True, eq=False)
class Decoding:
    """The responses to be sampled: one for each key, which decides its random numbers, a group for each prompt."""

    policy: Policy
    prompts: Sequence[Sequence[int]]
    settings: RolloutConfig
    keys: Sequence[int]
    record_experts: bool = False
    check_stop: Callable[[], None] = lambda: None
    show_progress: ShowProgress = lambda *_: None

    def __post_init__(self) -> None:
        self.routing = self.policy.routing if self.record_experts else None
        self.decoder = written_out(self.policy.trunk)
        self.stop_ids = torch.tensor(self.policy.stop_ids, device=self.policy.device)
        self.stop_strings = StopStrings(self.policy.tokenizer, self.settings.stop_strings)
        biased = biased_ids(self.settings.logit_bias, self.policy.tokenizer, len(self.policy.head.weight))
        bias = torch.zeros(len(self.policy.head.weight))
        bias[[*biased]] = torch.tensor([*biased.values()])
        self.bias = bias.to(self.policy.device) if biased else None
        self.transcript = Transcript(self.settings.group_size)

    def generate(self) -> Transcript:
        """Sample all of them.

        A prompt is read once for its whole group, a finished response costs no further computation, and its row is
        taken over by a prompt that waits (at most `settings.max_rows` responses are decoded side by side).
        """
        rows: Rows | None = None
        waiting = range(len(self.prompts))  # the numbers of the prompts that are not read yet
        while waiting or rows is not None:
            if waiting and self._has_room(rows):
                room = self.settings.max_rows - (0 if rows is None else len(rows.index))
                num_new = max(1, room // self.settings.group_size)  # a group larger than max_rows is decoded by itself
                new, waiting = self._prefill(waiting[:num_new]), waiting[num_new:]
                rows = new if rows is None else rows.join(new)
            assert rows is not None
            rows = self._decode(rows, num_waiting=len(waiting) * self.settings.group_size)
        return self.transcript

    def _has_room(self, rows: Rows | None) -> bool:
        if rows is None:
            return True
        few = _REFILL_BELOW.get(rows.index.device.type, 0.0) * self.settings.max_rows
        room = self.settings.max_rows - self.settings.group_size
        return len(rows.index) < few and len(rows.index) <= room and is_in_place(rows.cache)

    def _decode(self, rows: Rows, *, num_waiting: int) -> Rows | None:
        """Sample until no row is left (None), or until there is room for prompts that wait."""
        num_left = 0  # tokens until the first row is full; the rows are not counted yet
        while True:
            self.check_stop()
            num_left = num_left or self.settings.max_new_tokens - int(rows.sampled.max())
            until_look = min(_LOOK_EVERY.get(rows.index.device.type, 1), num_left)
            token = self._sample(rows)
            for _ in range(until_look - 1):
                self._advance(rows, token)
                token = self._sample(rows)
            if self.settings.stop_strings:
                new = zip(rows.index.tolist(), self.transcript.newest(until_look).tolist(), strict=True)
                ended = [self.stop_strings.read(response, tokens) for response, tokens in new]
                rows.alive &= ~torch.tensor(ended, device=rows.alive.device)
            num_left -= until_look
            if num_left == 0:
                rows.alive &= rows.sampled < self.settings.max_new_tokens
            num_alive = int(rows.alive.sum())
            self.show_progress(len(self.keys) - num_waiting - num_alive, len(self.keys), "responses")
            if num_alive == 0:
                return None
            if num_left == 0 or num_alive < _COMPACT_BELOW * len(rows.alive):
                num_left = 0
                kept = rows.alive.nonzero()[:, 0]
                token = token[kept]
                rows.keep(kept)
            self._advance(rows, token)
            if num_waiting and self._has_room(rows):
                return rows

    def _sample(self, rows: Rows) -> Int[Tensor, "R"]:
        """Draw a token a row and write it down."""
        if rows.uniform.shape[1] == 0:
            keys = [self.keys[response] for response in rows.index.tolist()]
            count = min(_DRAW_AHEAD, self.settings.max_new_tokens)
            rows.uniform = uniform_numbers(keys, rows.sampled.tolist(), count).to(rows.index.device)
        drawn = sample_tokens(rows.logits, self.settings, rows.uniform[:, 0], bias=self.bias, seen=rows.seen)
        self.transcript.add(rows.index, *drawn, rows.experts)
        token, *_ = drawn
        if rows.seen is not None:
            rows.seen.scatter_(1, token[:, None], True)
        rows.uniform = rows.uniform[:, 1:]
        rows.sampled += 1
        rows.alive &= ~torch.isin(token, self.stop_ids)
        return token

    def _prefill(self, group_numbers: range) -> Rows:
        """Read each of these prompts once (padded on the left), then repeat its cache for the group."""
        policy, device = self.policy, self.policy.device
        prompts = [self.prompts[number] for number in group_numbers]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
        width = max(map(len, prompts))
        is_padded = min(map(len, prompts)) < width
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        column = torch.arange(width, device=device) - (width - lengths)
        cache = in_place_cache(policy.model.config, most=width + self.settings.max_new_tokens)
        mask = column >= 0 if is_padded else None
        with traced(self.routing) as trace:
            hidden = read_tokens(policy.trunk, torch.tensor(ids, device=device), mask, column.clamp(min=0), cache)
        repeat = torch.arange(len(prompts), device=device).repeat_interleave(self.settings.group_size)
        experts = None if trace is None else trace.experts.unflatten(0, (len(prompts), width))
        if experts is not None:
            self.transcript.prefixes += [
                own[width - len(prompt) : -1] for own, prompt in zip(experts, prompts, strict=True)
            ]
        cache.reorder_cache(repeat)
        return Rows(
            index=group_numbers.start * self.settings.group_size + torch.arange(len(repeat), device=device),
            cache=cache,
            position=lengths[repeat],
            width=width,
            is_padded=is_padded,
            sampled=torch.zeros_like(repeat),
            alive=torch.ones_like(repeat, dtype=torch.bool),
            uniform=torch.empty(len(repeat), 0, dtype=torch.float64, device=device),
            logits=policy.head.logits(hidden[:, -1])[repeat],
            experts=None if experts is None else experts[repeat, -1],
            seen=None if self.settings.repetition_penalty == 1 else self._seen(prompts)[repeat],
        )

    def _seen(self, prompts: Sequence[Sequence[int]]) -> Bool[Tensor, "P V"]:
        """True at the tokens of each prompt."""
        seen = torch.zeros(len(prompts), len(self.policy.head.weight), dtype=torch.bool)
        for row, prompt in zip(seen, prompts, strict=True):
            row[list(prompt)] = True
        return seen.to(self.policy.device)

    def _advance(self, rows: Rows, token: Int[Tensor, "R"]) -> None:
        """Read one more token a row."""
        position, rows.position, rows.width = rows.position, rows.position + 1, rows.width + 1
        mask = rows.mask
        with traced(self.routing) as trace:
            if self.decoder is not None:
                hidden = self.decoder(token, position, rows.cache, mask)
            else:
                hidden = read_tokens(self.policy.trunk, token[:, None], mask, position, rows.cache)[:, -1]
        rows.logits = self.policy.head.logits(hidden)
        rows.experts = None if trace is None else trace.experts
