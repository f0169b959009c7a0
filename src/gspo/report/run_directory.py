"""The run directory: what a run leaves on disk, written as it goes."""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspo.config import Recipe
from gspo.config_file import dump_recipe
from gspo.errors import UserError
from gspo.policy.model import Policy
from gspo.policy.update import Trained
from gspo.records import Batch


class RunDirectory:
    """Writes recipe.yaml, metrics.jsonl, cold_start.jsonl, rollouts/, checkpoints/ and model/ of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, recipe: Recipe) -> "RunDirectory":
        """Make the recipe's directory; UserError where it exists, for a run never overwrites another."""
        check_absent(recipe)
        path = recipe.run_dir
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "recipe.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot be written: {error.strerror}", where=str(path), mend="set output_dir") from None
        return cls(path)

    @property
    def model(self) -> Path:
        """Where the final model and tokenizer lie."""
        return self.path / "model"

    def append(self, file_name: str, line: Mapping[str, Any]) -> None:
        """Add one JSON line, whole or not at all to a reader; a number that is not finite is written as null."""
        with (self.path / file_name).open("a", encoding="utf-8") as file:
            file.write(_json(line))

    def write_rollouts(self, step: int, batch: Batch, trained: Sequence[Trained] = ()) -> Path:
        """One line a rollout: prompt, completion, reward, advantage, ratio, clipped, finish reason, policy version."""
        path = self.path / "rollouts" / f"step_{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        seen = {item.index: item for item in trained}
        with path.open("w", encoding="utf-8") as file:
            index = 0
            for group in batch.groups:
                for rollout in group.rollouts:
                    line = {
                        "query": group.query.id,
                        "prompt": group.query.text,
                        "completion": rollout.text,
                        "reward": batch.scores[index].reward,
                        "rewards": dict(batch.scores[index].parts),
                        "advantage": batch.advantages[index],
                        **_ratio_of(seen.get(index)),
                        "tokens": len(rollout.response_ids),
                        "finish_reason": rollout.finish_reason,
                        "policy_version": rollout.policy_version,
                    }
                    file.write(_json(line))
                    index += 1
        return path

    def save_model(self, policy: Policy) -> None:
        """Write the final model, under its name only once it is whole."""
        unfinished = self.path / "unfinished_model"
        policy.save(unfinished)
        unfinished.rename(self.model)

    def save_checkpoint(self, step: int, policy: Policy, *, keep: int) -> None:
        """Write checkpoints/step_<step>/model, then remove all but the newest `keep`."""
        root = self.path / "checkpoints"
        unfinished = root / f"unfinished_step_{step:06d}"
        policy.save(unfinished / "model")
        unfinished.rename(root / f"step_{step:06d}")
        for old in sorted(root.glob("step_*"))[:-keep]:
            shutil.rmtree(old)


def check_absent(recipe: Recipe) -> None:
    """UserError where the run's directory exists and is not empty."""
    path = recipe.run_dir
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        mend = "give this run another name=… or output_dir=…, or remove the directory"
        if (path / "model").is_dir():
            mend += f"; to go on from its weights: model.path={path / 'model'} cold_start.steps=0"
            if recipe.model.architecture is not None:
                mend += " model.architecture=null model.tokenizer=null"
        raise UserError("this output directory exists, and a run never overwrites another", where=str(path), mend=mend)


def _ratio_of(item: Trained | None) -> dict[str, Any]:
    """Null where the sequence took no part in the update, its advantage being 0."""
    if item is None:
        return {"sequence_ratio": None, "clipped": None}
    return {"sequence_ratio": item.sequence_ratio, "clipped": item.num_clipped / item.num_tokens}


def _json(line: Mapping[str, Any]) -> str:
    return json.dumps({key: _finite(value) for key, value in line.items()}, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
