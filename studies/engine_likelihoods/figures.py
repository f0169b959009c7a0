"""The figure: a small SVG file, the same bytes for the same results."""

from pathlib import Path
from typing import Any

from studies.engine_likelihoods.arms import ARMS, DTYPES, GSPO, Arm
from studies.engine_likelihoods.runs import Runs
from studies.harness.figures import plt, save
from studies.harness.summary import mean


def draw_all(runs: Runs, output: Path) -> None:
    """Training reward by step, a panel for each precision of the engine."""
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, len(DTYPES), figsize=(9, 3.4), sharey=True, layout="constrained")
    for axis, dtype in zip(axes, DTYPES, strict=True):
        for arm in ARMS:
            if arm.dtype == dtype:
                _curve(axis, runs, arm)
        axis.set_title(f"training reward, vLLM in {dtype}", fontsize=9)
        axis.set_xlabel("step")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(frameon=False)
    save(figure, output / "reward.svg")


def _curve(axis: Any, runs: Runs, arm: Arm) -> None:
    """The mean over the seeds."""
    rows = [result.values("reward/mean") for result in runs.of(arm).values()]
    length = max(map(len, rows), default=0)
    means = [mean([row[step] for row in rows if step < len(row)]) for step in range(length)]
    colour, style = "#1f6fb4" if arm.objective is GSPO else "#d1611c", "-" if arm.old == "engine" else "--"
    if means:
        axis.plot(range(1, length + 1), means, style, color=colour, label=f"{arm.objective.label}, {arm.old}")
