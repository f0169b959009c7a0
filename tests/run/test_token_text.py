"""The characters of each token: they add up to the text, whatever the tokenizer makes of spaces and bytes."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gspo.rollout.segments import text_and_segments
from gspo.run.recorder import token_characters

TEXT = "Größe: 3 € 😀 and a\nline, 😀😀 end"


def decoder(names: Sequence[str], made_by: decoders.Decoder) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({name: place for place, name in enumerate(dict.fromkeys([*names, "<end>"]))}))
    backend.decoder = made_by
    backend.add_special_tokens(["<end>"])
    return backend


def lengths(backend: Tokenizer, names: Sequence[str]) -> tuple[str, list[int] | None]:
    vocabulary = backend.get_vocab()
    ids = [vocabulary[name] for name in names]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    policy = SimpleNamespace(tokenizer=tokenizer, stop_ids=(vocabulary["<end>"],))
    text, _ = text_and_segments(ids, [vocabulary["<end>"]], policy, None)
    return text, characters(tokenizer, vocabulary["<end>"], ids, text)


def characters(tokenizer: Any, before: int, ids: Sequence[int], text: str) -> list[int] | None:
    sample: Any = SimpleNamespace(query=SimpleNamespace(prompt_ids=[before]), token_ids=torch.tensor(ids), text=text)
    return token_characters(tokenizer, sample)


def byte_letters() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


@pytest.mark.parametrize("seed", range(20))
def test_bytes_cut_anywhere_belong_to_the_token_with_which_all_characters_are_whole(seed: int) -> None:
    rng, data, letters = random.Random(seed), TEXT.encode(), byte_letters()
    cuts = sorted(rng.sample(range(1, len(data)), rng.randint(1, len(data) - 1)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    names = ["".join(letters[byte] for byte in piece) for piece in pieces]
    text, found = lengths(decoder(names, decoders.ByteLevel()), [*names, "<end>"])
    ends = {len(TEXT[:size].encode()): size for size in range(len(TEXT) + 1)}
    boundaries = [max(end for end in [0, *cuts[: place + 1]] if end in ends) for place in range(len(cuts))]
    whole = [ends[end] for end in [*boundaries, len(data)]]
    assert text == TEXT
    assert found == [after - before for before, after in zip([0, *whole], whole, strict=False)] + [0]


def test_a_response_cut_off_within_a_character_ends_with_the_part_of_it() -> None:
    letters = byte_letters()
    names = ["a", "".join(letters[byte] for byte in "😀".encode()[:2]), letters["😀".encode()[2]]]
    text, found = lengths(decoder(names, decoders.ByteLevel()), names)
    assert text == "a\N{REPLACEMENT CHARACTER}" and found == [1, 0, 1]
    text, found = lengths(decoder(names, decoders.ByteLevel()), [*names, "<end>"])
    assert text == "a\N{REPLACEMENT CHARACTER}" and found == [1, 0, 1, 0]


def test_a_tokenizer_that_leaves_out_the_first_space_of_a_text_keeps_that_of_a_response() -> None:
    backend = decoder(["▁the", "▁c", "at"], decoders.Metaspace())
    assert lengths(backend, ["▁the", "▁c", "at", "▁the"]) == (" the cat the", [4, 2, 2, 4])


def test_the_token_that_ends_a_response_has_no_characters_and_one_within_it_has() -> None:
    backend = decoder(["a", "b"], decoders.Fuse())
    assert lengths(backend, ["a", "<end>", "b", "<end>"]) == ("a<end>b", [1, 5, 1, 0])
    assert lengths(backend, ["a", "<end>", "b"]) == ("a<end>b", [1, 5, 1])


def test_a_text_that_is_not_its_tokens_one_after_another_has_no_lengths() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=decoder(["a", "b"], decoders.Fuse()), eos_token="<end>")
    assert characters(tokenizer, 2, [0, 1], "ba") is None
    assert characters(tokenizer, 2, [0, 1], "") is None
    assert characters(tokenizer, 2, [0, 1], "ab") == [1, 1]
    assert characters(SimpleNamespace(), 2, [0, 1], "ab") is None  # of a tokenizer that is written in Python


def test_a_text_that_a_further_token_changes_has_no_lengths() -> None:
    backend = decoder(["a", "b"], decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "x")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert characters(tokenizer, 2, [0, 1], "x") is None


def test_a_response_without_text_has_tokens_of_no_characters() -> None:
    assert lengths(decoder(["a"], decoders.Fuse()), ["<end>"]) == ("", [0])
