"""Whether a reference model of its own can be compared with the policy, token by token."""

from typing import Any

from gspo.errors import UserError
from gspo.model.architecture import load_config
from gspo.model.tokenizer import load_tokenizer
from gspo.recipe.objective import KlConfig
from gspo.recipe.schema import ModelConfig

_WHERE = "actor.kl.reference"


def check_reference(kl: KlConfig, tokenizer: Any, *, trust_remote_code: bool = False) -> None:
    """UserError where the named model is not there, or reads other tokens than the policy writes; loads no weights."""
    if not kl.coefficient or kl.reference is None:
        return
    try:
        model = ModelConfig(path=kl.reference, trust_remote_code=trust_remote_code)
        num_embeddings = load_config(model).get_text_config().vocab_size
        own = load_tokenizer(kl.reference, trust_remote_code=trust_remote_code).get_vocab()
    except UserError as error:
        fix = error.fix or "name a directory with a model and its tokenizer, or a hub id"
        raise UserError(error.what, where=f"{_WHERE}: {kl.reference}", fix=fix) from None
    if own != tokenizer.get_vocab() or num_embeddings < len(tokenizer):
        fix = "name a model with the policy's own tokenizer, such as the one it was begun from"
        raise UserError("its tokens are not the policy's", where=f"{_WHERE}: {kl.reference}", fix=fix)
