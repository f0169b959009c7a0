"""The figure: a small SVG file, the same bytes for the same results."""

from pathlib import Path

from studies.harness.figures import draw_curve, plt, save
from studies.harness.runs import Runs
from studies.turns.jobs import ARMS, EXPERIMENT

COLOURS = {"gspo": "#1f6fb4", "trajectory": "#7a4fb5", "turn": "#2a9d4a", "turn_own": "#d1611c"}
COLOURS |= {"gspo_unbound": "#7fb3dc", "turn_own_unbound": "#eba77d"}


def draw_all(runs: Runs, output: Path) -> None:
    """Reward and turns by step: means over seeds, with a standard deviation to either side."""
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, (title, metric) in zip(axes, {"reward": "reward/mean", "turns": "turns/mean"}.items(), strict=True):
        for arm in ARMS:
            curves = [result.values(metric) for result in runs.of(EXPERIMENT, arm).values()]
            draw_curve(axis, curves, color=COLOURS[arm.name], label=arm.label)
        axis.set_title(title)
        axis.set_xlabel("step")
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, output / "turns.svg")
