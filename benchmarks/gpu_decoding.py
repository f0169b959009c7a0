"""What decoding would gain on a GPU: `generate` with a cache that grows, a static one, one compiled, and CUDA graphs.

    python -m benchmarks.gpu_decoding            # half a billion parameters in bfloat16; some minutes, for compiling
    python -m benchmarks.gpu_decoding --quick    # a toy on whatever there is, without compiling

gspo's own decoder has none of them yet: a line of `benchmarks.gpu_speed` is what they are to be compared with.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import CompileConfig

from benchmarks.gpu_speed import HALF_BILLION, TOY, policy_of
from benchmarks.machine import synchronize

LEVERS: dict[str, dict[str, Any]] = {
    "cache that grows": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "static cache, compiled": {"cache_implementation": "static", "compile_config": CompileConfig(mode="default")},
    "static cache, compiled, CUDA graphs": {"cache_implementation": "static", "compile_config": CompileConfig()},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tokens a second with each lever, as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    rows, prompt, new = (4, 8, 8) if options.quick else (64, 256, 128)
    policy = policy_of(TOY if options.quick else HALF_BILLION)
    ids = torch.ones(rows, prompt, dtype=torch.long, device=policy.device)
    shared = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "pad_token_id": 0}
    for name, lever in LEVERS.items():
        if options.quick and "compiled" in name:
            continue
        generate = partial(policy.model.generate, ids, max_new_tokens=new, **shared, **lever)
        seconds = [_timed(policy.device, generate) for _ in range(3)]  # the first has the compiling
        text = f"{rows * new / min(seconds[1:]):,.0f} tokens/s, {1e3 * min(seconds[1:]) / new:.1f} ms a token"
        print(f"{name}: {text}; the first time {seconds[0]:.1f} s", flush=True)


def _timed(device: torch.device, call: Any) -> float:
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
