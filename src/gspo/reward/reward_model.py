"""The built-in reward `reward_model`: a sequence classifier's score of a prompt with its response."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gspo.errors import UserError

MAX_DIFFERENCE = 1e-2  # of a score by the company it is computed in, relative to the scores' size, for bfloat16's sake


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """A classifier with its tokenizer.

    Example: Scorer(model=model, tokenizer=tokenizer, pads=True).scores([[5, 6], [7]]) has one row of logits each.
    """

    model: Any
    tokenizer: Any
    pads: bool  # proven to score a text alike whatever is padded beside it

    @torch.inference_mode()
    def scores(self, sequences: Sequence[Sequence[int]]) -> Float[Tensor, "B labels"]:
        """The logits of each sequence, in float32 on the CPU."""
        if not self.pads and len(sequences) > 1:
            return torch.cat([self.scores([sequence]) for sequence in sequences])
        longest = max(map(len, sequences))
        padding = self.model.config.get_text_config().pad_token_id or 0
        ids = torch.tensor([[*sequence, *[padding] * (longest - len(sequence))] for sequence in sequences])
        mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
        device = self.model.device
        return self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float().cpu()


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
    scorer = _load(path, device, trust_remote_code)
    sequences = [_ids(scorer, path, *pair) for pair in zip(prompts, completions, strict=True)]
    order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
    parts = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    logits = torch.cat([scorer.scores([sequences[place] for place in part]) for part in parts])
    num_labels = logits.shape[1]
    if (label is None) != (num_labels == 1) or not 0 <= (label or 0) < num_labels:
        fix = f"set the option label to the number of the wanted one, 0 to {num_labels - 1}"
        fix = "leave out the option label" if num_labels == 1 else fix
        raise UserError(f"the model has {num_labels} labels, and label is {label}", where=_where(path), fix=fix)
    values = logits[:, 0] if label is None else logits.softmax(-1)[:, label]
    by_place = dict(zip(order, values.tolist(), strict=True))
    return [by_place[place] for place in range(len(sequences))]


@cache
def _load(path: str, device: str, trust_remote_code: bool) -> Scorer:
    """The model in this process; UserError where it cannot be loaded or has no head for scores."""
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
    pads = has_padding and _pads(Scorer(model=model, tokenizer=tokenizer, pads=True))
    return Scorer(model=model, tokenizer=tokenizer, pads=pads)


def _pads(scorer: Scorer) -> bool:
    """Tell whether a short sequence has the same score alone and beside a longer one."""
    ids = scorer.tokenizer("A short text, and one that is longer than it is by some words.").input_ids
    short, both = ids[: len(ids) // 3], [ids[: len(ids) // 3], ids]
    with suppress(Exception):  # of a model that takes no padding, or one sequence at a time
        alone, beside = scorer.scores([short])[0], scorer.scores(both)[0]
        return bool((alone - beside).abs().max() <= MAX_DIFFERENCE * alone.abs().max().clamp(min=0.1))
    return False


def _ids(scorer: Scorer, path: str, prompt: Any, completion: Any) -> list[int]:
    tokenizer = scorer.tokenizer
    if tokenizer.chat_template:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else [*completion]
        text = tokenizer.apply_chat_template([*asked, *said], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False).input_ids
    else:
        parts = [part if isinstance(part, str) else str(part[-1]["content"]) for part in (prompt, completion)]
        ids = tokenizer("".join(parts)).input_ids
    most = getattr(scorer.model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and len(ids) > most:
        what = f"a prompt with its response has {len(ids)} tokens, and the model reads {most}"
        raise UserError(what, where=_where(path), fix="lower rollout.max_new_tokens, or name another model")
    return list(ids)


def _where(path: str) -> str:
    return f"reward function reward_model, path: {path}"
