"""A model that runs begin from: a recipe's cold start, without the reinforcement learning.

python -m studies.harness.cold RECIPE DIRECTORY [key=value …]    # model, tokenizer, and start.json
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from gspo.engine.embedded.engine import EmbeddedEngine
from gspo.evaluation.held_out import evaluate, held_out_set
from gspo.learner.sft import rows_of_steps
from gspo.learner.trainer import Trainer
from gspo.model.policy import Policy
from gspo.recipe.load import load_recipe
from gspo.recipe.schema import Recipe
from gspo.reward.functions import close_functions
from gspo.rollout.sampler import Sampler
from gspo.run.prepare import Inputs, prepare

REPORT = "start.json"  # written last: a directory that has it is whole


def main() -> None:
    """Cold-start, evaluate and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    started = time.monotonic()
    recipe = load_recipe(options.recipe, options.overrides)
    trainer = Trainer()
    parts = prepare(recipe, trainer)
    try:
        report = _cold_start(recipe, trainer, parts)
    finally:
        close_functions(parts.functions)
        if parts.tools is not None:
            parts.tools.close()
    trainer.policy.save(options.directory)
    text = json.dumps({**report, "seconds": round(time.monotonic() - started)}, indent=1)
    (options.directory / REPORT).write_text(text + "\n", encoding="utf-8")


def _cold_start(recipe: Recipe, trainer: Trainer, parts: Inputs) -> dict[str, Any]:
    trainer.begin("cold start")
    policy, num_steps = trainer.policy, recipe.cold_start.steps
    for step, rows in enumerate(rows_of_steps(parts.demonstrations, recipe), 1):
        loss, _ = trainer.fit(rows)
        if step % 100 == 0:
            print(f"{step}/{num_steps}  loss {loss:.3f}", flush=True)
    trainer.end_cold_start()
    known = {"steps": num_steps, "pass_at_1": math.nan, "mean_tokens": math.nan, **_parameters(policy)}
    if parts.queries.held_out:
        own = held_out_set(recipe, parts.queries.held_out, parts.functions)
        numbers, _ = evaluate(Sampler(EmbeddedEngine(policy), policy, parts.tools), own)
        known |= {"pass_at_1": round(numbers["pass_at_1"], 4), "mean_tokens": round(numbers["mean_response_tokens"], 2)}
    return known


def _parameters(policy: Policy) -> dict[str, int]:
    """All parameters, and those that a token passes through."""
    sizes = {name: parameter.numel() for name, parameter in policy.model.named_parameters()}
    config = policy.model.config
    in_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = 1 - config.num_experts_per_tok / config.num_experts if in_experts else 0.0
    total = sum(sizes.values())
    return {"parameters": total, "active_parameters": total - round(in_experts * idle)}


if __name__ == "__main__":
    main()
