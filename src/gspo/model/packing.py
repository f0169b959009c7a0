"""Packing: the sequences of a forward pass lie end to end without padding, and a group's prompt is there only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int, Integer, Num
from torch import Tensor

from gspo.types import Experts

_SHORT = 64  # rows up to this length share a block: another block would cost more than padding
_MIN_FILL = 0.75  # a longer row's block takes only rows of at least this part of its length


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """A response whose tokens are to be scored, and the prompt before it; both have at least one token.

    Example: TokenSequence(prompt_ids=(5, 7), response_ids=tensor([3, 9, 1]))
    """

    prompt_ids: tuple[int, ...]
    response_ids: Int[Tensor, "T"]
    experts: Experts | None = None  # to be replayed in place of the routers' choice
    loss_mask: Bool[Tensor, "T"] | None = None  # the W response tokens that are scored; None: all of them
    starts: tuple[int, ...] = ()  # where in the response contexts of their own begin, as in Sample

    @property
    def parts(self) -> list["TokenSequence"]:
        """The sequences that a model reads: this one, or one for each context."""
        if not self.starts:
            return [self]
        bounds = sorted({0, *self.starts, len(self.response_ids)})
        return [self._part(start, after) for start, after in pairwise(bounds)]

    def _part(self, start: int, after: int) -> "TokenSequence":
        assert self.loss_mask is not None  # no token of a context is scored
        ids, mask, size = self.response_ids[start:after], self.loss_mask[start:after], 0
        if start in self.starts:
            size, shared = int(mask.int().argmax()), len(self.prompt_ids)
            if shared <= size and (*ids[:shared].tolist(),) == self.prompt_ids:
                size = shared  # which a pack has only once
        prompt_ids, experts = (*ids[:size].tolist(),) or self.prompt_ids, self.experts
        if experts is not None:
            row = experts.row[start:after]
            experts = Experts(prefix=row[1:size] if size else experts.prefix, row=row[size:])
        return TokenSequence(prompt_ids=prompt_ids, response_ids=ids[size:], experts=experts, loss_mask=mask[size:])

    @property
    def scored_ids(self) -> Int[Tensor, "W"]:
        """The response tokens that are scored; the others are context."""
        return self.response_ids if self.loss_mask is None else self.response_ids[self.loss_mask]

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


EMPTY = TokenSequence(prompt_ids=(0,), response_ids=torch.tensor([0]))  # of a pass that only keeps step with others'


@dataclass(frozen=True, kw_only=True)
class Block:
    """R rows, each of which attends to itself and to a prefix that all share. In the pack the rows follow the prefix.

    Example: a prompt of 9 tokens, whose last is not shared, with responses of 3 and 5 tokens: prefix 8, lengths (3, 5).
    """

    start: int  # the first token of the block in the pack
    prefix: int  # tokens of the shared prefix; 0: the rows are whole sequences
    lengths: tuple[int, ...]  # tokens of each row
    width: int  # tokens of the longest row
    place: Int[Tensor, "M"] | None  # the index of each token among R x width padded ones; None: no row is padded

    @property
    def rows(self) -> slice:
        """The places of the rows' tokens in the pack."""
        return slice(self.start + self.prefix, self.start + self.prefix + sum(self.lengths))

    def pad(self, values: Num[Tensor, "M *rest"]) -> Num[Tensor, "R T *rest"]:
        """Values of the rows' tokens as rows of equal length, padded with 0 on the right."""
        if self.place is not None:
            empty = values.new_zeros(len(self.lengths) * self.width, *values.shape[1:])
            values = empty.index_copy(0, self.place, values)
        return values.unflatten(0, (len(self.lengths), self.width))

    def unpad(self, values: Num[Tensor, "R T *rest"]) -> Num[Tensor, "M *rest"]:
        """The values of the rows' tokens, without those of the padding."""
        return values.flatten(0, 1) if self.place is None else take(values.flatten(0, 1), self.place)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """N tokens of a forward pass, block after block.

    Example: of a prompt (5, 7) with the response (3, 9, 1): ids = [5, 7, 3, 9], positions = [0, 1, 2, 3],
    predictors = [1, 2, 3], rows = (slice(1, 4),), prefixes = (slice(0, 1),), parts = ((0,),).
    """

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]  # the position of each token in its sequence
    blocks: tuple[Block, ...]
    predictors: Int[Tensor, "M"]  # the tokens whose hidden state predicts a scored token, sequence after sequence
    rows: tuple[slice, ...]  # of each part, the tokens before each of its response's tokens
    prefixes: tuple[slice, ...]  # of each part, the prompt without its last token; several may share it
    parts: tuple[tuple[int, ...], ...]  # of each sequence
    experts: Integer[Tensor, "N L K"] | None  # the experts that are replayed


