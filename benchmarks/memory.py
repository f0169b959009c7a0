"""The memory formula of `gspo check`: a table by model size, or compared with runs on this CPU (a few minutes).

python -m benchmarks.memory
python -m benchmarks.memory --plans
python -m benchmarks.memory --measure
python -m benchmarks.memory --measure --device cuda
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gspo.recipe.load import load_recipe, make_recipe
from gspo.run.memory import Memory, memory_of, memory_of_inputs
from gspo.run.plan import plan
from gspo.run.prepare import load_inputs

GSM8K = {"queries_per_step": 64, "group_size": 8, "max_new_tokens": 1024}
PROMPT = 300  # tokens


def shape(hidden: int, inner: int, layers: int, heads: int, keys: int, **more: Any) -> dict[str, Any]:
    """A decoder of Qwen2.5's family, as its config.json has it."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"model_type": "qwen2", **sizes, "num_attention_heads": heads, "num_key_value_heads": keys, **more}


TIED = {"vocab_size": 151_936, "tie_word_embeddings": True}
UNTIED = {"vocab_size": 152_064, "tie_word_embeddings": False}
MIXTURE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS = {
    "Qwen2.5-0.5B": shape(896, 4864, 24, 14, 2, **TIED),
    "Qwen2.5-1.5B": shape(1536, 8960, 28, 12, 2, **TIED),
    "Qwen2.5-3B": shape(2048, 11_008, 36, 16, 2, **TIED),
    "Qwen2.5-7B": shape(3584, 18_944, 28, 28, 4, **UNTIED),
    "Qwen2.5-14B": shape(5120, 13_824, 48, 40, 8, **UNTIED),
    "Qwen2.5-32B": shape(5120, 27_648, 64, 40, 8, **UNTIED),
    "Qwen3-30B-A3B": shape(2048, 6144, 48, 32, 4, **(UNTIED | MIXTURE | {"vocab_size": 151_936}))
    | {"model_type": "qwen3_moe"},
}

# A vocabulary far larger than the tokenizer's: an end token is rare, so that responses are as long as they may be.
NEW = {"model_type": "qwen3", "head_dim": 64, "tie_word_embeddings": True, "vocab_size": 4000}
LARGE = {**NEW, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "num_attention_heads": 8}
LARGE |= {"num_key_value_heads": 4, "max_position_embeddings": 512}
SHORT = ["steps=1", "cold_start.steps=0", "cold_start.demonstrations=null", "evaluation.num_queries=0"]
SHORT += ["reward=benchmarks/memory.py:odd", "queries.procedural.size=64", "rollout.queries_per_step=8"]
SHORT += ["actor.mini_batches=2", "actor.gradient_noise=false", "actor.old_logprobs=recompute"]
WIDE = {**LARGE, "num_hidden_layers": 6, "vocab_size": 50_000}
RUNS: dict[str, tuple[Mapping[str, Any], list[str]]] = {  # of recipes/arithmetic.yaml: architecture, what else is other
    "51 M": (LARGE, []),
    "51 M, `actor.gradient_checkpointing`": (LARGE, ["actor.gradient_checkpointing=true"]),
    "51 M, `model.dtype: bfloat16`": (LARGE, ["model.dtype=bfloat16", "rollout.max_new_tokens=40"]),
    "51 M, `actor.surrogate: ppo`": (LARGE, ["actor.surrogate=ppo", "rollout.max_new_tokens=40"]),
    "47 M, vocabulary of 50,000": (WIDE, ["actor.kl.coefficient=0.01", "rollout.max_new_tokens=40"]),
}
SMOLLM2 = ["recipes/smollm2_sums.yaml", "steps=1", "evaluation.num_queries=0", "evaluation.suites=[]"]
AHEAD = "rollout.engine=vllm rollout.vllm.python=.venv-vllm/bin/python rollout.max_staleness=2"
PLANS = [  # of recipes/gsm8k.yaml: the model, whose config.json is enough, what else is other, and the GPUs
    ("Qwen2.5-0.5B", "model.lora={}", "1xRTX4090-24GB"),
    ("Qwen2.5-7B", "rollout.max_new_tokens=4096", "8xH100-80GB"),
    ("Qwen3-30B-A3B", f"rollout.max_new_tokens=8192 {AHEAD}", "64xH100-80GB"),
]


