"""A directory with a small chat model, such as a reader of the documents would have a real one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.recipe.load import load_recipe

TINY = Path(__file__).with_name("tiny.yaml")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_small_model(
    path: Path, *, special: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE, **changes: Any
) -> None:
    """An untrained chat model that reads any text, with `special` tokens; `changes` are keys of the architecture."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", chat_template=chat_template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special]})
    shape = {**(load_recipe(TINY).model.architecture or {}), "max_position_embeddings": 2048, **changes}
    config = AutoConfig.for_model(**{**shape, "vocab_size": len(tokenizer), "eos_token_id": 0, "bos_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
