"""Packing: the sequences of a forward pass laid end to end without padding, a group's prompt only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gspo.types import Experts

_SHORT = 64  # rows up to this length share a block whatever their lengths: another block would cost more than padding
_MIN_FILL = 0.75  # a longer row's block takes only rows of at least this part of its length


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """A response whose tokens are to be scored, and the prompt before it; both have at least one token."""

    prompt_ids: tuple[int, ...]
    response_ids: Int[Tensor, "T"]
    experts: Experts | None = None  # to be replayed in place of the routers' choice
    loss_mask: Bool[Tensor, "T"] | None = None  # the W response tokens that are scored; None: all of them

    @property
    def scored_ids(self) -> Int[Tensor, "W"]:
        """The response tokens that are scored; the others are context."""
        return self.response_ids if self.loss_mask is None else self.response_ids[self.loss_mask]

    @property
    def num_scored(self) -> int:
        """W."""
        return len(self.scored_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, kw_only=True)
class Block:
    """R rows that attend each to itself and to a prefix they share; in the pack first the prefix, then the rows."""

    start: int  # its first token in the pack
    prefix: int  # tokens of the shared prefix; 0: the rows are whole sequences
    lengths: tuple[int, ...]  # tokens of each row
    width: int  # of the longest
    place: Int[Tensor, "M"] | None  # where the rows' tokens stand in R x width padded ones; None: no row is padded

    @property
    def rows(self) -> slice:
        """The rows' tokens in the pack."""
        return slice(self.start + self.prefix, self.start + self.prefix + sum(self.lengths))


@dataclass(frozen=True, kw_only=True)
class Pack:
    """N tokens of a forward pass, block after block."""

    ids: Int[Tensor, "N"]
    positions: Int[Tensor, "N"]  # of each token in its own sequence
    blocks: tuple[Block, ...]
    predictors: Int[Tensor, "M"]  # the tokens whose hidden state predicts a scored token, sequence after sequence
    rows: tuple[slice, ...]  # of each sequence: the tokens before each of its response's
    prefixes: tuple[slice, ...]  # of each sequence: its prompt's tokens but the last, which several may share
    experts: Integer[Tensor, "N L K"] | None  # to be replayed

    def padded_rows(self, block: Block, pad_id: int) -> Int[Tensor, "R T"]:
        """The ids of a block's rows, padded on the right."""
        return pad_sequence(self.ids[block.rows].split(block.lengths), batch_first=True, padding_value=pad_id)


def pack(sequences: Sequence[TokenSequence], *, device: torch.device, hidden_size: int | None) -> Pack:
    """Lay sequences out; those side by side with one prompt share it where that saves work (no hidden size: never).

    The last token of a response predicts nothing that is scored, so it is not read.
    """
    ids, positions, blocks, experts = [], [], [], []
    predictors: dict[int, Tensor] = {}
    prefixes: dict[int, slice] = {}
    own_rows: dict[int, slice] = {}
    start = 0
    for members in _blocks(sequences, hidden_size):
        prompt = sequences[members[0]].prompt_ids
        prefix = len(prompt) - 1 if _shares(sequences, members, hidden_size) else 0
        rows = [_row(sequences[index], prefix) for index in members]
        ids += [torch.tensor(prompt[:prefix], dtype=torch.long), *rows]
        positions += [torch.arange(prefix), *(torch.arange(prefix, prefix + len(row)) for row in rows)]
        blocks.append(_block(start, prefix, [len(row) for row in rows], device))
        experts += _experts([sequences[index].experts for index in members], shared=prefix > 0)
        shared, start = start, start + prefix
        for index, row in zip(members, rows, strict=True):
            first = shared if prefix else start
            prefixes[index] = slice(first, first + len(sequences[index].prompt_ids) - 1)
            start += len(row)
            first, mask = start - len(sequences[index].response_ids), sequences[index].loss_mask
            own_rows[index] = slice(first, start)
            predictors[index] = torch.arange(first, start)[... if mask is None else mask]
    return Pack(
        ids=torch.cat(ids).to(device, non_blocking=True),
        positions=torch.cat(positions).to(device, non_blocking=True),
        blocks=tuple(blocks),
        predictors=torch.cat([predictors[index] for index in range(len(sequences))]).to(device, non_blocking=True),
        rows=tuple(own_rows[index] for index in range(len(sequences))),
        prefixes=tuple(prefixes[index] for index in range(len(sequences))),
        experts=torch.cat(experts).to(device, non_blocking=True) if experts else None,
    )


