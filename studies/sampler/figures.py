"""The figure: a small SVG file, the same bytes for the same results."""

from pathlib import Path

from studies.harness.figures import draw_curve, plt, save
from studies.harness.runs import Runs
from studies.sampler.jobs import ARMS, EVERY, TASKS

COLOURS = {"order": "#1f6fb4", "difficulty": "#2a9d4a", "gate": "#d1611c"}


def draw_all(runs: Runs, output: Path) -> None:
    """Equal-reward groups by step, over half an epoch: means over seeds, with a standard deviation to either side."""
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
    for axis, (title, start) in zip(axes, TASKS.items(), strict=True):
        for arm in ARMS:
            curves = [result.values("group/zero_variance_fraction") for result in runs.of(start.name, arm).values()]
            size = EVERY // 4
            smooth = [[sum(own[i : i + size]) / size for i in range(len(own) - size + 1)] for own in curves]
            draw_curve(axis, smooth, first=size, color=COLOURS[arm.name], label=arm.label)
        axis.set_title(f"equal-reward groups, {title}")
        axis.set_xlabel("step")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, output / "sampler.svg")
