"""The figure: a small SVG file, the same bytes for the same results."""

from pathlib import Path

from studies.harness.figures import plt, save
from studies.harness.runs import Runs
from studies.harness.summary import Measure, deviation, mean, mean_of, over_seeds
from studies.staleness.jobs import ARMS, ETAS, experiment
from studies.staleness.tables import LATE_REWARD

COLOURS = {"gspo": "#1f6fb4", "gspo_fraction": "#2a9d4a", "grpo": "#d1611c", "decoupled": "#7a4fb5"}


def draw_all(runs: Runs, output: Path) -> None:
    """Late reward and clipped tokens against η: means over seeds, with a standard deviation to either side."""
    output.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    measures: dict[str, Measure] = {"late reward": LATE_REWARD, "clipped tokens": mean_of("clip/token_fraction")}
    for axis, (title, measure) in zip(axes, measures.items(), strict=True):
        for number, arm in enumerate(ARMS):
            points = [(place, runs.of(experiment(eta), arm)) for place, eta in enumerate(ETAS)]
            values = {place + 0.06 * (number - 1.5): over_seeds(found, measure) for place, found in points if found}
            centres, spreads = [mean(own) for own in values.values()], [deviation(own) for own in values.values()]
            style = {"color": COLOURS[arm.name], "label": arm.label, "capsize": 2, "markersize": 4}
            axis.errorbar([*values], centres, yerr=spreads, fmt="o-", **style)
        axis.set_xticks(range(len(ETAS)), [str(eta) for eta in ETAS])
        axis.set_xlabel("rollout.max_staleness (η)")
        axis.set_title(title)
    axes[0].legend(frameon=False, fontsize=8)
    save(figure, output / "staleness.svg")
