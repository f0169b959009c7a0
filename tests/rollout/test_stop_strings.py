"""A response ends with the token in which a stop string is complete, however tokens and characters lie."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sampling import generate
from tokenizers import Tokenizer, decoders, models

from gspo.model.policy import Policy
from gspo.recipe.sections import RolloutConfig
from gspo.rollout.segments import Continuation
from gspo.rollout.single_turn import StopStrings, WatchedResponse

NewPolicy = Callable[..., Policy]
E_ACUTE, FACE = "\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{GRINNING FACE}"


def byte_level() -> Any:
    """Pieces of bytes, some of them parts of characters."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + place) for place, byte in enumerate(hidden)}
    whole = [*f"ab. \n{E_ACUTE}{FACE}", "a.", ".a", " b", "\n\n", f"a{E_ACUTE}", "b\n"]
    pieces = [word.encode() for word in whole] + [bytes([byte]) for byte in (E_ACUTE + FACE).encode()]
    pieces.append(FACE.encode()[:2])
    return tokenizer(["".join(letters[byte] for byte in piece) for piece in pieces], decoders.ByteLevel())


def sentence_pieces() -> Any:
    """Words with their blank, characters, and single bytes."""
    names = ["\N{LOWER ONE EIGHTH BLOCK}a", "\N{LOWER ONE EIGHTH BLOCK}", "\N{LOWER ONE EIGHTH BLOCK}b.", *"ab.\n"]
    names += [f"<0x{byte:02X}>" for byte in (E_ACUTE + FACE).encode()]
    steps = [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    return tokenizer(names, decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)]))


def tokenizer(names: Sequence[str], decoder: Any) -> Any:
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys([*names, "<end>"]))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<end>"])
    return SimpleNamespace(decode=partial(backend.decode, skip_special_tokens=False), size=len(vocabulary))


@pytest.mark.parametrize("made", [byte_level, sentence_pieces])
@pytest.mark.parametrize(
    "strings", [("a",), ("\n",), (".a", E_ACUTE), (f"b{FACE}", "a b"), ("a ", "\n\n"), (". a. a. a",)], ids=repr
)
def test_the_end_is_at_the_first_token_after_which_the_text_has_a_string(made: Any, strings: tuple[str, ...]) -> None:
    own, rng = made(), random.Random(3)
    prompts = [[rng.randrange(own.size) for _ in range(rng.choice((1, 5, 40)))] for _ in range(150)]
    stops, found = StopStrings(own, strings), set[int]()
    for prompt in prompts:
        tokens = [rng.randrange(own.size) for _ in range(60)]
        texts = map(Continuation(own, prompt), (tokens[:end] for end in range(1, 61)))
        ends = [end for end, text in enumerate(texts, start=1) if any(string in text for string in strings)]
        watched = WatchedResponse(stops, prompt)
        assert any(map(watched, tokens)) == watched.is_complete == bool(ends)
        assert watched.tokens == (tokens[: ends[0]] if ends else tokens)
        found.update(ends[:1])
    assert len(found) > 3 or strings == (". a. a. a",)


def test_few_tokens_are_decoded_and_never_a_long_text_time_and_again() -> None:
    own, sizes = byte_level(), []

    def decode(ids: Sequence[int], **options: Any) -> str:
        sizes.append(len(ids))
        return str(own.decode(ids, **options))

    stops = StopStrings(SimpleNamespace(decode=decode), ("\n\nb",))
    assert not any(map(WatchedResponse(stops, [0]), [0, 1] * 2000))  # "a" and "b", which a string can end in
    assert len(sizes) < 2100 and sum(sizes) < 60_000
    sizes.clear()
    assert not any(map(WatchedResponse(stops, [0]), [0] * 4000))
    assert sizes == []  # what "a" decodes to is kept


@pytest.mark.parametrize("look_every", [1, 5])
def test_a_response_is_the_one_without_stop_strings_up_to_the_end_of_the_first(
    look_every: int, new_policy: NewPolicy, refilling: Any
) -> None:
    joined = refilling("fast", look_every)
    policy, strings = replace(new_policy("qwen3"), stop_ids=(5,)), ("3", " sat", "<think>\n")
    prompts, sampling = [[4, 5, 6], [7], [9, 8], [6, 6]] * 2, RolloutConfig(max_new_tokens=20, max_rows=6)
    free = generate(policy, prompts, sampling, group_size=3, seed=0)
    stopped = generate(policy, prompts, sampling.model_copy(update={"stop_strings": strings}), group_size=3, seed=0)
    lengths = set()
    for before, after in zip(chain(*free), chain(*stopped), strict=True):
        ids, end = before.token_ids.tolist(), after.num_tokens
        texts = [policy.tokenizer.decode(ids[:n]) for n in range(1, len(ids) + 1)]
        has_string = [any(string in text for string in strings) for text in texts]
        assert end == (has_string.index(True) + 1 if True in has_string else len(ids))
        assert after.token_ids.tolist() == ids[:end] and after.text == texts[end - 1]
        assert after.finish_reason == ("stop" if True in has_string else before.finish_reason)
        assert after.sampler_logprobs.tolist() == pytest.approx(before.sampler_logprobs[:end].tolist(), abs=1e-5)
        lengths.add(end)
    assert joined and len(lengths) > 3
