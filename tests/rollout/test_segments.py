"""Segments: cut after each separator, and every token in the segment in which the text it adds begins."""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
from tests.sampling import sample_groups
from tokenizers import Tokenizer, decoders, models

from gspo.recipe.sections import RolloutConfig
from gspo.rollout import segments
from gspo.rollout.segments import segment_lengths, split_segments

Decode = Callable[[Sequence[int]], str]
ALPHABET = "ab |\n\N{LATIN SMALL LETTER E WITH ACUTE}\N{GRINNING FACE}\N{EURO SIGN}"


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        ("a|b|c", ["a|", "b|", "c"]),
        ("a|b|", ["a|", "b|"]),
        ("||a", ["|", "|", "a"]),
        ("|", ["|"]),
        ("abc", ["abc"]),
        ("", [""]),
    ],
)
def test_a_turn_ends_with_its_separator_and_the_last_is_never_empty_but_where_all_is(
    text: str, segments: list[str]
) -> None:
    assert split_segments(text, "|") == segments


@pytest.mark.parametrize(
    ("pieces", "lengths"),
    [
        (["a", "|", "b", ""], (2, 2)),  # the end token, which adds nothing, goes with what was there
        (["a", "|", ""], (3,)),  # and makes no segment of its own
        (["a", "|", "", "b"], (3, 1)),
        (["", "a|", "b"], (2, 1)),
        (["a|b", "c", ""], (1, 2)),  # a token across the border is of the segment it begins in
        (["a|b", "", "c"], (2, 1)),  # so what follows it without text is of that segment too
        (["a|b|c", "d"], (1, 0, 1)),  # a segment within a token has none of its own
        (["a|b", "|", "c"], (1, 1, 1)),
        (["a||", "c"], (1, 0, 1)),
        (["a|b"], (1, 0)),
        (["a", "b", ""], (3,)),
        ([""], (1,)),
    ],
)
def test_a_token_is_of_the_turn_in_which_its_first_character_lies(pieces: list[str], lengths: tuple[int, ...]) -> None:
    assert segment_lengths(range(len(pieces)), lambda ids: "".join(pieces[number] for number in ids), "|") == lengths


def byte_level(pieces: Sequence[bytes]) -> Decode:
    """One token a piece, any bytes, as GPT-2 and Qwen write them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return _decoder(["".join(letters[byte] for byte in piece) for piece in pieces], decoders.ByteLevel())


def byte_fallback(pieces: Sequence[bytes]) -> Decode:
    """Whole characters, or single bytes written as Llama 2 and Gemma do."""
    names = [f"<0x{piece[0]:02X}>" if len(piece) == 1 else piece.decode() for piece in pieces]
    return _decoder(names, decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))


def _decoder(names: Sequence[str], decoder: Any) -> Decode:
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys([*names, "<end>"]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<end>"])
    ids = [vocabulary[name or "<end>"] for name in names]
    return lambda places: str(backend.decode([ids[place] for place in places], skip_special_tokens=True))


def cut_anywhere(text: str, rng: random.Random) -> list[bytes]:
    """Its bytes in pieces that heed no character, with special tokens (no bytes) between."""
    data = text.encode()
    places = sorted(rng.sample(range(1, len(data)), rng.randint(0, len(data) - 1))) if len(data) > 1 else []
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for one in pieces for piece in ([b"", one] if rng.random() < 0.2 else [one])] + [b""]


def cut_into_characters(text: str, rng: random.Random) -> list[bytes]:
    """Characters, some of them byte by byte."""
    whole = [character.encode() for character in text]
    cut = [[one] if len(one) > 1 and rng.random() < 0.3 else [one[i : i + 1] for i in range(len(one))] for one in whole]
    return [piece for pieces in cut for piece in pieces] + [b""]


def plainly(pieces: Sequence[bytes], separator: str) -> list[int]:
    """The same, token by token, from where in the text's bytes the characters begin."""
    data = b"".join(pieces)
    segments = split_segments(data.decode(), separator)
    turn_of = [number for number, segment in enumerate(segments) for _ in segment.encode()]
    counts, segment = [0] * len(segments), 0
    for piece, end in zip(pieces, accumulate(map(len, pieces)), strict=True):
        begun = [place for place in range(end - len(piece), end) if data[place] & 0xC0 != 0x80]
        segment = turn_of[begun[0]] if begun else segment
        counts[segment] += 1
    return counts


@pytest.mark.parametrize("separator", ["|", "\n", "| ", "\N{GRINNING FACE}", "a\N{LATIN SMALL LETTER E WITH ACUTE}"])
@pytest.mark.parametrize("stretch", [2, 64])
@pytest.mark.parametrize(("cut", "decoder"), [(cut_anywhere, byte_level), (cut_into_characters, byte_fallback)])
def test_halving_finds_what_going_through_the_bytes_finds(
    cut: Any, decoder: Any, separator: str, stretch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "STRETCH", stretch)
    rng, numbers = random.Random(7), set()
    for _ in range(200):
        text = "".join(rng.choice([*ALPHABET, separator]) for _ in range(rng.randint(1, 24)))
        pieces = cut(text, rng)
        decode = decoder(pieces)
        assert decode(range(len(pieces))) == text
        counts = segment_lengths(range(len(pieces)), decode, separator)
        assert list(counts) == plainly(pieces, separator), (text, pieces)
        numbers.add(len(counts))
    assert len(numbers) > 3


def test_a_response_cut_off_within_a_character_has_all_its_tokens_in_some_segment() -> None:
    pieces = [b"a", b"|", b"\xf0\x9f", b"\x98"]
    assert segment_lengths(range(4), byte_level(pieces), "|") == (2, 2)


@pytest.mark.parametrize(
    ("pieces", "lengths"),
    [([" a", " b", "|", " c", " |", " |", " d", ""], (3, 2, 1, 2)), ([" a", " b", "", "", " |", " c"], (5, 1))],
)
def test_a_tokenizer_that_drops_the_blank_before_a_text_is_understood(
    pieces: list[str], lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "STRETCH", 2)

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces[number] for number in ids).removeprefix(" ")

    assert segment_lengths(range(len(pieces)), decode, "|") == lengths


def test_a_long_response_is_decoded_a_few_times_and_not_once_a_token() -> None:
    pieces = (["word "] * 199 + ["|"]) * 5
    calls = []

    def decode(ids: Sequence[int]) -> str:
        calls.append(len(ids))
        return "".join(pieces[number] for number in ids)

    assert segment_lengths(range(1000), decode, "|") == (200,) * 5
    assert sum(calls) < 5000


def test_sampled_responses_know_their_turns_where_the_recipe_has_a_separator(new_policy: Any, query_of: Any) -> None:
    policy, queries = new_policy(), [query_of([3, 4]), query_of([5])]

    def sampled(**settings: Any) -> list[Any]:
        sampling = RolloutConfig(max_new_tokens=24, **settings)
        groups = sample_groups(policy, queries, sampling, group_size=8, seed=0, policy_version=0)
        return [sample for group in groups for sample in group.samples]

    assert [rollout.segments for rollout in sampled()] == [()] * 16
    rollouts = sampled(segment_separator="3")
    assert max(len(rollout.segments) for rollout in rollouts) > 1
    for rollout in rollouts:
        assert sum(rollout.segments) == rollout.num_tokens
        rest, end = rollout.token_ids.tolist(), policy.tokenizer.eos_token
        for segment, size in zip(split_segments(rollout.text, "3"), rollout.segments, strict=True):
            assert policy.tokenizer.decode(rest[:size]).removesuffix(end) == segment
            rest = rest[size:]
