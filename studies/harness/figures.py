"""How every figure of a study looks, and is written: the same bytes for the same results."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Text stays text; the names of clip paths are drawn from the salt.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gspo", "font.size": 9, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "path.simplify": True})

__all__ = ["plt", "save"]


def save(figure: Any, path: Path) -> None:
    """As SVG, without a date and without spaces at the ends of lines."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")
