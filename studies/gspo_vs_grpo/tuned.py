"""The clip range of each arm: that of its sweep with the highest reward over the last quarter of the steps."""

import json
from pathlib import Path
from typing import Any

from studies.gspo_vs_grpo.arms import ARMS, Arm, ClipRange
from studies.gspo_vs_grpo.results import load_all
from studies.gspo_vs_grpo.summary import late_reward, mean, over_seeds

FILE = "tuned.json"


def tune(results: Path) -> None:
    """Choose from the sweep's results and write the choice down."""
    text = json.dumps({arm.name: _choice(results, arm) for arm in ARMS}, indent=1)
    (results / FILE).write_text(text + "\n", encoding="utf-8")


def chosen_clips(results: Path) -> dict[str, ClipRange]:
    """The choice, by arm."""
    choices = json.loads((results / FILE).read_text(encoding="utf-8"))
    return {name: (choice["clip_low"], choice["clip_high"]) for name, choice in choices.items()}


def chosen_names(results: Path) -> dict[str, str]:
    """The names of the chosen ranges, by arm; none before the sweep is done."""
    path = results / FILE
    choices = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {name: choice["clip"] for name, choice in choices.items()}


def _choice(results: Path, arm: Arm) -> dict[str, Any]:
    rewards = {name: mean(over_seeds(load_all(results, f"tune/{name}", arm), late_reward)) for name in arm.clips}
    best = max(rewards, key=lambda name: rewards[name])
    low, high = arm.clips[best]
    rounded = {name: round(reward, 4) for name, reward in rewards.items()}
    return {"clip": best, "clip_low": low, "clip_high": high, "late_reward": rounded}
