"""The memory formula of `gspo check` against PyTorch's MemTracker, for models of any size: no number is computed.

The project's own sharding, packed passes, head and optimiser run on fake tensors, in a process group that is none. What
a rank holds is read for few layers, and a straight line goes on to all of them. Some 40 seconds a row:

python -m benchmarks.tracked_memory
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.memory import MODELS
from gspo.learner.optimizer import Optimizer
from gspo.model.head import Head, token_likelihood
from gspo.model.packing import Pack, TokenSequence, pack, take
from gspo.model.parameters import trunk_of
from gspo.model.sharding import Sharding, shard
from gspo.model.trunk import NAME, packed_pass
from gspo.recipe.load import make_recipe
from gspo.recipe.sections import OptimizerConfig
from gspo.run.memory import memory_of

PROMPT, GROUP = 64, 8  # tokens of a prompt, and responses to it, which fill a micro-batch
FEW, MORE = 6, 8  # layers that are run; with fewer the peak lies elsewhere
NUM_MICRO_BATCHES = 2  # from the second on, all gradients are there while activations are
ROWS = [  # model, ranks, tokens of a micro-batch, actor.gradient_checkpointing
    ("Qwen2.5-0.5B", 1, 16_384, False),
    ("Qwen2.5-0.5B", 1, 16_384, True),
    ("Qwen2.5-7B", 1, 8_192, True),
    ("Qwen2.5-7B", 8, 8_192, False),
    ("Qwen2.5-7B", 8, 16_384, True),
    ("Qwen3-30B-A3B", 1, 4_096, False),
    ("Qwen3-30B-A3B", 1, 16_384, True),
    ("Qwen3-30B-A3B", 8, 4_096, False),
    ("Qwen3-30B-A3B", 8, 16_384, True),
    ("Qwen3-30B-A3B", 64, 16_384, True),
]


def tracked(name: str, num_layers: int, mesh: DeviceMesh | None, num_tokens: int, recomputes: bool) -> float:
    """The most bytes that a rank holds in two micro-batches of a model of so many layers, in bfloat16."""
    config = AutoConfig.for_model(**{**MODELS[name], "num_hidden_layers": num_layers})
    config.max_position_embeddings = max(config.max_position_embeddings, num_tokens)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to(torch.float32 if mesh else torch.bfloat16)
    layout, tracker = pack_of(num_tokens, config.hidden_size), MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as stack:
        if mesh is not None:
            shard(model, Sharding(mesh=mesh, dtype=torch.bfloat16))
        model.to_empty(device="cpu")
        model.set_attn_implementation(NAME)
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        optimizer = Optimizer(model, OptimizerConfig(), total_steps=9)
        masters = list(optimizer._masters.values())
        for parameter in masters:  # moments are there from the first step on
            parameter.grad = torch.zeros_like(parameter)
        for each in optimizer._optimizers:
            each.step()
        for parameter in masters:
            parameter.grad = None
        tracker.track_external(model, *optimizer._optimizers, *(masters if mesh is None else ()))
        layout = faked(layout)
        stack.enter_context(tracker)
        for _ in range(NUM_MICRO_BATCHES):
            tracker.reset_mod_stats()
            micro_batch(model, layout)
        return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def micro_batch(model: Any, layout: Pack) -> None:
    """Make the passes of a micro-batch, forwards and backwards."""
    targets = torch.zeros(len(layout.predictors), dtype=torch.long)

    def compute() -> tuple[Tensor, Tensor]:
        hidden = take(packed_pass(trunk_of(model), layout).hidden, layout.predictors)
        return token_likelihood(Head(weight=model.get_output_embeddings().weight), hidden, targets, 1.0)

    logprobs, _ = model.compute(compute) if hasattr(model, "compute") else compute()
    logprobs.clone().sum().backward()


def pack_of(num_tokens: int, hidden_size: int) -> Pack:
    """A group that shares its prompt, of so many tokens in all."""
    response = torch.full(((num_tokens - PROMPT) // GROUP,), 7)
    sequences = [TokenSequence(prompt_ids=(*range(5, 5 + PROMPT),), response_ids=response)] * GROUP
    return pack(sequences, device=torch.device("cpu"), hidden_size=hidden_size)


def faked(layout: Pack) -> Pack:
    """The pack with tensors of the same shapes, made in the mode that is on."""

    def fake(tensor: Any) -> Any:
        return torch.empty(tensor.shape, dtype=tensor.dtype) if isinstance(tensor, Tensor) else tensor

    blocks = tuple(replace(block, place=fake(block.place)) for block in layout.blocks)
    tensors = {name: fake(getattr(layout, name)) for name in ("ids", "positions", "predictors")}
    return replace(layout, **tensors, blocks=blocks)


def formula(name: str, num_ranks: int, num_tokens: int, recomputes: bool) -> float:
    """Return what `gspo check` says of the same update."""
    tree: dict[str, Any] = {"name": "m", "steps": 1, "model": {"path": "m", "dtype": "bfloat16"}}
    response = (num_tokens - PROMPT) // GROUP
    tree["rollout"] = {"queries_per_step": 2 * num_ranks, "group_size": GROUP, "max_new_tokens": response}
    tree["actor"] = {"micro_batch_tokens": num_tokens, "gradient_checkpointing": recomputes, "mini_batches": 1}
    config = AutoConfig.for_model(**MODELS[name])
    options: dict[str, Any] = {"prompt_tokens": PROMPT, "device": torch.device("cpu"), "num_ranks": num_ranks}
    return sum(memory_of(make_recipe(tree), config, **options)["in the update"].values())


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| model | ranks | micro-batch | recomputed | formula, GiB | MemTracker, GiB | difference |")
    print("|---|---:|---:|---|---:|---:|---:|")
    for name, num_ranks, num_tokens, recomputes in ROWS:
        mesh = None
        if num_ranks > 1:
            dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
            mesh = init_device_mesh("cpu", (num_ranks,))
        few, more = (tracked(name, layers, mesh, num_tokens, recomputes) for layers in (FEW, MORE))
        if num_ranks > 1:
            dist.destroy_process_group()
        slope = (more - few) / (MORE - FEW)
        peak = more + slope * (MODELS[name]["num_hidden_layers"] - MORE)
        said = formula(name, num_ranks, num_tokens, recomputes)
        cells = [name, num_ranks, f"{num_tokens:,}", "yes" if recomputes else "no"]
        cells += [f"{said / 2**30:.1f}", f"{peak / 2**30:.1f}", f"{said / peak - 1:+.0%}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
