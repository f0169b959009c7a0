"""TRL's side of `benchmarks.peer.first_step`: its own `_compute_loss` on a batch that is given."""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from direction import along  # type: ignore[import-not-found]  # beside this file, which is run as a program
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Print loss and norm of the gradient as JSON, a line for each that is asked."""
    for asked in json.loads(Path(sys.argv[1]).read_text()):
        with tempfile.TemporaryDirectory() as directory:
            config = GRPOConfig(output_dir=directory, use_cpu=True, bf16=False, report_to="none", **asked["config"])
            print(json.dumps(step_of(config, asked["model"], asked["rows"])), flush=True)


def step_of(config: GRPOConfig, model: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """The loss of TRL's own method, its gradient's norm, and its part along a direction."""
    most = max(len(row["response"]) for row in rows)
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * len(rows)),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": padded([row["prompt"] for row in rows], left=True),
        "prompt_mask": padded([[1] * len(row["prompt"]) for row in rows], left=True),
        "completion_ids": padded([row["response"] for row in rows]),
        "completion_mask": padded([[1] * len(row["response"]) for row in rows]),
        "advantages": torch.tensor([row["advantage"] for row in rows]),
        "old_per_token_logps": torch.tensor([row["old"] + [0.0] * (most - len(row["old"])) for row in rows]),
        "num_items_in_batch": torch.tensor(sum(len(row["response"]) for row in rows)),
    }
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), float("inf"))
    return {"loss": float(loss), "norm": float(norm), "along": along(trainer.model)}


def padded(rows: list[list[int]], *, left: bool = False) -> torch.Tensor:
    """The rows as a matrix, with zeros before or after them."""
    most = max(map(len, rows))
    fill = [[0] * (most - len(row)) for row in rows]
    return torch.tensor([zeros + row if left else row + zeros for row, zeros in zip(rows, fill, strict=True)])


if __name__ == "__main__":
    main()
