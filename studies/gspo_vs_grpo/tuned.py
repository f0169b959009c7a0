"""The clip range of each arm: that of its sweep with the highest reward over the last quarter of the steps."""

import json
from typing import Any

from studies.gspo_vs_grpo.arms import ARMS, Arm
from studies.gspo_vs_grpo.clips import FILE
from studies.gspo_vs_grpo.runs import Runs
from studies.harness.summary import late_reward, mean, over_seeds


def tune(runs: Runs) -> None:
    """Choose from the sweep's results and write the choice down."""
    text = json.dumps({arm.name: _choice(runs, arm) for arm in ARMS}, indent=1)
    (runs.directory / FILE).write_text(text + "\n", encoding="utf-8")


def _choice(runs: Runs, arm: Arm) -> dict[str, Any]:
    rewards = {name: mean(over_seeds(runs.of(f"tune/{name}", arm), late_reward)) for name in arm.clips}
    best = max(rewards, key=lambda name: rewards[name])
    low, high = arm.clips[best]
    rounded = {name: round(reward, 4) for name, reward in rewards.items()}
    return {"clip": best, "clip_low": low, "clip_high": high, "late_reward": rounded}
