"""The figure: a small SVG file, the same bytes for the same results."""

from pathlib import Path

from studies.growth.jobs import ARMS, EXPERIMENT
from studies.harness.figures import draw_curve, plt, save
from studies.harness.runs import Runs

COLOURS = {"phases": "#2a9d4a", "mixed": "#1f6fb4", "last": "#d1611c"}


def draw_all(runs: Runs, output: Path) -> None:
    """Reward and tokens by step: means over seeds, with a standard deviation to either side."""
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    charts = {"reward, of what the arm asks then": "reward/mean", "response tokens": "response/mean_tokens"}
    for axis, (title, metric) in zip(axes, charts.items(), strict=True):
        for arm in ARMS:
            curves = [result.values(metric) for result in runs.of(EXPERIMENT, arm).values()]
            draw_curve(axis, curves, color=COLOURS[arm.name], label=arm.label)
        axis.set_title(title)
        axis.set_xlabel("step")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, output / "growth.svg")
