"""How every figure of a study looks, and is written: the same bytes for the same results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from studies.harness.summary import deviation, mean

# Text stays text; the names of clip paths are drawn from the salt.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "gspo", "font.size": 9, "axes.grid": True})
plt.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False, "path.simplify": True})

__all__ = ["draw_curve", "plt", "save"]


def save(figure: Any, path: Path) -> None:
    """As SVG, without a date and without spaces at the ends of lines."""
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def draw_curve(
    axis: Any, curves: Sequence[Sequence[float]], *, first: int = 1, shade: float = 0.15, **line: Any
) -> None:
    """Draw the mean of some runs' curves by step, from step `first` on, with a standard deviation to either side."""
    steps = [*zip(*curves, strict=False)]
    centres, spreads = [mean(own) for own in steps], [deviation(own) for own in steps]
    places = range(first, first + len(steps))
    axis.plot(places, centres, **line)
    low = [centre - spread for centre, spread in zip(centres, spreads, strict=True)]
    high = [centre + spread for centre, spread in zip(centres, spreads, strict=True)]
    axis.fill_between(places, low, high, color=line["color"], alpha=shade, linewidth=0)
