"""TRL's loss and gradient of a batch against gspo's, by a configuration that gspo imports.

    python -m benchmarks.peer.first_step --trl-python .venv-trl/bin/python [--model models/smollm2-135m]

Each objective is written as a GRPOConfig. TRL takes it as it is; gspo takes the recipe that `gspo import` makes of it.
Both see the same tokens, rewards and likelihoods of π_old, which differ from the policy's, so that some are clipped.
TRL is given gspo's advantages: its own have 1e-4 beside the standard deviation.
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer.direction import along
from benchmarks.samples import sample_of, scored
from gspo import cli
from gspo.learner.advantages import with_advantages
from gspo.learner.micro_batching import Learner
from gspo.learner.optimizer import Optimizer, StepReport
from gspo.learner.update import update
from gspo.model.load import load_tokenizer
from gspo.model.packing import TokenSequence
from gspo.model.policy import Policy, load_policy, response_likelihood
from gspo.recipe.load import load_recipe
from gspo.types import Batch, Group

QUERIES, GROUP, MOST = 4, 4, 48
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
COMMON = {"num_generations": GROUP, "max_completion_length": MOST, "beta": 0.0, "temperature": 1.0}
COMMON |= {"gradient_accumulation_steps": 1, "gradient_checkpointing": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "GSPO": {**SEQUENCE, "loss_type": "grpo"},
    "GRPO": {"loss_type": "grpo", "epsilon": 0.06},
    "DAPO": {"loss_type": "dapo", "epsilon": 0.06, "epsilon_high": 0.07},
    "Dr. GRPO": {"loss_type": "dr_grpo", "epsilon": 0.06, "scale_rewards": False},
    "CISPO": {"loss_type": "cispo", "epsilon_high": 1.05},
    "SAPO": {"loss_type": "sapo"},
    "LUSPO": {**SEQUENCE, "loss_type": "luspo"},
}


def main() -> None:
    """Print a row for each objective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    options = parser.parse_args()
    model = str(options.model.absolute())
    with tempfile.TemporaryDirectory() as directory:
        place, given = Path(directory), {"per_device_train_batch_size": QUERIES * GROUP, **COMMON}
        recipes = {
            name: imported({"model_name_or_path": model, "dataset_name": "rows.jsonl", **given, **config}, place)
            for name, config in CONFIGS.items()
        }
        policy = load_policy(recipes["GSPO"].model, load_tokenizer(model), seed=0)
        rewarded, weights = batch_of(policy), {key: own.clone() for key, own in policy.model.state_dict().items()}
        ours, asked = dict[str, dict[str, float]](), list[dict[str, Any]]()
        for name, recipe in recipes.items():
            policy.model.load_state_dict(weights)
            batch = with_advantages(rewarded, recipe.actor)
            ours[name] = step_of(policy, recipe.actor, batch)
            asked.append({"config": {**given, **CONFIGS[name]}, "rows": rows_of(batch), "model": model})
        (place / "asked.json").write_text(json.dumps(asked))
        command = [options.trl_python, str(Path(__file__).with_name("trl_first_step.py")), str(place / "asked.json")]
        said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"loss"')]
    heads = ["loss of TRL", "of gspo", "norm of TRL's gradient", "of gspo's", "along a direction, TRL", "gspo"]
    heads.append("clipped tokens")
    print(f"| objective | {' | '.join(heads)} |\n|---{'|---:' * len(heads)}|")
    tokens = sum(len(row["response"]) for row in asked[0]["rows"])
    for (name, own), theirs in zip(ours.items(), answers, strict=True):
        numbers = " | ".join(f"{side[key]:.6f}" for key in ("loss", "norm", "along") for side in (theirs, own))
        print(f"| {name} | {numbers} | {own['clipped']:.0f} of {tokens} |")


def imported(given: Mapping[str, Any], place: Path) -> Any:
    """The recipe that `gspo import` makes of TRL's configuration."""
    (place / "trl.json").write_text(json.dumps(given))
    (place / "recipe.yaml").unlink(missing_ok=True)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        status = cli.main(["import", str(place / "trl.json"), "-o", str(place / "recipe.yaml")])
    if status:
        sys.exit(f"gspo import has refused TRL's configuration: {said.getvalue()}")
    return load_recipe(place / "recipe.yaml", ["model.device=cpu", "model.dtype=float32", "reward=math"])


def batch_of(policy: Policy) -> Batch:
    """Groups of random tokens of many lengths, with rewards and an old policy that is near the present one."""
    dice = torch.Generator().manual_seed(5)

    def tokens(most: int) -> torch.Tensor:
        return torch.randint(100, 4000, (int(torch.randint(2, most, (1,), generator=dice)),), generator=dice)

    groups = []
    for _ in range(QUERIES):
        prompt = tuple(tokens(30).tolist())
        samples = []
        for _ in range(GROUP):
            response = tokens(MOST)
            with torch.no_grad():
                present = response_likelihood(
                    policy, [TokenSequence(prompt_ids=prompt, response_ids=response)]
                ).logprobs
            noise = torch.randn(len(response), generator=dice) * 0.1
            noise -= noise.mean() * 0.95  # so that ratios of sequences, too, lie about their clip range
            samples.append(replace(sample_of(prompt, response), old_logprobs=present + noise))
        groups.append(Group(samples=tuple(samples)))
    rewards = torch.randint(0, 3, (QUERIES * GROUP,), generator=dice).float().tolist()
    return scored(groups, rewards)


def step_of(policy: Policy, actor: Any, batch: Batch) -> dict[str, float]:
    """The loss of gspo's update, its gradient's norm and part along a direction, and how many tokens are clipped."""
    optimizer = _Watched(policy.model, actor.optimizer, total_steps=1)
    optimizer.watched = policy.model
    learner = Learner(policy=policy, optimizer=optimizer, actor=actor, temperature=1.0, max_tokens=MOST)
    ((report, after),) = update(learner, batch)
    clipped = sum(sample.stats.num_clipped for sample in after.samples if sample.stats)
    return {"loss": report.loss, "norm": report.step.grad_norm, "along": optimizer.along, "clipped": float(clipped)}


class _Watched(Optimizer):
    """An optimizer that notes what its gradient is along a direction that both programs draw."""

    watched: torch.nn.Module
    along = 0.0

    def step(self, *, loss_is_finite: bool = True) -> StepReport:
        """Note it, and make the step."""
        self.along = along(self.watched)
        return super().step(loss_is_finite=loss_is_finite)


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """What TRL is given of each sample."""
    return [
        {
            "prompt": list(sample.query.prompt_ids),
            "response": sample.token_ids.tolist(),
            "old": sample.old_logprobs.tolist(),  # type: ignore[union-attr]
            "advantage": sample.advantage,
        }
        for sample in batch.samples
    ]


if __name__ == "__main__":
    main()
