"""The clip range that was chosen for each arm, as tuned.py wrote it down."""

import json
from pathlib import Path
from typing import Any

from studies.gspo_vs_grpo.arms import ClipRange

FILE = "tuned.json"


def has_choice(results: Path) -> bool:
    """Whether the sweep has been made."""
    return (results / FILE).is_file()


def chosen_clips(results: Path) -> dict[str, ClipRange]:
    """The range, by arm."""
    return {name: (choice["clip_low"], choice["clip_high"]) for name, choice in _choices(results).items()}


def chosen_names(results: Path) -> dict[str, str]:
    """Its name, by arm; none before the sweep is done."""
    return {name: choice["clip"] for name, choice in _choices(results).items()} if has_choice(results) else {}


def _choices(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / FILE).read_text(encoding="utf-8"))
    return found
