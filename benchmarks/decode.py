"""Decoding speed: the embedded engine against transformers' `generate`, alternating in one run.

    python benchmarks/decode.py            # the table of docs/benchmarks/performance.md, about 3 minutes
    python benchmarks/decode.py --quick    # a small run that only shows that it works
    python benchmarks/decode.py --models "SmolLM2, 135M" --repeats 3    # after `make smollm2`

All sides sample from the same models at temperature 1. The engine returns the log-likelihood of every token, which
training needs; `generate` gives none by itself, so it is timed a second time with its logits kept and the
log-likelihoods taken from them.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.model.load import fit_tokenizer, load_tokenizer
from gspo.model.policy import Policy, load_policy
from gspo.recipe.sections import ModelConfig, RolloutConfig
from gspo.rollout.keys import SamplingKey
from gspo.rollout.sampler import Sampler
from gspo.types import Query

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
SMOLLM2 = Path(__file__).parents[1] / "models" / "smollm2-135m"  # after `make smollm2`
MODELS: dict[str, Mapping[str, Any] | Path] = {
    "Qwen3, 1.0M": {"model_type": "qwen3", "num_hidden_layers": 4, **SHAPE},
    "Qwen3-MoE, 1.3M": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 24,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        **SHAPE,
    },
    "SmolLM2, 135M": SMOLLM2,
}
WORDS = "State the final answer to the following arithmetic problem "
VOCABULARY = [WORDS, "0123456789", "a b c d e f g h i j k l m n o p q r s t u v w x y z ."]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is sampled: `num_prompts` groups of 8."""

    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    ends: bool  # one token of the vocabulary ends a response: lengths differ


WORKLOADS = [
    Workload(num_prompts=1, prompt_tokens=24, new_tokens=64, ends=False),
    Workload(num_prompts=1, prompt_tokens=200, new_tokens=64, ends=False),
    Workload(num_prompts=8, prompt_tokens=24, new_tokens=64, ends=False),
    Workload(num_prompts=8, prompt_tokens=24, new_tokens=64, ends=True),
    Workload(num_prompts=8, prompt_tokens=200, new_tokens=64, ends=True),
    Workload(num_prompts=8, prompt_tokens=24, new_tokens=256, ends=True),
]


def main() -> None:
    """Print a row for each workload: seconds of all sides, and the ratios pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:2])
    options = parser.parse_args()
    repeats = 2 if options.quick else options.repeats
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s); median (min–max) of {repeats} rounds\n")
    print("| model | prompts × group | prompt | new tokens | gspo, s | generate / gspo | generate with log π / gspo |")
    print("|---|---|---|---|---|---|---|")
    for name in options.models:
        policy = policy_of(MODELS[name])
        # A real model has no one token that ends 1 of 48 responses at each place.
        works = [work for work in WORKLOADS if not (work.ends and MODELS[name] is SMOLLM2)]
        for work in works[:1] if options.quick else works:
            ours, plain, scored = _rounds(policy, work, repeats)
            tokens = f"{work.new_tokens}{', ending 1 in 48' if work.ends else ', all of them'}"
            cells = [name, f"{work.num_prompts} × 8", str(work.prompt_tokens), tokens, spread(ours)]
            cells += [spread([b / a for a, b in zip(ours, side, strict=True)]) for side in (plain, scored)]
            print("| " + " | ".join(cells) + " |", flush=True)


def policy_of(model: Mapping[str, Any] | Path) -> Policy:
    """The model of a directory; or a new one of that shape, with the tokenizer of a few words."""
    if isinstance(model, Path):
        return load_policy(ModelConfig(path=str(model), device="cpu"), load_tokenizer(str(model)), seed=0)
    return load_policy(ModelConfig(architecture=dict(model), tokenizer="fit"), fit_tokenizer(VOCABULARY), seed=0)


def as_published(policy: Policy) -> Policy:
    """A copy whose layers compute as transformers has them: what a user of `generate` gets."""
    model = copy.deepcopy(policy.model)
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).pop("forward", None)
    return replace(policy, model=model)


def _rounds(policy: Policy, work: Workload, repeats: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of the engine, of `generate`, and of `generate` with log-likelihoods, in turn."""
    stop = 5 if work.ends else None
    policy = replace(policy, stop_ids=(-1 if stop is None else stop,))
    policy.model.generation_config.eos_token_id = stop
    published = as_published(policy)
    words = policy.tokenizer(WORDS).input_ids
    text = words * (work.prompt_tokens + work.num_prompts)
    prompts = [text[number : number + work.prompt_tokens] for number in range(work.num_prompts)]
    settings = RolloutConfig(max_new_tokens=work.new_tokens, group_size=8)
    queries = [
        Query(id=str(number), prompt="", text="", prompt_ids=tuple(prompt), columns={})
        for number, prompt in enumerate(prompts)
    ]
    batch, sampler = torch.tensor(prompts).repeat_interleave(8, dim=0), Sampler(EmbeddedEngine(policy), policy)

    def engine(seed: int) -> None:
        sampler.sample(queries, settings, SamplingKey(seed=seed, step=1))

    def plain(seed: int) -> None:
        generate(published, batch, work, stop, seed)

    def scored(seed: int) -> None:
        output = generate(published, batch, work, stop, seed, return_dict_in_generate=True, output_logits=True)
        log_probabilities = torch.stack(output.logits, dim=1).log_softmax(-1)
        log_probabilities.gather(-1, output.sequences[:, batch.shape[1] :, None])[..., 0].tolist()

    sides = (engine, plain, scored)
    for side in sides:
        side(0)
    rounds = [[seconds_of(side, seed) for side in sides] for seed in range(1, repeats + 1)]
    first, second, third = ([seconds[number] for seconds in rounds] for number in range(3))
    return first, second, third


def generate(policy: Policy, batch: torch.Tensor, work: Workload, stop: int | None, seed: int, **options: Any) -> Any:
    """The tokens of transformers, for prompts that are repeated once for each response."""
    torch.manual_seed(seed)
    return policy.model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=work.new_tokens,
        eos_token_id=stop,
        pad_token_id=0,
        **options,
    )


def seconds_of(side: Callable[[int], object], seed: int) -> float:
    """What a side takes."""
    started = time.perf_counter()
    side(seed)
    return time.perf_counter() - started


def spread(values: Sequence[float]) -> str:
    """Median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


if __name__ == "__main__":
    main()
