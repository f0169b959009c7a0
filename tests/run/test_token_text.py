"""The characters of each token: they add up to the text, whatever the tokenizer makes of spaces and bytes."""

import random
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from gspo.run.recorder import TokenText

TEXT = "Größe: 3 € 😀 and a\nline, 😀😀 end"


def decoder(names: Sequence[str], made_by: decoders.Decoder) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({name: place for place, name in enumerate(dict.fromkeys([*names, "<end>"]))}))
    backend.decoder = made_by
    backend.add_special_tokens(["<end>"])
    return backend


def lengths(backend: Tokenizer, names: Sequence[str]) -> tuple[str, list[int] | None]:
    vocabulary = backend.get_vocab()
    ids = [vocabulary[name] for name in names]
    text = str(backend.decode(ids, skip_special_tokens=True))
    return text, TokenText(lambda some: str(backend.decode(list(some), skip_special_tokens=True))).lengths(ids, text)


def byte_letters() -> dict[int, str]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}


@pytest.mark.parametrize("seed", range(20))
def test_bytes_cut_anywhere_belong_to_the_token_that_makes_a_character_whole(seed: int) -> None:
    rng, data, letters = random.Random(seed), TEXT.encode(), byte_letters()
    cuts = sorted(rng.sample(range(1, len(data)), rng.randint(1, len(data) - 1)))
    pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    names = ["".join(letters[byte] for byte in piece) for piece in pieces]
    text, found = lengths(decoder(names, decoders.ByteLevel()), [*names, "<end>"])
    ends = {len(TEXT[:size].encode()): size for size in range(len(TEXT) + 1)}
    whole = [max(ends[at] for at in ends if at <= end) for end in [*cuts, len(data)]]
    assert text == TEXT
    assert found == [after - before for before, after in zip([0, *whole], whole, strict=False)] + [0]


def test_a_tokenizer_that_leaves_out_the_first_space_has_its_tokens_in_place() -> None:
    text, found = lengths(decoder(["▁the", "▁c", "at"], decoders.Metaspace()), ["<end>", "▁the", "▁c", "at", "▁the"])
    assert (text, found) == ("the cat the", [0, 3, 2, 2, 4])


def test_a_text_that_is_not_its_tokens_one_after_another_has_no_lengths() -> None:
    names = ["a", "b"]
    assert TokenText(lambda ids: "".join(names[number] for number in ids)).lengths([0, 1], "ba") is None
    assert TokenText(lambda ids: "".join(names[number] for number in ids)).lengths([0, 1], "a") is None
    assert TokenText(lambda ids: "".join(names[number] for number in ids)).lengths([0, 1], "ab") == [1, 1]


def test_a_response_without_text_has_tokens_of_no_characters() -> None:
    assert lengths(decoder(["a"], decoders.Fuse()), ["<end>"]) == ("", [0])