def micro_batches(
    sequences: Sequence[TokenSequence], max_tokens: int, *, hidden_size: int | None = None
) -> list[list[int]]:
    """Cut sequences, in their order, so that the packed tokens of a micro-batch stay within the budget.

    Returns the indices of each micro-batch. A sequence is never split: one longer than the budget goes alone.
    """
    batches: list[list[int]] = []
    used = 0
    for members in _groups(sequences):
        shares = _shares(sequences, members, hidden_size)
        for index in members:
            rides_along = shares and index != members[0]
            cost = len(sequences[index].response_ids) if rides_along else sequences[index].num_tokens
            if batches and used + cost <= max_tokens:
                batches[-1].append(index)
                used += cost
            else:
                batches.append([index])
                used = sequences[index].num_tokens
    return batches


def _groups(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Runs of sequences with the same prompt."""
    return [list(run) for _, run in groupby(range(len(sequences)), key=lambda index: sequences[index].prompt_ids)]


def _shares(sequences: Sequence[TokenSequence], members: Sequence[int], hidden_size: int | None) -> bool:
    """Whether a group's prompt is read once: it saves the prompt's own work and costs the causal half of attention.

    Work of a token: about 24·hidden² FLOPs in a layer's matrices, 4·hidden a token attended to. Reckoned for two
    members, so that any part of a group that shares does so too, wherever a micro-batch cuts it.
    """
    first = sequences[members[0]].prompt_ids
    prefix = len(first) - 1
    if hidden_size is None or len(members) < 2 or any(sequences[index].prompt_ids != first for index in members):
        return False
    longest = max(len(sequences[index].response_ids) for index in members)
    return prefix * (24 * hidden_size + 2 * prefix) > 4 * longest**2


def _blocks(sequences: Sequence[TokenSequence], hidden_size: int | None) -> list[list[int]]:
    """The members of each block: groups that share their prompt, then the other sequences by length."""
    groups = _groups(sequences)
    blocks = [members for members in groups if _shares(sequences, members, hidden_size)]
    alone = [index for members in groups if not _shares(sequences, members, hidden_size) for index in members]
    longest = 0
    short = 0 if hidden_size is None else _SHORT  # a model that cannot be handed a pack reads the padding, too
    for index in sorted(alone, key=lambda index: -sequences[index].num_tokens):
        length = sequences[index].num_tokens
        if not longest or (longest > short and length < _MIN_FILL * longest):
            blocks.append([])
            longest = length
        blocks[-1].append(index)
    return blocks


def _row(sequence: TokenSequence, prefix: int) -> Int[Tensor, "T"]:
    prompt = torch.tensor(sequence.prompt_ids[prefix:], dtype=torch.long)
    return torch.cat([prompt, sequence.response_ids[:-1]])


def _experts(members: Sequence[Experts | None], *, shared: bool) -> list[Integer[Tensor, "M L K"]]:
    """Those of a block's tokens in their order; none where nothing is replayed."""
    known = [experts for experts in members if experts is not None]
    if shared:
        return [part.prefix for part in known[:1]] + [part.row for part in known]
    return [part for experts in known for part in (experts.prefix, experts.row)]


def _block(start: int, prefix: int, lengths: list[int], device: torch.device) -> Block:
    width = max(lengths)
    place = None
    if min(lengths) < width:
        place = torch.cat([torch.arange(row * width, row * width + n) for row, n in enumerate(lengths)])
        place = place.to(device, non_blocking=True)
    return Block(start=start, prefix=prefix, lengths=tuple(lengths), width=width, place=place)
