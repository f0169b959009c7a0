"""The tokenizer: loaded and checked, or a small one fitted to a run's own texts."""

from collections.abc import Iterable, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.model.architecture import check_depth, own_code_refused, short

# Digits stand alone, so that arithmetic is learnable; a word or a mark takes the blanks beside it along.
_PIECES = r"\d| ?</?[a-z]+>| ?[^\W\d_]+ ?| ?[^\w\s] ?|."


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a directory or hub id; UserError where there is none that yields tokens."""
    from transformers import AutoTokenizer

    try:
        check_depth(path)  # of the model beside it, which transformers looks at
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # the tokenizers library raises Exception itself
        if "trust_remote_code" in str(error):
            raise own_code_refused(path) from None
        raise UserError(
            f"no tokenizer can be loaded: {short(error)}",
            where=path,
            fix="copy the tokenizer's files beside the weights, or name another place with model.tokenizer",
        ) from None
    if not tokenizer("The answer is 42.", add_special_tokens=False).input_ids:
        # transformers builds an empty tokenizer in silence where tokenizer.json is missing: no prompt has any token.
        raise UserError(
            "the tokenizer maps text to no tokens: its files (tokenizer.json, …) are missing",
            where=path,
            fix="copy the tokenizer's files beside the weights, or name another place with model.tokenizer",
        )
    return tokenizer


def fit_tokenizer(texts: Iterable[str]) -> Any:
    """A word-level tokenizer of every piece that occurs in the texts: one token a digit, word, mark or tag."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    split = Split(Regex(_PIECES), behavior="isolated")
    special = ["<pad>", "<eos>", "<unk>"]
    pieces = sorted({piece for text in texts for piece, _ in split.pre_tokenize_str(text)} - set(special))
    vocabulary = {token: index for index, token in enumerate([*special, *pieces])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def named_stop_ids(tokenizer: Any, stop_tokens: Sequence[str]) -> tuple[int, ...]:
    """The ids of rollout.stop_tokens; UserError for one that is not a single token of the tokenizer."""
    found = []
    for token in stop_tokens:
        ids = tokenizer(token, add_special_tokens=False).input_ids
        if len(ids) != 1:
            raise UserError(
                f"rollout.stop_tokens: {token!r} is {len(ids)} tokens of this tokenizer; a stop token must be one"
            )
        if ids[0] == tokenizer.unk_token_id:
            raise UserError(f"rollout.stop_tokens: {token!r} is not in this tokenizer's vocabulary")
        found.append(ids[0])
    return tuple(found)
