"""What both sides work on: a model directory, prompts and a reward, made once and read by both."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MINI_BATCHES = 4
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4  # the paper's, §5.1
LEARNING_RATE = 1e-6
RANK, ALPHA = 16, 32  # of adapters
_NUM_ROWS = 256
_SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=?."
_ROOT = Path(__file__).parents[2]
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # of the model's template
_CHAT = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{{prompt}}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One row of the table; `vocabulary` also says how soon responses end, for the model is untrained."""

    name: str
    goal: float  # seconds of gspo per optimiser step / TRL's, at most
    memory_goal: float | None = None
    prompt_tokens: tuple[int, int] = (8, 14)
    group_size: int = 8
    sequences: int = 64  # a rollout
    max_new_tokens: int = 64
    vocabulary: int = 48
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int | None = None  # default: hidden / heads
    feed_forward: int = 4  # times hidden
    gpu: bool = False  # in bf16, and only where there is one
    half_equal: bool = False  # every second query gives all its responses the same reward
    may_end: bool = True
    model: str | None = None  # a directory of the tree, in place of an untrained model
    data: str | None = None  # its prompts
    lora: bool = False  # an adapter of rank 16 beside all linear layers, and nothing else, is trained
    turns: int = 9  # of each side, after one that is not counted


WORKLOADS = {
    work.name: work
    for work in [
        Workload(name="short", goal=0.60),
        Workload(name="ragged", goal=0.35, max_new_tokens=256, vocabulary=100),
        Workload(name="long prompt", goal=0.25, prompt_tokens=(512, 512), group_size=16),
        Workload(name="half equal", goal=0.45, half_equal=True),
        Workload(
            name="vocabulary",
            goal=0.70,
            memory_goal=0.5,
            sequences=32,
            max_new_tokens=256,  # 2,048 response tokens a mini-batch
            vocabulary=151_936,
            hidden=256,
            may_end=False,
            turns=2,
        ),
        Workload(
            name="smollm2",  # after `make smollm2`
            goal=0.28,
            memory_goal=0.65,
            model="models/smollm2-135m",
            data="recipes/smollm2_sums.jsonl",
            max_new_tokens=32,
            turns=4,
        ),
        Workload(
            name="smollm2 with LoRA",
            goal=0.60,
            model="models/smollm2-135m",
            data="recipes/smollm2_sums.jsonl",
            max_new_tokens=32,
            lora=True,
            turns=4,
        ),
        Workload(
            name="half a billion",
            goal=0.33,
            prompt_tokens=(256, 256),
            max_new_tokens=256,
            turns=2,
            vocabulary=151_936,
            hidden=1024,
            layers=28,
            heads=16,
            head_dim=128,
            feed_forward=3,
            gpu=True,
            may_end=False,
        ),
    ]
}


def equal_or_even(prompts: Sequence[str], completions: Sequence[str], equal: Sequence[bool], **_: Any) -> list[float]:
    """The reward of both sides: the share of characters with an even code point; 0.5 for rows that say so."""
    return [
        0.5 if same else sum(ord(character) % 2 == 0 for character in completion) / max(len(completion), 1)
        for completion, same in zip(completions, equal, strict=True)
    ]


def rows(work: Workload) -> list[dict[str, Any]]:
    """Random prompts, a token a character; a real model's are questions in its chat format."""
    if work.data is not None:
        lines = (_ROOT / work.data).read_text(encoding="utf-8").splitlines()[:_NUM_ROWS]
        return [{"prompt": _CHAT.format(**json.loads(line)), "equal": False} for line in lines]
    rng = random.Random(0)
    return [
        {
            "prompt": "".join(rng.choice(_LETTERS) for _ in range(rng.randint(*work.prompt_tokens))),
            "equal": work.half_equal and number % 2 == 0,
        }
        for number in range(_NUM_ROWS)
    ]


def write_model(work: Workload, directory: Path) -> None:
    """A real model, or an untrained Qwen3 with a token a character, as a directory that both sides load."""
    if work.model is not None:
        directory.symlink_to(_ROOT / work.model)
        return
    import torch
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    more = work.vocabulary - len(_SPECIAL) - len(_LETTERS)
    tokens = [*_SPECIAL, *_LETTERS, *(chr(0x10000 + number) for number in range(more))]
    inner = Tokenizer(WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    inner.pre_tokenizer = Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=work.vocabulary,
            hidden_size=work.hidden,
            intermediate_size=work.feed_forward * work.hidden,
            num_hidden_layers=work.layers,
            num_attention_heads=work.heads,
            num_key_value_heads=work.heads // 2,
            head_dim=work.head_dim or work.hidden // work.heads,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    )
    model.save_pretrained(directory)
