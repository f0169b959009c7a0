"""Data files of every kind, a small real tokenizer, and recipes over them."""

from collections.abc import Callable
from typing import Any

import pytest

from gspo.recipe.load import make_recipe
from gspo.recipe.schema import Recipe

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAIN_SUM = {"task": "chain_sum", "min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1, "size": 300}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def gsm8k_rows() -> list[dict[str, Any]]:
    return [
        {
            "question": "Tom packs 6 boxes of 12 pens. He gives 8 pens away. How many pens are left?",
            "answer": "He packs 6*12=<<6*12=72>>72 pens.\nThen 72-8=<<72-8=64>>64 are left.\n#### 64",
        },
        {
            "question": "A school buys 40 desks at $125 each. What does it pay?",
            "answer": "It pays 40*125=$<<40*125=5000>>5000.\n#### 5,000",
        },
        {
            "question": "The lake was at 3 degrees and cools by 5. How cold is it?",
            "answer": "It is 3-5=<<3-5=-2>>-2 degrees.\n#### -2",
        },
    ]


@pytest.fixture
def tokenizer() -> Any:
    """One token a byte, with a start token before every text."""
    return _byte_tokenizer(after="")


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def ending_tokenizer() -> Any:
    """A tokenizer that puts its end token behind every text, as some seq2seq-bred ones do."""
    return _byte_tokenizer(after=" <|end|>")


def _byte_tokenizer(*, after: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<|end|>", "<|start|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(special)
    inner.post_processor = processors.TemplateProcessing(
        single=f"<|start|> $A{after}", special_tokens=[("<|start|>", 1), ("<|end|>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>", bos_token="<|start|>")


@pytest.fixture
def recipe_of() -> Callable[..., Recipe]:
    """A recipe from sections; what is not given has its default."""

    def build(**sections: Any) -> Recipe:
        model = {"architecture": {"model_type": "qwen3"}, "tokenizer": "fit"}
        one_query = {"rollout": {"queries_per_step": 1, **sections.pop("rollout", {})}, "actor": {"mini_batches": 1}}
        return make_recipe({"name": "test", "steps": 1, "model": model, **one_query, **sections})

    return build


@pytest.fixture
def chain_sum() -> dict[str, Any]:
    return dict(CHAIN_SUM)
