"""Decoding speed: the embedded engine against transformers' `generate`, alternating in one run.

    python benchmarks/decode.py            # the table of docs/performance.md
    python benchmarks/decode.py --quick    # a small run that only shows that it works

Both sides sample the same number of tokens from the same models at temperature 1. The engine also returns the
log-likelihood of every token, which `generate` does not.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gspo.config import Model, Rollout
from gspo.policy.model import Policy, load_policy
from gspo.policy.tokenizer import fit_tokenizer
from gspo.rollout.embedded import generate

SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
MODELS = {
    "Qwen3, 1.0M": {"model_type": "qwen3", "num_hidden_layers": 4, **SHAPE},
    "Qwen3-MoE, 1.3M": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "num_experts": 24,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        **SHAPE,
    },
}
PROMPT = "State the final answer to the following arithmetic problem: 0 - 4 + 8 - 7 ="


def main() -> None:
    """Print a row for each workload: seconds of both sides and their ratio, pair by pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads; median (min–max) of {options.repeats} pairs\n")
    print("| model | prompts × group | new tokens | lengths | gspo s | generate s | generate / gspo |")
    print("|---|---|---|---|---|---|---|")
    for name, architecture in MODELS.items():
        policy = _policy(architecture)
        for num_prompts, new_tokens, ragged in [(1, 64, False), (8, 64, False), (8, 256, True)]:
            if options.quick and (num_prompts, new_tokens) != (1, 64):
                continue
            repeats = 2 if options.quick else options.repeats
            ours, theirs = _pair(policy, num_prompts, 8 if options.quick else new_tokens, ragged, repeats)
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            lengths = "1 end token in 48" if ragged else "all full"
            cells = [name, f"{num_prompts} × 8", str(new_tokens), lengths, _spread(ours), _spread(theirs), _spread(ratios)]
            print("| " + " | ".join(cells) + " |", flush=True)


def _policy(architecture: dict[str, Any]) -> Policy:
    tokenizer = fit_tokenizer([PROMPT, "0123456789 abcdefghijklmnopqrstuvwxyz".replace("", " ")])
    policy = load_policy(Model(architecture=architecture, tokenizer="fit"), tokenizer, seed=0)
    return replace(policy, stop_ids=(-1,))  # no token ends a response


def _pair(policy: Policy, num_prompts: int, new_tokens: int, ragged: bool, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of both sides, alternating; where ragged, token 5 ends a response on both."""
    stop = 5 if ragged else None
    policy = replace(policy, stop_ids=(stop,)) if stop is not None else policy
    ids = policy.tokenizer(PROMPT).input_ids
    sampling = Rollout(max_new_tokens=new_tokens)
    batch = torch.tensor([ids] * num_prompts * 8)

    def engine(seed: int) -> None:
        generate(policy, [ids] * num_prompts, sampling, group_size=8, seed=seed)

    def reference(seed: int) -> None:
        torch.manual_seed(seed)
        policy.model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=stop,
            min_new_tokens=None if ragged else new_tokens,
            pad_token_id=0,
        )

    policy.model.generation_config.eos_token_id = stop
    seconds: tuple[list[float], list[float]] = ([], [])
    for side in (engine, reference):
        side(0)
    for seed in range(1, repeats + 1):
        for side, found in zip((engine, reference), seconds, strict=True):
            found.append(_seconds(side, seed))
    return seconds


def _seconds(side: Callable[[int], None], seed: int) -> float:
    started = time.perf_counter()
    side(seed)
    return time.perf_counter() - started


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


if __name__ == "__main__":
    main()
