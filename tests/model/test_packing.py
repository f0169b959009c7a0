"""Packing: nothing lost or mixed up, a shared prompt once, and budgets counted in the tokens that are read."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from gspo.model import packing
from gspo.model.packing import Pack, TokenSequence, micro_batches, pack

CPU = torch.device("cpu")
HIDDEN = 16


def sequence(prompt: tuple[int, ...], length: int, first: int = 50) -> TokenSequence:
    return TokenSequence(prompt_ids=prompt, response_ids=torch.arange(first, first + length))


def random_groups(seed: int, longest: int = 30) -> list[TokenSequence]:
    """Groups of one to six responses; prompts and responses of one token among them; prompts that begin alike."""
    rng = random.Random(seed)
    found = []
    for number in range(8):
        prompt = tuple(range(100 + 100 * (number % 3), 100 + 100 * (number % 3) + rng.choice((1, 2, 9, 25))))
        group = [sequence(prompt, rng.choice((1, rng.randint(1, longest)))) for _ in range(rng.randint(1, 6))]
        found += group
    return found


def packed_tokens(sequences: list[TokenSequence], hidden_size: int | None = None) -> int:
    return len(pack(sequences, device=CPU, hidden_size=hidden_size).ids)


def contexts(layout: Pack) -> dict[int, list[tuple[int, int]]]:
    """What every token of the pack may attend to, itself last: (id, position), as its block says."""
    tokens = list(zip(layout.ids.tolist(), layout.positions.tolist(), strict=True))
    found: dict[int, list[tuple[int, int]]] = {}
    for block in layout.blocks:
        prefix = tokens[block.start : block.start + block.prefix]
        found |= {block.start + i: prefix[: i + 1] for i in range(block.prefix)}
        start = block.rows.start
        for length in block.lengths:
            row = tokens[start : start + length]
            found |= {start + i: prefix + row[: i + 1] for i in range(length)}
            start += length
        assert start == block.rows.stop
    return found


@pytest.mark.parametrize("decided", ["always", "never", "as it pays"])
@pytest.mark.parametrize("seed", range(6))
def test_every_response_token_is_predicted_from_all_that_stands_before_it(
    seed: int, decided: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(sequences: Sequence[TokenSequence], members: Sequence[int], hidden_size: int | None) -> bool:
        return len(sequences[members[0]].prompt_ids) > 1

    if decided != "as it pays":
        monkeypatch.setattr(packing, "_shares", always if decided == "always" else lambda *_: False)
    sequences = random_groups(seed)
    layout = pack(sequences, device=CPU, hidden_size=HIDDEN)
    seen = contexts(layout)
    assert sorted(seen) == list(range(len(layout.ids)))  # the blocks cover the pack
    predictors = iter(layout.predictors.tolist())
    for one in sequences:
        whole = [*one.prompt_ids, *one.response_ids.tolist()]
        for t in range(len(one.prompt_ids), len(whole)):
            assert seen[next(predictors)] == list(zip(whole[:t], range(t), strict=True))
    assert next(predictors, None) is None


@pytest.mark.parametrize("seed", range(3))
def test_padded_rows_are_the_rows_with_padding_on_the_right(seed: int) -> None:
    layout = pack(random_groups(seed), device=CPU, hidden_size=HIDDEN)
    for block in layout.blocks:
        padded = block.pad(layout.ids[block.rows] + 1)
        assert padded.shape == (len(block.lengths), block.width) and block.width == max(block.lengths)
        place = torch.arange(padded.numel()) if block.place is None else block.place
        assert torch.equal(padded.flatten()[place], layout.ids[block.rows] + 1)
        assert torch.equal(block.unpad(padded), layout.ids[block.rows] + 1)
        assert int((padded == 0).sum()) == padded.numel() - sum(block.lengths)


def test_long_rows_of_a_block_are_padded_little() -> None:
    rng = random.Random(0)
    sequences = [sequence((n,), rng.randint(1, 900)) for n in range(60)]
    layout = pack(sequences, device=CPU, hidden_size=HIDDEN)
    for block in layout.blocks:
        assert block.width <= 64 or min(block.lengths) >= 0.7 * block.width
    padded = sum(len(block.lengths) * block.width for block in layout.blocks)
    assert padded < 1.2 * len(layout.ids)


def test_a_groups_prompt_is_laid_out_once() -> None:
    prompt = tuple(range(100, 140))
    group = [sequence(prompt, n) for n in (9, 1, 5)]
    assert packed_tokens(group, HIDDEN) == 39 + 9 + 1 + 5
    assert packed_tokens(group, None) == 3 * 39 + 9 + 1 + 5  # a model that cannot share
    assert packed_tokens(group[:1], HIDDEN) == 39 + 9


def test_a_prompt_is_not_shared_where_responses_are_so_long_that_it_does_not_pay() -> None:
    for size in (2, 3, 16):
        for prompt_length in (2, 20, 200):
            prompt = tuple(range(100, 100 + prompt_length))
            shared = []
            for length in (1, 10, 30, 100, 300, 1000, 3000):
                group = [sequence(prompt, 1), *(sequence(prompt, length) for _ in range(size - 1))]
                apart = sum(one.num_tokens - 1 for one in group)
                tokens = packed_tokens(group, HIDDEN)
                assert tokens in (apart, apart - (size - 1) * (prompt_length - 1))
                shared.append(tokens < apart)
            assert shared == sorted(shared, reverse=True)  # up to some length and not beyond
            assert shared[0] and not shared[-1]


def test_only_the_same_prompt_is_shared() -> None:
    prompts = ((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3))  # the last but one token in common, or all but one
    group = [sequence(prompt, 2) for prompt in prompts]
    assert packed_tokens(group, HIDDEN) == packed_tokens(group, None)
    assert packed_tokens([sequence((1,), 3), sequence((1,), 4)], HIDDEN) == 3 + 4  # nothing to share in one token


@pytest.mark.parametrize("hidden_size", [None, 4096])
@pytest.mark.parametrize("max_tokens", [1, 20, 40, 60, 200, 10**6])
@pytest.mark.parametrize("seed", range(4))
def test_micro_batches_hold_every_sequence_once_in_order_within_the_budget(
    seed: int, max_tokens: int, hidden_size: int | None
) -> None:
    sequences = random_groups(seed, longest=60)
    batches = micro_batches(sequences, max_tokens, hidden_size=hidden_size)
    assert [index for batch in batches for index in batch] == list(range(len(sequences)))
    for batch in batches:
        assert len(batch) == 1 or packed_tokens([sequences[i] for i in batch], hidden_size) <= max_tokens


def test_a_part_of_a_group_that_does_not_share_by_itself_is_within_the_budget_too() -> None:
    prompt = tuple(range(100, 126))
    group = [sequence(prompt, n) for n in (20, 60, 60, 20, 20, 20)]
    assert packed_tokens(group, HIDDEN) < packed_tokens(group)  # the whole group shares
    assert packed_tokens(group[:2], HIDDEN) == packed_tokens(group[:2])  # two of them do not
    for max_tokens in range(40, 200):
        for batch in micro_batches(group, max_tokens, hidden_size=HIDDEN):
            assert len(batch) == 1 or packed_tokens([group[i] for i in batch], HIDDEN) <= max_tokens


@pytest.mark.parametrize("max_tokens", [20, 60, 200])
@pytest.mark.parametrize("seed", range(3))
def test_a_micro_batch_ends_only_where_the_next_sequence_has_no_room(seed: int, max_tokens: int) -> None:
    sequences = random_groups(seed)
    batches = micro_batches(sequences, max_tokens)
    for batch, following in pairwise(batches):
        assert sum(sequences[i].num_tokens for i in (*batch, following[0])) > max_tokens


def test_a_shared_prompt_counts_once_in_the_budget() -> None:
    prompt = tuple(range(100, 150))
    group = [sequence(prompt, 10) for _ in range(12)]
    assert [len(batch) for batch in micro_batches(group, 100, hidden_size=HIDDEN)] == [5, 5, 2]
    assert [len(batch) for batch in micro_batches(group, 100)] == [1] * 12


def test_micro_batches_of_equal_lengths_fill_the_budget() -> None:
    sequences = [sequence((n,), 9) for n in range(25)]
    assert [len(batch) for batch in micro_batches(sequences, 100)] == [10, 10, 5]


def test_micro_batches_of_nothing_are_none() -> None:
    assert micro_batches([], 100) == []


def test_padding_counts_for_nothing() -> None:
    lengths = [9] * 50 + [99]  # beside a sequence of 100 tokens the short ones would be nine tenths padding
    sequences = [sequence((n,), length) for n, length in enumerate(lengths)]
    assert micro_batches(sequences, 600) == [list(range(51))]
    assert packed_tokens(sequences, HIDDEN) == 600 - 51
