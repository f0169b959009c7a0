"""TRL's side: its GRPOTrainer with GSPO's sequence-level ratio, which takes its turns through a callback."""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peer import workloads
from benchmarks.peer.turns import Turns


class TakesTurns(TrainerCallback):
    """A turn begins with every rollout batch."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before every optimiser step."""
        if state.global_step % workloads.MINI_BATCHES == 0:
            self.turns.next()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called after every optimiser step."""
        self.turns.add(optimizer_steps=1)


def main() -> None:
    """Train until the turns end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    turns, work = Turns(), workloads.WORKLOADS[options.workload]
    trainer = _trainer(work, options.directory, turns)
    trainer.train()


def _trainer(work: workloads.Workload, directory: Path, turns: Turns) -> Any:
    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            output = turns.timed("rollout", super()._generate_single_turn)(*args, **kwargs)
            turns.add(tokens=sum(len(ids) for ids in output[0]), sequences=len(output[0]))
            return output

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            function = super()._get_per_token_logps_and_entropies
            return (function if torch.is_grad_enabled() else turns.timed("old", function))(*args, **kwargs)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return turns.timed("batch", super()._generate_and_score_completions)(inputs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return turns.timed("training_step", super().training_step)(*args, **kwargs)

    arguments = GRPOConfig(
        output_dir=str(directory / "trl"),
        use_cpu=not work.gpu,
        bf16=work.gpu,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=10**6,
        learning_rate=workloads.LEARNING_RATE,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        gradient_checkpointing=False,
        importance_sampling_level="sequence",
        loss_type="grpo",
        beta=0.0,
        epsilon=workloads.CLIP_LOW,
        epsilon_high=workloads.CLIP_HIGH,
        per_device_train_batch_size=work.sequences // workloads.MINI_BATCHES,
        steps_per_generation=workloads.MINI_BATCHES,
        num_generations=work.group_size,
        max_completion_length=work.max_new_tokens,
        temperature=1.0,
    )
    adapter = None
    if work.lora:
        from peft import LoraConfig

        shape: dict[str, Any] = {"r": workloads.RANK, "lora_alpha": workloads.ALPHA, "target_modules": "all-linear"}
        adapter = LoraConfig(**shape, task_type="CAUSAL_LM")
    return Timed(
        model=AutoModelForCausalLM.from_pretrained(
            directory / "model", dtype=torch.bfloat16 if work.gpu else torch.float32
        ),
        reward_funcs=workloads.equal_or_even,
        args=arguments,
        train_dataset=Dataset.from_list(workloads.rows(work)),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        callbacks=[TakesTurns(turns)],
        peft_config=adapter,
    )


if __name__ == "__main__":
    main()
