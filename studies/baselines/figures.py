"""The figures: small SVG files, the same bytes for the same results."""

from pathlib import Path

from studies.baselines.arms import ARMS, TASKS
from studies.harness.figures import draw_curve, plt, save
from studies.harness.runs import Runs
from studies.harness.summary import mean

WINDOW = 4  # steps whose rewards are averaged


def draw_all(runs: Runs, output: Path) -> None:
    """For each task the reward of every arm by step: means over the seeds, with a standard deviation to either side."""
    output.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        figure, axes = plt.subplots(3, 4, figsize=(9, 6), layout="constrained", sharex=True, sharey=True)
        reference = runs.of(task, ARMS[0])
        for axis, arm in zip(axes.flat, ARMS, strict=False):
            for results, colour in ((reference, "#999999"), (runs.of(task, arm), "#1f6fb4")):
                curves = [_smooth(result.values("reward/mean")) for result in results.values()]
                draw_curve(axis, curves, first=WINDOW, shade=0.2, color=colour)
            axis.set_title(arm.label, fontsize=8)
        for axis in axes.flat[len(ARMS) :]:
            axis.set_axis_off()
        figure.supxlabel("step (grey: GSPO)")
        save(figure, output / f"{task}.svg")


def _smooth(rewards: list[float]) -> list[float]:
    return [mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
