"""Decoding: all responses to some prompts, many side by side, with the policy's own weights."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from transformers import DynamicCache

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
_MOST_TOKENS = 16_384  # of responses under way that are read again in one pass
_DRAW_AHEAD = 256  # random numbers a row, so that a GPU waits for them once in as many tokens


class Response(NamedTuple):
    """A response as it was decoded, on the CPU."""

    token_ids: Int[Tensor, "T"]
    logprobs: Float[Tensor, "T"]  # log q
    full_logprobs: Float[Tensor, "T"] | None  # log π where q is not π
    counts: tuple[int, ...]  # of its tokens, by the weights that drew them: the first, and those after each change
    finish_reason: FinishReason
    experts: Experts | None


class Means(IntEnum):
    """What a model is decoded with, from the fastest on; proof.py finds the first that is right for it."""

    WRITTEN_OUT = 0  # the decoder of one_token.py stands in for the model's modules
    OWN_MODULES = 1
    NO_PADDING = 2  # the model's own cache; only prompts of one length are side by side, and no others join them
    NO_CACHE = 3  # plain passes: all tokens are read again for each new one, those of one length side by side


class Transcript:
    """Tokens, log-likelihoods and experts in the order in which they were sampled, and whose response each is of."""

    def __init__(self, group_size: int) -> None:
        self.prefixes: dict[int, Tensor] = {}  # the experts of prompts' tokens but the last, where they are recorded
        self._group_size = group_size
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]] = []
        self._changes: list[int] = []  # before which of the steps the weights were others

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

    def tokens_of(self, index: Int[Tensor, "R"]) -> list[list[int]]:
        """All tokens of these responses so far."""
        if not self._steps:
            return [[] for _ in index]
        owner, token = torch.cat([step[0] for step in self._steps]), torch.cat([step[1] for step in self._steps])
        return [token[owner == number].tolist() for number in index]

    def change_weights(self, *, is_next_drawn: bool) -> None:
        """What is added from now on was drawn with other weights, or what comes after the next tokens."""
        self._changes.append(len(self._steps) + is_next_drawn)

    def responses(
        self, stop_ids: Sequence[int], ends: Mapping[int, int] | None = None, groups: Sequence[int] | None = None
    ) -> Iterator[Response]:
        """Each response of these groups, or of all, in their order.

        A response ends with its first stop token, or after as many tokens as `ends` says; a row that was decoded on
        beyond it has sampled the rest for nothing.
        """
        if not self._steps:
            return
        *columns, full, recorded = zip(*self._steps, strict=True)
        index, token, logprob = (torch.cat(column).cpu() for column in columns)
        order = index.argsort(stable=True)
        if groups is not None:
            order = order[torch.isin(index[order] // self._group_size, torch.tensor(groups))]
        index, token, logprob = index[order], token[order], logprob[order]
        step = torch.arange(len(recorded)).repeat_interleave(torch.tensor([len(column) for column in columns[0]]))[
            order
        ]
        weights = torch.bucketize(step, torch.tensor(self._changes), right=True) if self._changes else step * 0
        full_logprob = None if full[0] is None else torch.cat(full).cpu()[order]
        experts = torch.cat([rows.cpu() for rows in recorded])[order] if self.prefixes else None
        is_stop = torch.isin(token, torch.tensor(stop_ids)).tolist()
        numbers, lengths = (tensor.tolist() for tensor in index.unique(return_counts=True))
        of_groups = {number // self._group_size for number in numbers} if self.prefixes else set()
        prefixes = {group: self.prefixes[group].cpu().clone() for group in of_groups}
        start, ends = 0, ends or {}
        for number, num_sampled in zip(numbers, lengths, strict=True):
            length = ends.get(number, num_sampled)
            stopped = True in is_stop[start : start + length]
            end = is_stop.index(True, start) + 1 if stopped else start + length
            stopped |= number in ends
            recorded_experts = None
            if experts is not None:
                recorded_experts = Experts(prefix=prefixes[number // self._group_size], row=experts[start:end].clone())
            full_own = None if full_logprob is None else full_logprob[start:end]
            yield Response(
                token_ids=token[start:end],
                logprobs=logprob[start:end],
                full_logprobs=full_own,
                counts=(*weights[start:end].bincount(minlength=len(self._changes) + 1).tolist(),),
                finish_reason="stop" if stopped else "length",
                experts=recorded_experts,
            )
            start += num_sampled


@dataclass(kw_only=True)
class Rows:
    """The responses under way, each padded on the left to the same width."""

    index: Int[Tensor, "R"]  # which response each row is
    cache: Any  # None: nothing is kept
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
        if self.cache is not None:
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
    put: Callable[[int, list[Response]], None] | None = None  # hand over a group as its last row is dropped
    means: Means = Means.WRITTEN_OUT

    def __post_init__(self) -> None:
        self.routing = self.policy.routing if self.record_experts else None
        self.decoder = written_out(self.policy.trunk) if self.means is Means.WRITTEN_OUT else None
        self.stop_ids = torch.tensor(self.policy.stop_ids, device=self.policy.device)
        prompts, size = self.prompts, self.settings.group_size
        strings = self.settings.stop_strings
        self.stop_strings = StopStrings(self.policy.tokenizer, strings, lambda number: prompts[number // size])
        biased = biased_ids(self.settings.logit_bias, self.policy.tokenizer, len(self.policy.head.weight))
        bias = torch.zeros(len(self.policy.head.weight))
        bias[[*biased]] = torch.tensor([*biased.values()])
        self.bias = bias.to(self.policy.device) if biased else None
        self.transcript = Transcript(self.settings.group_size)
        self._must_read_again = False
        self._num_tokens, self._started = 0, time.monotonic()

    def change_weights(self, *, keep_cache: bool) -> None:
        """The policy's weights have been replaced, by `check_stop`: the responses under way go on with them.

        What was computed of these with the weights before is kept, or computed anew.
        """
        self.transcript.change_weights(is_next_drawn=keep_cache)  # then their logits are there already
        self._must_read_again |= not keep_cache

    def generate(self) -> Transcript:
        """Sample all of them.

        A prompt is read once for its whole group, a finished response costs no further computation, and its row is
        taken over by a prompt that waits (at most `settings.max_rows` responses are decoded side by side).
        """
        rows: Rows | None = None
        lengths = [len(prompt) for prompt in self.prompts]
        if self.means < Means.NO_PADDING:
            lengths = [0] * len(lengths)  # any stand side by side
        waiting = sorted(range(len(lengths)), key=lengths.__getitem__)  # the numbers of the prompts not read yet
        while waiting or rows is not None:
            if waiting and self._has_room(rows):
                room = self.settings.max_rows - (0 if rows is None else len(rows.index))
                num_new = max(1, room // self.settings.group_size)  # a group larger than max_rows is decoded by itself
                num_new = [lengths[number] for number in waiting[:num_new]].count(lengths[waiting[0]])
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
            while self._must_read_again:  # also where the weights were replaced while it was read
                self._read_again(rows)
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
            self._num_tokens += until_look * num_alive
            rate = self._num_tokens / (time.monotonic() - self._started)
            tokens = f"responses, {self._num_tokens:,} tokens ({rate:,.0f} a second)"
            self.show_progress(len(self.keys) - num_waiting - num_alive, len(self.keys), tokens)
            if num_alive == 0:
                self._hand_over(rows.index, rows.index[:0])
                return None
            if num_left == 0 or num_alive < _COMPACT_BELOW * len(rows.alive):
                num_left = 0
                kept = rows.alive.nonzero()[:, 0]
                self._hand_over(rows.index, rows.index[kept])
                token = token[kept]
                rows.keep(kept)
            self._advance(rows, token)
            if num_waiting and self._has_room(rows):
                return rows

    def _hand_over(self, before: Int[Tensor, "R"], left: Int[Tensor, "K"]) -> None:
        """The groups that have ended with the responses that are not left."""
        if self.put is None:
            return
        size = self.settings.group_size
        ended = sorted({*(before // size).tolist()} - {*(left // size).tolist()})
        responses = self.transcript.responses(self.policy.stop_ids, self.stop_strings.ends, ended)
        for group in ended:
            self.put(group, [next(responses) for _ in range(size)])

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

    def _prefill(self, group_numbers: Sequence[int]) -> Rows:
        """Read each of these prompts once, then repeat its cache for the group."""
        prompts = [self.prompts[number] for number in group_numbers]
        rows, experts = self._read(prompts)
        if experts is not None:
            for number, row, prompt in zip(group_numbers, experts, prompts, strict=True):
                self.transcript.prefixes[number] = row[rows.width - len(prompt) : -1]
        size, device = self.settings.group_size, rows.index.device
        repeat = rows.index.repeat_interleave(size)
        rows.keep(repeat)
        rows.index = (
            torch.tensor(group_numbers, device=device)[:, None] * size + torch.arange(size, device=device)
        ).flatten()
        rows.logits, rows.experts = rows.logits[repeat], None if rows.experts is None else rows.experts[repeat]
        return rows

    def _read_again(self, rows: Rows) -> None:
        """Compute anew what is known of prompts and responses so far: with the present weights."""
        self._must_read_again = False
        sequences = self._sequences(rows)
        size = max(1, _MOST_TOKENS // rows.width) if is_in_place(rows.cache) else len(sequences)
        rows.cache, read = None, None  # the memory is needed for the new one
        for start in range(0, len(sequences), size):
            self.check_stop()  # a proof does not wait for all of them
            new, _ = self._read(sequences[start : start + size])
            read = new if read is None else read.join(new)
        assert read is not None
        rows.cache, rows.width, rows.is_padded = read.cache, read.width, read.is_padded
        rows.logits, rows.experts = read.logits, read.experts

    def _sequences(self, rows: Rows) -> list[list[int]]:
        """Each row's prompt and response so far."""
        tokens_by_row = zip(rows.index.tolist(), self.transcript.tokens_of(rows.index), strict=True)
        return [[*self.prompts[number // self.settings.group_size], *tokens] for number, tokens in tokens_by_row]

    def _read(self, sequences: Sequence[Sequence[int]]) -> tuple[Rows, Integer[Tensor, "P W L K"] | None]:
        """Rows of a pass over the sequences, padded on the left, and the experts of all their tokens."""
        policy, device = self.policy, self.policy.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)[:, None]
        width = max(map(len, sequences))
        is_padded = min(map(len, sequences)) < width
        ids = [[0] * (width - len(sequence)) + list(sequence) for sequence in sequences]
        column = torch.arange(width, device=device) - (width - lengths)
        read, cache, mask = torch.tensor(ids, device=device), None, column >= 0 if is_padded else None
        with traced(self.routing) as trace:
            if self.means is Means.NO_CACHE:
                hidden = policy.trunk(input_ids=read, use_cache=False).last_hidden_state
            else:
                cache = DynamicCache(config=policy.model.config)  # not in place, so that no others join
                if self.means is not Means.NO_PADDING:
                    cache = in_place_cache(policy.model.config, most=width + self.settings.max_new_tokens)
                hidden = read_tokens(policy.trunk, read, mask, column.clamp(min=0), cache)
        experts = None if trace is None else trace.experts.unflatten(0, (len(sequences), width))
        number = torch.arange(len(sequences), device=device)
        rows = Rows(
            index=number,
            cache=cache,
            position=lengths,
            width=width,
            is_padded=is_padded,
            sampled=torch.zeros_like(number),
            alive=torch.ones_like(number, dtype=torch.bool),
            uniform=torch.empty(len(number), 0, dtype=torch.float64, device=device),
            logits=policy.head.logits(hidden[:, -1]),
            experts=None if experts is None else experts[:, -1],
            seen=None if self.settings.repetition_penalty == 1 else self._seen(sequences),
        )
        return rows, experts

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
        if self.means is Means.NO_CACHE:
            read, _ = self._read(self._sequences(rows))
            rows.logits, rows.experts = read.logits, read.experts
            return
        with traced(self.routing) as trace:
            if self.decoder is not None:
                hidden = self.decoder(token, position, rows.cache, mask)
            else:
                hidden = read_tokens(self.policy.trunk, token[:, None], mask, position, rows.cache)[:, -1]
        rows.logits = self.policy.head.logits(hidden)
        rows.experts = None if trace is None else trace.experts.unflatten(0, (len(token), -1))[:, -1]
