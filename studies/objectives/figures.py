"""The figure: a small SVG file, the same bytes for the same results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.harness.figures import plt, save
from studies.harness.results import Results
from studies.harness.runs import Runs
from studies.harness.summary import deviation, mean, mean_reward, over_seeds
from studies.objectives.arms import CUTS, LENGTHS, OBJECTIVES, RANGES, Length
from studies.objectives.jobs import OBJECTIVE
from studies.objectives.measures import late, settled

STYLES = {"narrow": "#8a8a8a", "middle": "#1f6fb4", "wide": "#d1611c", "itself": "#2a9d4a"}


def draw_all(runs: Runs, output: Path) -> None:
    """The figure: rewards of every objective, and clipped tokens by length."""
    output.mkdir(parents=True, exist_ok=True)
    shape = {"gridspec_kw": {"width_ratios": [2, 1, 1]}, "layout": "constrained"}
    figure, (rewards, cut, models) = plt.subplots(1, 3, figsize=(12, 4.2), **shape)
    _rewards(rewards, runs)
    _clipped(cut, runs, CUTS, "clipped tokens: one model, cut off")
    if cut.get_legend_handles_labels()[0]:
        cut.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.85))
    _clipped(models, runs, LENGTHS, "clipped tokens: a model a length")
    save(figure, output / "objectives.svg")


def _rewards(axis: Any, runs: Runs) -> None:
    """Late and mean reward: a dot a seed, a bar from one standard deviation below the mean to one above."""
    for position, arm in enumerate(OBJECTIVES):
        found = runs.of(OBJECTIVE, arm)
        for measure, colour, shift in ((late("reward/mean"), "#1f6fb4", -0.15), (mean_reward, "#d1611c", 0.15)):
            _dots(axis, over_seeds(found, measure), position + shift, colour)
    axis.set_yticks(range(len(OBJECTIVES)), [arm.label for arm in OBJECTIVES])
    axis.invert_yaxis()
    axis.set_title("training reward: late (blue), over all steps (orange); dots: seeds", fontsize=9)


def _dots(axis: Any, values: list[float], position: float, colour: str) -> None:
    if not values:
        return
    axis.plot(values, [position] * len(values), ".", color=colour, markersize=4)
    if len(values) > 1:
        axis.errorbar(mean(values), position, xerr=deviation(values), color=colour, alpha=0.5, capsize=2)


def _clipped(axis: Any, runs: Runs, lengths: Sequence[Length], title: str) -> None:
    for arm in RANGES:
        found: list[Results] = [runs.of(length.name, arm) for length in lengths]
        points = [
            (length.tokens, mean(values))
            for length, one in zip(lengths, found, strict=True)
            if (values := over_seeds(one, settled("clip/token_fraction")))
        ]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=STYLES[arm.name], label=arm.label, markersize=4)
    axis.axhline(0.15, color="black", linewidth=0.7, linestyle=":")
    axis.set_xscale("log", base=2)
    axis.set_xticks([length.tokens for length in lengths], [str(length.tokens) for length in lengths])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("response tokens, about")
    axis.set_title(title, fontsize=9)
