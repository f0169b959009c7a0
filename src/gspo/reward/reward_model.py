"""The built-in reward `reward_model`: a sequence classifier's score of a prompt with its response."""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.errors import UserError
from gspo.reward.marks import text_of

MAX_DIFFERENCE = 1e-2  # of a score by the company it is computed in, relative to the scores' size, for bfloat16's sake


def reward_model(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    *,
    path: str,
    label: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    trust_remote_code: bool = False,
    **columns: Any,
) -> list[float]:
    """The score of a model with one label; of several, the probability of the one whose number is `label`.

    It reads prompt and response as chat messages by its own template, or as one text where it has none. UserError where
    `path` is no such model, and where the text is longer than it can read.
    """
    model, tokenizer, takes_padding = _load(path, device, trust_remote_code)
    sequences = [_ids(model, tokenizer, path, *pair) for pair in zip(prompts, completions, strict=True)]
    order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
    size = batch_size if takes_padding else 1
    parts = [order[start : start + size] for start in range(0, len(order), size)]
    logits = torch.cat([_logits(model, [sequences[place] for place in part]) for part in parts])
    num_labels = logits.shape[1]
    if (label is None) != (num_labels == 1) or not 0 <= (label or 0) < num_labels:
        fix = f"set the option label to the number of the wanted one, 0 to {num_labels - 1}"
        fix = "leave out the option label" if num_labels == 1 else fix
        raise UserError(f"the model has {num_labels} labels, and label is {label}", where=_where(path), fix=fix)
    values = logits[:, 0] if label is None else logits.softmax(-1)[:, label]
    by_place = dict(zip(order, values.tolist(), strict=True))
    return [by_place[place] for place in range(len(sequences))]


@cache
def _load(path: str, device: str, trust_remote_code: bool) -> tuple[Any, Any, bool]:
    """The model in this process, its tokenizer, and whether it is proven to score a text alike beside padding.

    UserError where it cannot be loaded or has no head for scores.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from gspo.model.inputs import quiet_transformers

    quiet_transformers()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"trust_remote_code": trust_remote_code}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            path, dtype="auto" if device != "cpu" else torch.float32, output_loading_info=True, **options
        )
    except Exception as error:  # of transformers, or of the model's own code
        what = f"no reward model can be loaded: {' '.join(str(error).split())[:300]}"
        raise UserError(what, where=_where(path), fix="name a sequence classifier's directory or hub id") from None
    if missing := sorted(report["missing_keys"]):
        what = f"it has no weights for {', '.join(missing[:3])}: it was not trained to score"
        raise UserError(what, where=_where(path), fix="name a reward model, which has a head for scores")
    model = model.to(device).eval()
    # A padding token of our choice might be one that texts end with, and the score would be read before it.
    has_padding = model.config.get_text_config().pad_token_id is not None
    return model, tokenizer, has_padding and _takes_padding(model, tokenizer)


def _takes_padding(model: Any, tokenizer: Any) -> bool:
    """Tell whether a short sequence has the same score alone and beside a longer one."""
    ids = tokenizer("A short text, and one that is longer than it is by some words.").input_ids
    short = ids[: len(ids) // 3]
    with suppress(Exception):  # of a model that takes no padding, or one sequence at a time
        alone, beside = _logits(model, [short])[0], _logits(model, [short, ids])[0]
        return bool((alone - beside).abs().max() <= MAX_DIFFERENCE * alone.abs().max().clamp(min=0.1))
    return False


@torch.inference_mode()
def _logits(model: Any, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "B labels"]:
    """The logits of each sequence, in float32 on the CPU."""
    longest, padding = max(map(len, sequences)), model.config.get_text_config().pad_token_id or 0
    ids = torch.tensor([[*sequence, *[padding] * (longest - len(sequence))] for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits.float().cpu()


def _ids(model: Any, tokenizer: Any, path: str, prompt: Any, completion: Any) -> list[int]:
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else [*completion]
        text = tokenizer.apply_chat_template([*asked, *said], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        ids = tokenizer(text_of(prompt) + text_of(completion)).input_ids
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and len(ids) > most:
        what = f"a prompt with its response has {len(ids)} tokens, and the model reads {most}"
        raise UserError(what, where=_where(path), fix="lower rollout.max_new_tokens, or name another model")
    return list(ids)


def _where(path: str) -> str:
    return f"reward function reward_model, path: {path}"