def odd(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """A reward that differs within each group: only then is there an update."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def table() -> str:
    """By model size, on a GPU in bfloat16; computed alone."""
    from transformers import AutoConfig

    lines = [
        "| model | parameters | always | update | with `gradient_checkpointing` | sampling |",
        "|---|" + "---:|" * 5,
    ]
    for name, architecture in MODELS.items():
        config = AutoConfig.for_model(**architecture)
        memories = [memory_by(config, actor) for actor in ({}, {"gradient_checkpointing": True})]
        (parts, recomputing), sampling = [memory["in the update"] for memory in memories], memories[0]["while sampling"]
        always = sum(parts[part] for part in ("weights", "masters", "moments"))
        stages = [always, *(sum(own.values()) for own in (parts, recomputing, sampling))]
        cells = [f"{parts['weights'] / 2e9:.1f} billion", *(f"{size / 2**30:.0f} GiB" for size in stages)]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines)


def plans() -> str:
    """What `gspo plan` says of three models."""
    parts = []
    for name, words, gpus in PLANS:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
            lines = plan(load_recipe("recipes/gsm8k.yaml", [f"model.path={directory}", *words.split()]), gpus)
            command = f"$ gspo plan recipes/gsm8k.yaml model.path=Qwen/{name} {words} --on {gpus}"
            parts.append("\n".join([command, *lines]))
    return "\n\n".join(parts)


def memory_by(config: Any, actor: Mapping[str, Any]) -> Memory:
    """Of a GSM8K run on a GPU."""
    recipe = make_recipe({"name": "m", "steps": 1, "model": {"path": "m"}, "rollout": GSM8K, "actor": actor})
    return memory_of(recipe, config, prompt_tokens=PROMPT, device=torch.device("cuda"))


def compare(device: str) -> str:
    """The formula's peak, and the process's own on a CPU or what was allocated on a GPU."""
    lines = ["| run | formula, MiB | measured, MiB | difference |", "|---|---:|---:|---:|"]
    runs = {
        name: ["recipes/arithmetic.yaml", *SHORT, f"model.architecture={json.dumps(architecture)}", *overrides]
        for name, (architecture, overrides) in RUNS.items()
    }
    if Path("models/smollm2-135m").exists():  # `make smollm2` makes it
        runs["SmolLM2, 135 M"] = SMOLLM2
        runs["SmolLM2, 135 M, `model.lora: {}`"] = [*SMOLLM2, "model.lora={}"]
    for name, words in runs.items():
        words = [*words, f"model.device={device}"]
        computed, measured = formula(words), peak(words)
        cells = [name, f"{computed / 2**20:,.0f}", f"{measured / 2**20:,.0f}", f"{computed / measured - 1:+.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def formula(words: list[str]) -> float:
    """Its peak, computed in a process of its own, as `gspo check` does it."""
    program = "import sys; from benchmarks.memory import checked; print(checked(sys.argv[1:]))"
    return float(subprocess.check_output([sys.executable, "-c", program, *words], text=True))


def checked(words: list[str]) -> float:
    """The peak that `gspo check` computes."""
    recipe = load_recipe(words[0], words[1:])
    return max(sum(parts.values()) for parts in memory_of_inputs(recipe, load_inputs(recipe)).values())


def peak(words: list[str]) -> float:
    """The most bytes that the process of a run has held, its last checkpoint included; on a GPU, of its memory."""
    program = "import resource, sys; from gspo import cli; cli.main(sys.argv[1:]); "
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", program, "train", *words, f"output_dir={Path(directory) / 'run'}"]
        said = subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL)
        if words[-1] == "model.device=cuda":
            *_, last = Path(directory, "run/metrics.jsonl").read_text().splitlines()
            return float(json.loads(last)["memory/peak_bytes"])
    return float(said.split()[-1]) * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="make the runs")
    parser.add_argument("--device", default="cpu", help="of the runs")
    parser.add_argument("--plans", action="store_true", help="show what `gspo plan` says of three models")
    options = parser.parse_args()
    print(compare(options.device) if options.measure else plans() if options.plans else table())
