"""The fitted tokenizer: its own texts come back letter by letter, one token a digit."""

from typing import Any

import pytest

from gspo.model.load import fit_tokenizer

TEXTS = [
    "What is 12 + 7?",
    "12+7=19, 19-4=15\n\n15",
    "  leading and trailing blanks  ",
    "<think>\n\tFirst, 3*4 = 12.\n</think>\nSo: 12!",
    "naïve café – „Größe“ 数学 ∑ 🙂",
    "snake_case __init__ a-b_c",
    "don't  do   that…",
    "\r\nwindows\r\n",
    "",
]


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_it_was_fitted_to_comes_back_exactly(text: str) -> None:
    tokenizer = fit_tokenizer(TEXTS)
    ids = encode(tokenizer, text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_text_comes_back_after_saving(tmp_path: Any) -> None:
    from transformers import AutoTokenizer

    fit_tokenizer(TEXTS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tokenizer.decode(encode(tokenizer, text), skip_special_tokens=True) == text


def test_every_digit_is_a_token() -> None:
    tokenizer = fit_tokenizer(["0123456789"])
    assert [tokenizer.decode([i]) for i in encode(tokenizer, "9081")] == ["9", "0", "8", "1"]


def test_what_it_never_saw_is_unknown_and_not_dropped() -> None:
    tokenizer = fit_tokenizer(["a b"])
    assert encode(tokenizer, "zebra") == [tokenizer.unk_token_id]


def test_the_order_of_the_texts_does_not_matter() -> None:
    assert fit_tokenizer(TEXTS).get_vocab() == fit_tokenizer(reversed(TEXTS)).get_vocab()


@pytest.mark.parametrize("texts", [TEXTS, [*TEXTS, "a text that says <eos> and <pad> and <unk>"]])
def test_ids_are_without_holes_so_that_the_embedding_has_a_row_for_each(texts: list[str]) -> None:
    tokenizer = fit_tokenizer(texts)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
