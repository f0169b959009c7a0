"""The figures: small SVG files, the same bytes for the same results."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import MaxNLocator

from studies.gspo_vs_grpo.arms import ARMS, FACTORS, MAIN, MOE_ARMS, Arm
from studies.gspo_vs_grpo.runs import Runs
from studies.harness.figures import plt, save
from studies.harness.results import Result, Results
from studies.harness.summary import deviation, mean

COLOURS = {"sequence": "#1f6fb4", "token": "#d1611c"}
EXPERT_CHANGE = "moe/expert_change_fraction"
CLIPPED = "clip/token_fraction"
Curve = Callable[[Result], list[float]]


def draw_all(runs: Runs, output: Path) -> None:
    """Every figure for which there are results, a file each."""
    output.mkdir(parents=True, exist_ok=True)
    main = {arm.name: runs.of(MAIN.name, arm) for arm in ARMS}
    _reward_figure(main, output / "figure_1_reward.svg")
    _clipping_figure(main, output / "figure_2_clipped.svg")
    _replay_figure(main, output / "figure_3_replay.svg")
    _factor_figure(runs, output / "factors.svg")


def _reward_figure(main: Mapping[str, Results], path: Path) -> None:
    figure, (by_step, by_compute, dense) = plt.subplots(1, 3, figsize=(10, 3.1), sharey=True, layout="constrained")
    for arm in MOE_ARMS:
        _draw_curve(by_step, arm, main[arm.name], _reward)
        _draw_curve(by_compute, arm, main[arm.name], _reward, compute=True)
    for arm in ARMS:
        if arm.model == "dense":
            _draw_curve(dense, arm, main[arm.name], _reward)
    _label(by_step, "mixture of experts", "step", "training reward")
    _label(by_compute, "mixture of experts, by compute", "million forward-token equivalents")
    _label(dense, "dense", "step")
    by_step.legend(frameon=False)
    dense.legend(frameon=False)
    save(figure, path)


def _clipping_figure(main: Mapping[str, Results], path: Path) -> None:
    figure, (overall, by_step) = plt.subplots(1, 2, figsize=(8, 3.1), layout="constrained")
    for position, arm in enumerate(ARMS):
        values = [mean(result.values(CLIPPED)) for result in main[arm.name].values()]
        if not values:
            continue
        hatch = "//" if arm.replays else None
        overall.barh(position, mean(values), color=_colour(arm), alpha=_strength(arm), hatch=hatch, edgecolor="white")
        overall.plot(values, [position] * len(values), "k.", markersize=3)
        overall.annotate(f" {mean(values):.2g}", (max(values), position), va="center")
    overall.set_yticks(range(len(ARMS)), [arm.label for arm in ARMS])
    overall.invert_yaxis()
    overall.set_xscale("log")
    overall.margins(x=0.25)
    for arm in MOE_ARMS:
        _draw_curve(by_step, arm, main[arm.name], lambda result: result.values(CLIPPED))
    by_step.set_yscale("symlog", linthresh=1e-4)
    by_step.set_ylim(bottom=0)
    _label(overall, "clipped tokens (fraction of trained)", "mean over the steps; dots: seeds")
    _label(by_step, "by step", "step")
    save(figure, path)


def _replay_figure(main: Mapping[str, Results], path: Path) -> None:
    figure, (reward, changed) = plt.subplots(1, 2, figsize=(8, 3.1), layout="constrained")
    for arm in MOE_ARMS:
        if arm.level == "token":
            _draw_curve(reward, arm, main[arm.name], _reward)
        _draw_curve(changed, arm, main[arm.name], lambda result: result.values(EXPERT_CHANGE))
    _label(reward, "GRPO with and without Routing Replay", "step", "training reward")
    _label(changed, "active experts changed since π_old (fraction)", "step")
    reward.legend(frameon=False)
    changed.legend(frameon=False)
    save(figure, path)


def _factor_figure(runs: Runs, path: Path) -> None:
    conditions = [(MAIN.name, MAIN), *((f"factors/{condition.name}", condition) for condition in FACTORS)]
    columns = math.ceil(len(conditions) / 2)
    figure, axes = plt.subplots(2, columns, figsize=(11, 5), sharey=True, layout="constrained")
    for axis in axes.flat[len(conditions) :]:
        axis.remove()
    for axis, (experiment, condition) in zip(axes.flat, conditions, strict=False):
        for arm in MOE_ARMS:
            _draw_curve(axis, arm, runs.of(experiment, arm), _reward)
        _label(axis, "main" if condition is MAIN else condition.what, "step")
    for row in axes:
        row[0].set_ylabel("training reward")
    axes[0][0].legend(frameon=False)
    save(figure, path)


def _draw_curve(axis: Any, arm: Arm, runs: Results, curve: Curve, *, compute: bool = False) -> None:
    """Mean over the seeds, with a band of one standard deviation; nothing where no run has the numbers."""
    rows = [curve(result) for result in runs.values()]
    length = max((len(row) for row in rows), default=0)
    if not length:
        return
    means, spreads = _columns(rows, length, mean), _columns(rows, length, deviation)
    spreads = [0.0 if math.isnan(spread) else spread for spread in spreads]
    spent = _columns([result.compute() for result in runs.values()], length, mean)
    x = [tokens / 1e6 for tokens in spent] if compute else list(range(1, length + 1))
    if not compute:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    style = "--" if arm.replays else "-"
    axis.plot(x, means, style, color=_colour(arm), alpha=_strength(arm), label=arm.label, linewidth=1.4)
    low = [centre - spread for centre, spread in zip(means, spreads, strict=True)]
    high = [centre + spread for centre, spread in zip(means, spreads, strict=True)]
    axis.fill_between(x, low, high, color=_colour(arm), alpha=0.12, linewidth=0)


def _columns(rows: Sequence[Sequence[float]], length: int, combine: Callable[[Sequence[float]], float]) -> list[float]:
    """Step by step over the runs that have made the step."""
    return [combine([row[step] for row in rows if step < len(row)]) for step in range(length)]


def _reward(result: Result) -> list[float]:
    return result.values("reward/mean")


def _colour(arm: Arm) -> str:
    return COLOURS[arm.level]


def _strength(arm: Arm) -> float:
    return 0.6 if arm.replays else 1.0


def _label(axis: Any, title: str, x: str, y: str | None = None) -> None:
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(x)
    if y:
        axis.set_ylabel(y)
