"""Decoding: completions of prompts, many side by side, with the policy's own weights."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor
from transformers import DynamicCache

from gspo.engine.embedded.cache import KeptPasts, Past, cache_of_pasts, in_place_cache, is_in_place, past_of
from gspo.engine.embedded.fast_decode import fast_decoder, read_tokens
from gspo.engine.embedded.sampling import sample_tokens, uniform_numbers
from gspo.engine.embedded.transcript import Transcript
from gspo.engine.engine import Completion, Prompt, Sampling, in_groups
from gspo.model.policy import Policy
from gspo.model.routing import traced

_COMPACT_BELOW = 0.9  # rows are dropped once fewer than this fraction of those decoded are still alive
# Waiting prompts are taken in once fewer than this fraction of max_rows are decoded. On a CPU a step costs as much as
# its rows, so that taking in gains nothing over waiting until all have ended, and costs copies of the cache.
_REFILL_BELOW = {"cpu": 0.0, "cuda": 0.75}
_LOOK_EVERY = {"cpu": 1, "cuda": 16}  # tokens between two looks at which rows have ended: on a GPU a look stalls it
_MOST_TOKENS = 16_384  # of responses under way that are read again in one pass
_DRAW_AHEAD = 256  # random numbers a row, so that a GPU waits for them once in as many tokens


class Means(IntEnum):
    """The means of decoding a model, from the fastest on; proof.py finds the first that is right for it."""

    FAST = 0  # the decoder of fast_decode.py stands in for the model's modules
    OWN_MODULES = 1
    NO_PADDING = 2  # the model's own cache; only prompts of one length are side by side, and no others join them
    NO_CACHE = 3  # plain passes: all tokens are read again for each new one, those of one length side by side


@dataclass(kw_only=True)
class Rows:
    """The completions under way, each padded on the left to the same width."""

    index: Int[Tensor, "R"]  # which completion each row is
    cache: Any  # None: nothing is kept
    position: Int[Tensor, "R 1"]  # of the token to be read next: as many tokens have been read
    width: int  # columns read so far, padding included; not every kind of cache can tell
    is_padded: bool
    sampled: Int[Tensor, "R"]  # tokens of the completion so far
    alive: Bool[Tensor, "R"]
    uniform: Float[Tensor, "R n"]  # the random numbers of the next tokens
    logits: Float[Tensor, "R V"]  # for the next token
    experts: Integer[Tensor, "R L K"] | None  # of the token whose hidden state gave the logits, where they are recorded
    seen: Bool[Tensor, "R V"] | None  # the tokens of prompt and completion so far, where a penalty asks for them

    @property
    def mask(self) -> Bool[Tensor, "R T"] | None:
        """A mask that is True where a column is a token of the row; None: everywhere."""
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
    """Prompts to be completed, at most `max_rows` side by side."""

    policy: Policy
    prompts: Sequence[Prompt]
    sampling: Sampling
    max_rows: int
    version: int = 0  # of the policy's weights
    check: Callable[[], None] = lambda: None  # called before each token; what it raises abandons all
    put: Callable[[int, Completion], None] = lambda *_: None  # hand over a completion as its row is dropped
    means: Means = Means.FAST
    kept: KeptPasts = field(default_factory=KeptPasts)  # of prompts before: no more than there are rows left

    def __post_init__(self) -> None:
        self.routing = self.policy.routing if self.sampling.record_experts else None
        self.decoder = fast_decoder(self.policy.trunk) if self.means is Means.FAST else None
        self.stop_ids = torch.tensor(self.sampling.stop_ids, dtype=torch.long, device=self.policy.device)
        self.limits = torch.tensor([prompt.max_new_tokens for prompt in self.prompts], device=self.policy.device)
        bias, biases = torch.zeros(len(self.policy.head.weight)), self.sampling.biases
        bias[[*biases]] = torch.tensor([*biases.values()])
        self.bias = bias.to(self.policy.device) if biases else None
        self.transcript = Transcript(self.version)
        self.num_tokens = 0  # sampled so far
        self._groups = in_groups(self.prompts)
        self._ends: dict[int, int] = {}  # after how many tokens completions end that their prompts say are complete
        self._can_complete = any(prompt.is_complete is not None for prompt in self.prompts)
        self._must_read_again = False

    def change_weights(self, version: int, *, keep_cache: bool) -> None:
        """The policy's weights have been replaced, by `check`: the completions under way go on with them.

        What was computed of these with the weights before is kept, or computed anew.
        """
        self.transcript.change_weights(version, is_next_drawn=keep_cache)  # then their logits are there already
        self._must_read_again |= not keep_cache

    def generate(self) -> None:
        """Sample all of them.

        A prompt is read once for its whole group, a finished completion costs no further computation, and its row is
        taken over by a prompt that waits.
        """
        rows: Rows | None = None
        lengths = [0] * len(self._groups)  # any stand side by side
        if self.means >= Means.NO_PADDING:
            lengths = [len(self.prompts[group[0]].ids) for group in self._groups]
        # The groups whose prompts are not read yet: first those of which something is kept, before it has to go.
        is_new = [not any(self.kept.has(self.prompts[number].session) for number in group) for group in self._groups]
        waiting = sorted(range(len(lengths)), key=lambda number: (lengths[number], is_new[number]))
        while waiting or rows is not None:
            if waiting and self._has_room(rows, waiting):
                room = self.max_rows - (0 if rows is None else len(rows.index))
                sizes = accumulate(len(self._groups[number]) for number in waiting)
                num_new = max(1, sum(size <= room for size in sizes))  # a group beyond max_rows is decoded by itself
                num_new = [lengths[number] for number in waiting[:num_new]].count(lengths[waiting[0]])
                new, waiting = self._prefill([self._groups[number] for number in waiting[:num_new]]), waiting[num_new:]
                rows = new if rows is None else rows.join(new)
            assert rows is not None
            rows = self._decode(rows, waiting)

    def _has_room(self, rows: Rows | None, waiting: Sequence[int]) -> bool:
        if rows is None:
            return True
        few = _REFILL_BELOW.get(rows.index.device.type, 0.0) * self.max_rows
        room = self.max_rows - len(self._groups[waiting[0]])
        return len(rows.index) < few and len(rows.index) <= room and is_in_place(rows.cache)

    def _decode(self, rows: Rows, waiting: Sequence[int]) -> Rows | None:
        """Sample until no row is left (None), or until there is room for prompts that wait."""
        self.kept.limit(self.max_rows - len(rows.index))
        num_left = 0  # tokens until the first row is full; the rows are not counted yet
        while True:
            self.check()
            while self._must_read_again:  # also where the weights were replaced while it was read
                self._read_again(rows)
            num_left = num_left or int((self.limits[rows.index] - rows.sampled).min())
            until_look = min(_LOOK_EVERY.get(rows.index.device.type, 1), num_left)
            token = self._sample(rows)
            for _ in range(until_look - 1):
                self._advance(rows, token)
                token = self._sample(rows)
            if self._can_complete:
                rows.alive &= ~self._are_complete(rows, until_look)
            num_left -= until_look
            if num_left == 0:
                rows.alive &= rows.sampled < self.limits[rows.index]
            num_alive = int(rows.alive.sum())
            self.num_tokens += until_look * num_alive
            if num_alive == 0:
                self._hand_over(rows)
                return None
            if num_left == 0 or num_alive < _COMPACT_BELOW * len(rows.alive):
                num_left = 0
                self._hand_over(rows)
                kept = rows.alive.nonzero()[:, 0]
                token = token[kept]
                rows.keep(kept)
            self._advance(rows, token)
            if waiting and self._has_room(rows, waiting):
                return rows

    def _are_complete(self, rows: Rows, count: int) -> Bool[Tensor, "R"]:
        """Tell whether each row's newest tokens, so many, complete a text that ends it."""
        rows_of_tokens = zip(rows.index.tolist(), self.transcript.newest(count).tolist(), strict=True)
        sampled = rows.sampled.tolist()
        for row, (number, tokens) in enumerate(rows_of_tokens):
            is_complete = self.prompts[number].is_complete
            if is_complete is None or number in self._ends:
                continue
            for place, token in enumerate(tokens, start=sampled[row] - count + 1):
                if is_complete(token):
                    self._ends[number] = place
                    break
        return torch.tensor([number in self._ends for number in rows.index.tolist()], device=rows.alive.device)

    def _hand_over(self, rows: Rows) -> None:
        """Hand over the completions of rows that have ended, and keep what later prompts may begin with."""
        ended = (~rows.alive).nonzero()[:, 0]
        rows_of_numbers = dict(sorted(zip(rows.index[ended].tolist(), ended.tolist(), strict=True)))
        if not rows_of_numbers:
            return
        numbers, starts = [*rows_of_numbers], (rows.width - rows.position[:, 0]).tolist()
        with torch.inference_mode(False):  # gradients are computed with them
            completions = self.transcript.completions(numbers, self.sampling.stop_ids, self._ends)
        for (number, row), completion in zip(rows_of_numbers.items(), completions, strict=True):
            session = self.prompts[number].session
            if session is not None and is_in_place(rows.cache):
                ids = [*self.prompts[number].ids, *completion.token_ids.tolist()[:-1]]  # the last one is not read
                own = completion.experts
                experts = None if own is None else torch.cat([own.prefix, own.row])
                if (past := past_of(rows.cache, row, starts[row], ids, experts)) is not None:
                    self.kept.put(session, past)
            self.put(number, completion)

    def _sample(self, rows: Rows) -> Int[Tensor, "R"]:
        """Draw a token a row and write it down."""
        if rows.uniform.shape[1] == 0:
            keys = [self.prompts[number].key for number in rows.index.tolist()]
            count = min(_DRAW_AHEAD, int(self.limits[rows.index].max()))
            rows.uniform = uniform_numbers(keys, rows.sampled.tolist(), count).to(rows.index.device)
        drawn = sample_tokens(rows.logits, self.sampling, rows.uniform[:, 0], bias=self.bias, seen=rows.seen)
        self.transcript.add(rows.index, *drawn, rows.experts)
        token, *_ = drawn
        if rows.seen is not None:
            rows.seen.scatter_(1, token[:, None], True)
        rows.uniform = rows.uniform[:, 1:]
        rows.sampled += 1
        rows.alive &= ~torch.isin(token, self.stop_ids)
        return token

    def _prefill(self, groups: Sequence[range]) -> Rows:
        """Read prompts: what is not kept of them, those that lack about as much side by side."""
        parts = defaultdict[int, list[tuple[range, Past | None]]](list)
        for group in groups:
            prompts = [self.prompts[number] for number in group]
            pasts = [self.kept.take(own.session, own.ids) for own in prompts if own.session is not None]
            past = max((past for past in pasts if past is not None), key=lambda own: len(own.ids), default=None)
            parts[0 if past is None else (len(prompts[0].ids) - len(past.ids)).bit_length()].append((group, past))
        first, *others = [self._prefill_part(part) for part in parts.values()]
        for rows in others:
            first = first.join(rows)
        return first

    def _prefill_part(self, part: Sequence[tuple[range, Past | None]]) -> Rows:
        """Read the prompt of each group once, then repeat its cache for the group."""
        prompts = [self.prompts[group[0]].ids for group, _ in part]
        rows, experts = self._read(prompts, [past for _, past in part if past is not None])
        if experts is not None:
            for (group, past), row, prompt in zip(part, experts, prompts, strict=True):
                before = () if past is None or past.experts is None else (past.experts,)
                with torch.inference_mode(False):
                    num_read = len(prompt) - sum(map(len, before))
                    prefix = torch.cat([*before, row[len(row) - num_read :].cpu()])[:-1].clone()
                self.transcript.prefixes.update(dict.fromkeys(group, prefix))
        sizes = torch.tensor([len(group) for group, _ in part], device=rows.index.device)
        repeat = rows.index.repeat_interleave(sizes)
        if len(repeat) > len(part):  # else it would copy the cache as it is
            rows.keep(repeat)
        rows.index = torch.tensor([number for group, _ in part for number in group], device=rows.index.device)
        rows.logits, rows.experts = rows.logits[repeat], None if rows.experts is None else rows.experts[repeat]
        return rows

    def _read_again(self, rows: Rows) -> None:
        """Compute anew what is known of prompts and completions so far: with the present weights."""
        self._must_read_again = False
        sequences = self._sequences(rows)
        size = max(1, _MOST_TOKENS // rows.width) if is_in_place(rows.cache) else len(sequences)
        rows.cache, read = None, None  # the memory is needed for the new one
        for start in range(0, len(sequences), size):
            self.check()
            new, _ = self._read(sequences[start : start + size])
            read = new if read is None else read.join(new)
        assert read is not None
        rows.cache, rows.width, rows.is_padded = read.cache, read.width, read.is_padded
        rows.logits, rows.experts = read.logits, read.experts

    def _sequences(self, rows: Rows) -> list[list[int]]:
        """Return each row's prompt and completion so far."""
        tokens_by_row = zip(rows.index.tolist(), self.transcript.tokens_of(rows.index), strict=True)
        return [[*self.prompts[number].ids, *tokens] for number, tokens in tokens_by_row]

    def _read(
        self, sequences: Sequence[Sequence[int]], pasts: Sequence[Past] = ()
    ) -> tuple[Rows, Integer[Tensor, "P n L K"] | None]:
        """Return rows of a pass over the sequences, padded on the left, and the experts of the tokens that are read.

        Behind pasts, as many of the last tokens are read of each as one of them needs, some of them once more.
        """
        policy, device = self.policy, self.policy.device
        lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)[:, None]
        width = num_read = max(map(len, sequences))
        is_padded = min(map(len, sequences)) < width
        column = torch.arange(width, device=device) - (width - lengths)
        cache, config, most = None, policy.model.config, width + int(self.limits.max())
        if pasts:
            num_read = max(len(ids) - len(past.ids) for ids, past in zip(sequences, pasts, strict=True))
            own = [past.first(max(len(ids) - num_read, 0)) for ids, past in zip(sequences, pasts, strict=True)]
            cache = cache_of_pasts(config, own, most=most, room=num_read)
        elif self.means < Means.NO_PADDING:
            cache = in_place_cache(config, most=most)
        elif self.means is Means.NO_PADDING:
            cache = DynamicCache(config=config)  # not in place, so that no others join
        ids = [[0] * (num_read - len(sequence)) + [*sequence[-num_read:]] for sequence in sequences]
        read, mask = torch.tensor(ids, device=device), column >= 0 if is_padded else None
        with traced(self.routing) as trace:
            if cache is None:
                hidden = policy.trunk(input_ids=read, use_cache=False).last_hidden_state
            else:
                position = column[:, width - num_read :].clamp(min=0)
                hidden = read_tokens(policy.trunk, read, mask, position, cache)
        experts = None if trace is None else trace.experts.unflatten(0, (len(sequences), num_read))
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
            seen=None if self.sampling.repetition_penalty == 1 else self._seen(sequences),
        )
        return rows, experts

    def _seen(self, prompts: Sequence[Sequence[int]]) -> Bool[Tensor, "P V"]:
        """A mask that is True at the tokens of each prompt."""
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
