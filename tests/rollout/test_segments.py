"""A response's text is what it adds to its prompt; segments: cut after each separator, and every token in the segment
in which the text it adds begins.
"""

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sampling import sample_groups
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gspo.recipe.sections import RolloutConfig
from gspo.rollout import segments
from gspo.rollout.segments import Continuation, segment_lengths, split_segments, text_and_segments

E_ACUTE, FACE = "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}"
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


def letters_of(piece: bytes) -> str:
    """A letter a byte, as GPT-2 and Qwen write them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    return "".join(letters[byte] for byte in piece)


def byte_level(pieces: Sequence[bytes]) -> Decode:
    """One token a piece, any bytes."""
    return _decoder([*map(letters_of, pieces)], decoders.ByteLevel())


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
    for _ in range(60):
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


# --- the text ---

WORD, TAGS = "\N{LOWER ONE EIGHTH BLOCK}", ("<think>", "</think>", "<answer>", "</answer>", "<|sep|>")
BYTES = [f"<0x{byte:02X}>" for byte in f"{E_ACUTE}{FACE}".encode()]
PIECES = [f"{WORD}a", WORD, WORD * 2, WORD * 4, f"{WORD}b.", *"ab.\n7", E_ACUTE]
LLAMA_2 = [decoders.Replace(WORD, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
WORDS = ["a", "b", ".", ",", "'s", "n't", "do", "7"]
TOKENIZERS: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "Llama 2": ([*PIECES, *BYTES], decoders.Sequence(LLAMA_2), {}),
    "Gemma": ([*PIECES, *BYTES], decoders.Sequence(LLAMA_2[:3]), {}),
    "Metaspace": (PIECES, decoders.Metaspace(), {}),
    "WordPiece": ([*WORDS, "##b", "##ing"], decoders.WordPiece(), {"clean_up_tokenization_spaces": True}),
    "words, not cleaned up": (WORDS, decoders.WordPiece(cleanup=False), {"clean_up_tokenization_spaces": False}),
    "word ends": (["a</w>", "a", "b</w>", ".</w>", "7"], decoders.BPEDecoder(), {}),
    "bytes": (
        [letters_of(piece.encode()) for piece in ["a", " a", "  ", " ", "\n", "7", FACE, f" {E_ACUTE}", "."]]
        + [letters_of(bytes([byte])) for byte in f"{E_ACUTE}{FACE}".encode()],
        decoders.ByteLevel(),
        {},
    ),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """One of a kind, with tags as special tokens, and an end of turn that is flagged as none."""
    names, decoder, options = TOKENIZERS[request.param]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoder
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", **options)
    made.add_special_tokens({"additional_special_tokens": [*TAGS]})
    made.add_tokens(["<|im_end|>"])
    return made


def policy_of(tokenizer: Any, *ends: str) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, stop_ids=tuple(tokenizer.convert_tokens_to_ids([*ends])))


def test_the_text_is_what_the_response_adds_to_the_whole_prompt(tokenizer: Any) -> None:
    rng, policy, num_kept = random.Random(5), policy_of(tokenizer, "<end>", "<|im_end|>"), 0
    for _ in range(600):
        prompt, ids = (
            [rng.randrange(len(tokenizer)) for _ in range(rng.choice(of))] for of in ((1, 3, 70), (1, 2, 30))
        )
        body = ids[:-1] if ids[-1] in policy.stop_ids else ids
        before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *body])
        if whole.startswith(before):  # else the response changes how its prompt is written
            assert before + text_and_segments(ids, prompt, policy, None)[0] == whole, (prompt, ids)
            num_kept += 1
    assert num_kept > 550


@pytest.mark.parametrize("num_prompt", [1, 6, 40])
def test_a_character_that_begins_in_the_prompt_is_the_responses_and_a_long_run_of_bytes_is_one(num_prompt: int) -> None:
    names, decoder, _ = TOKENIZERS["Gemma"]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="a"))
    backend.decoder = decoder
    policy = policy_of(PreTrainedTokenizerFast(tokenizer_object=backend))
    face = policy.tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in FACE.encode()])
    accent = policy.tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in E_ACUTE.encode()])
    ids = [names.index("a"), *face * num_prompt, *accent]  # no power of two begins with a character
    assert text_and_segments([*face, names.index("b")], ids, policy, None)[0] == f"{FACE}b"
    decode = byte_level([b"a", *(bytes([byte]) for byte in FACE.encode()), b"b"])
    assert Continuation(SimpleNamespace(decode=decode), [0, 1, 2])([3, 4, 5]) == f"{FACE}b"


@pytest.mark.parametrize(
    ("names", "ends", "text"),
    [
        (
            ["<think>", "7", "</think>", "<answer>", "7", "</answer>", "<end>"],
            ["<end>"],
            "<think>7</think><answer>7</answer>",
        ),
        (["7", "<|sep|>", "7", "<|im_end|>"], ["<|im_end|>"], "7<|sep|>7"),  # an end that is not flagged as special
        (["7", "<end>", "7", "<|im_end|>"], ["<|im_end|>"], "7<end>7"),  # the tokenizer's end is none of this run's
        (["7", "<pad>", "<pad>", "<end>"], ["<end>"], "7<pad><pad>"),
        (["7", "</answer>"], ["<end>"], "7</answer>"),  # cut off
        (["7", "</answer>"], ["<end>", "</answer>"], "7"),
        (["7", "<|sep|>", "7"], ["<end>", "7"], "7<|sep|>7"),  # a stop token of ordinary text is text
        (["<end>"], ["<end>"], ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("separator", ["</think>", "<|sep|>", "7"])
def test_of_all_that_a_model_writes_only_what_ends_it_is_left_out_and_segments_agree(
    names: list[str], ends: list[str], text: str, separator: str, tokenizer: Any
) -> None:
    ids, prompt = tokenizer.convert_tokens_to_ids(names), [len(TAGS)]
    policy = policy_of(tokenizer, *ends)
    found, sizes = text_and_segments(ids, prompt, policy, separator)
    assert found.replace(" ", "") == text
    assert sum(sizes) == len(ids) and len(sizes) == len(split_segments(found, separator))
    decode, place, is_out = Continuation(tokenizer, prompt), 0, ids[-1] in policy.stop_ids and ends[-1] != "7"
    for segment, size in zip(split_segments(found, separator), sizes, strict=True):
        place += size
        assert decode(ids[: min(place, len(ids) - is_out)]).endswith(segment)