def pack(sequences: Sequence[TokenSequence], *, device: torch.device, hidden_size: int | None) -> Pack:
    """Lay sequences end to end. Neighbours with one prompt share it where that saves work, and a hidden size is given.

    The last token of a response is left out: it predicts nothing that is scored.
    """
    sequences, parts = _parts(sequences)
    lengths = [sequence.num_tokens - 1 for sequence in sequences]
    starts = [0, *accumulate(lengths)]  # of each sequence, in the order of `sequences`
    blocks, order, end = list[Block](), list[Tensor](), 0
    rows, prefixes = [slice(0)] * len(sequences), [slice(0)] * len(sequences)
    for members in _blocks(sequences, hidden_size):
        shares = _shares(sequences, members, hidden_size)
        prefix = len(sequences[members[0]].prompt_ids) - 1 if shares else 0
        blocks.append(_block(end, prefix, [lengths[index] - prefix for index in members], device))
        order.append(torch.arange(prefix) + starts[members[0]])
        shared, end = end, end + prefix
        for index in members:
            order.append(torch.arange(starts[index] + prefix, starts[index + 1]))
            first = shared if prefix else end
            prefixes[index] = slice(first, first + len(sequences[index].prompt_ids) - 1)
            end += lengths[index] - prefix
            rows[index] = slice(end - len(sequences[index].response_ids), end)

    index_of_token = torch.cat(order)

    def laid_out(values: list[Tensor]) -> Tensor:
        return torch.cat(values)[index_of_token].to(device, non_blocking=True)

    predictors = [torch.arange(row.start, row.stop) for row in rows]
    scored = [row if s.loss_mask is None else row[s.loss_mask] for row, s in zip(predictors, sequences, strict=True)]
    experts = [torch.cat([s.experts.prefix, s.experts.row]) for s in sequences if s.experts is not None]
    return Pack(
        ids=laid_out([torch.cat([torch.tensor(s.prompt_ids), s.response_ids[:-1]]) for s in sequences]),
        positions=laid_out([torch.arange(length) for length in lengths]),
        blocks=tuple(blocks),
        predictors=torch.cat([scored[index] for own in parts for index in own]).to(device, non_blocking=True),
        rows=tuple(rows),
        prefixes=tuple(prefixes),
        parts=parts,
        experts=laid_out(experts) if experts else None,
    )


def micro_batches(
    sequences: Sequence[TokenSequence], max_tokens: int, *, hidden_size: int | None = None
) -> list[list[int]]:
    """Divide sequences, in their order, such that each micro-batch has at most `max_tokens` packed tokens.

    Returns the indices of each micro-batch. A sequence is never split: if it is longer than the budget, it is alone.
    """
    batches: list[list[int]] = []
    used = 0
    for members in _groups(sequences):
        shares = _shares(sequences, members, hidden_size)
        for index in members:
            prompt_is_there = shares and index != members[0]
            cost = len(sequences[index].response_ids) if prompt_is_there else sequences[index].num_tokens
            if batches and used + cost <= max_tokens:
                batches[-1].append(index)
                used += cost
            else:
                batches.append([index])
                used = sequences[index].num_tokens
    return batches


def _parts(sequences: Sequence[TokenSequence]) -> tuple[list[TokenSequence], tuple[tuple[int, ...], ...]]:
    """The parts of sequences, first the first of each, so that neighbours stay such; and the indices of each one's."""
    split, indices = [sequence.parts for sequence in sequences], list[tuple[int, ...]]()
    parts = [own[0] for own in split]
    for number, (_, *others) in enumerate(split):
        indices.append((number, *range(len(parts), len(parts) + len(others))))
        parts += others
    return parts, tuple(indices)


def join_experts(parts: Sequence[Experts], *, is_own: bool) -> Experts:
    """The experts of a sequence's parts, as Sample has them; `is_own`: the first has a context of its own, too.

    A context stands in the row as a whole, behind a blank: no token is before its first.
    """
    first, *others = parts
    if is_own:
        first, others = Experts(prefix=first.prefix[:0], row=first.row[:0]), [*parts]
    rows = [row for each in others for row in (torch.zeros_like(each.row[:1]), each.prefix, each.row)]
    return Experts(prefix=first.prefix, row=torch.cat([first.row, *rows]) if rows else first.row)


def _groups(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """The indices of neighbouring sequences with the same prompt."""
    return [list(run) for _, run in groupby(range(len(sequences)), key=lambda index: sequences[index].prompt_ids)]


def _shares(sequences: Sequence[TokenSequence], members: Sequence[int], hidden_size: int | None) -> bool:
    """Tell whether a group's prompt is read once, which saves the prompt's work and costs the causal half of attention.

    The work of a token is about 24·hidden² FLOPs in a layer's matrices and 4·hidden for each token attended to. It is
    compared for two members: then any part of a group that shares also shares, wherever a micro-batch cuts it.
    """
    first = sequences[members[0]].prompt_ids
    prefix = len(first) - 1
    if hidden_size is None or len(members) < 2 or any(sequences[index].prompt_ids != first for index in members):
        return False
    longest = max(len(sequences[index].response_ids) for index in members)
    return prefix * (24 * hidden_size + 2 * prefix) > 4 * longest**2


def _blocks(sequences: Sequence[TokenSequence], hidden_size: int | None) -> list[list[int]]:
    """The members of each block: first the groups that share their prompt, then the other sequences by length."""
    groups = _groups(sequences)
    blocks = [members for members in groups if _shares(sequences, members, hidden_size)]
    alone = [index for members in groups if members not in blocks for index in members]
    longest = 0
    short = 0 if hidden_size is None else _SHORT  # a model without packs reads the padding, too
    for index in sorted(alone, key=lambda index: -sequences[index].num_tokens):
        length = sequences[index].num_tokens
        if not longest or (longest > short and length < _MIN_FILL * longest):
            blocks.append([])
            longest = length
        blocks[-1].append(index)
    return blocks


def _block(start: int, prefix: int, lengths: list[int], device: torch.device) -> Block:
    width, place = max(lengths), None
    if min(lengths) < width:
        real = torch.arange(width) < torch.tensor(lengths)[:, None]
        place = real.flatten().nonzero()[:, 0].to(device, non_blocking=True)
    return Block(start=start, prefix=prefix, lengths=tuple(lengths), width=width, place=place)


def take(rows: Num[Tensor, "n *rest"], index: Int[Tensor, "m"]) -> Num[Tensor, "m *rest"]:
    """`rows[index]` for an index without repetitions: the gradient is a copy, not an addition row by row."""
    selected: Tensor = _Take.apply(rows, index)
    return selected


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_rows, *gradient.shape[1:]).index_copy_(0, index, gradient), None
