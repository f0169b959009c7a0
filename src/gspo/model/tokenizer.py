"""The tokenizer: loaded and checked, or a small one fitted to a run's own texts."""

from collections.abc import Iterable, Sequence
from typing import Any

from gspo.errors import UserError
from gspo.model.architecture import load_config, unloadable
from gspo.recipe.sections import KlConfig, ModelConfig

# Digits stand alone, so that arithmetic can be learned; a word or a mark includes the blanks beside it.
_PIECES = r"\d| ?</?[a-z]+>| ?[^\W\d_]+ ?| ?[^\w\s] ?|."


def make_tokenizer(recipe: ModelConfig, texts: Iterable[str]) -> Any:
    """The recipe's tokenizer; `texts` are read only if it is to be fitted."""
    if recipe.tokenizer == "fit":
        if recipe.path is not None:
            raise UserError("model.tokenizer: fit is for a new model (model.architecture); model.path brings its own")
        return fit_tokenizer(texts)
    return load_tokenizer(recipe.tokenizer or str(recipe.path), trust_remote_code=recipe.trust_remote_code)


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a directory or hub id; UserError where there is none that yields tokens."""
    from transformers import AutoTokenizer

    fix = "copy the tokenizer's files beside the weights, or name another place with model.tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise unloadable(path, error, part="tokenizer", fix=fix) from None
    if not tokenizer("The answer is 42.", add_special_tokens=False).input_ids:
        # Where tokenizer.json is missing, transformers builds an empty tokenizer without a word.
        problem = "the tokenizer maps text to no tokens: its files (tokenizer.json, …) are missing"
        raise UserError(problem, where=path, fix=fix)
    return tokenizer


def check_vocabulary(tokenizer: Any, num_embeddings: int, *, where: str) -> None:
    """UserError where the tokenizer has ids that the model has no embedding for."""
    if len(tokenizer) > num_embeddings:
        problem = f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only {num_embeddings}"
        raise UserError(problem, where=where, fix="use the tokenizer that belongs to the model (model.tokenizer)")


def check_reference(kl: KlConfig, tokenizer: Any, *, trust_remote_code: bool = False) -> None:
    """UserError where the KL term's reference model is absent or has another tokenizer; loads no weights."""
    if not kl.coefficient or kl.reference is None:
        return
    where = f"actor.kl.reference: {kl.reference}"
    try:
        config = load_config(ModelConfig(path=kl.reference, trust_remote_code=trust_remote_code))
        vocabulary = load_tokenizer(kl.reference, trust_remote_code=trust_remote_code).get_vocab()
    except UserError as error:
        fix = error.fix or "name a directory with a model and its tokenizer, or a hub id"
        raise UserError(error.what, where=where, fix=fix) from None
    if vocabulary != tokenizer.get_vocab() or config.get_text_config().vocab_size < len(tokenizer):
        fix = "name a model with the policy's own tokenizer, such as the one that the run started from"
        raise UserError("its tokens are not the policy's", where=where, fix=fix)


def fit_tokenizer(texts: Iterable[str]) -> Any:
    """A word-level tokenizer with one token for each digit, word, mark and tag that occurs in the texts."""
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
    ids = [tokenizer(token, add_special_tokens=False).input_ids for token in stop_tokens]
    for token, own in zip(stop_tokens, ids, strict=True):
        if len(own) != 1 or own[0] == tokenizer.unk_token_id:
            raise UserError(f"{token!r} is not a single token of this tokenizer", where="rollout.stop_tokens")
    return tuple(own[0] for own in ids)
