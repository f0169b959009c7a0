"""Which curves the page has: each chart's numbers, from metrics.jsonl alone."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.metrics.words import Measure, measures
from gspo.report.page.arms import Arm
from gspo.report.page.series import Series, length_of, places_of, series_of
from gspo.report.page.traces import COLOURS, Trace, area, band, curve, heat_map, rounded

_MIB = 2**20
_MOST_CURVES = 32  # of one metric: of a longer list every second, third, … number
_MOST_CELLS = 100_000  # of a map: of more every second, third, … step
_NOTHING = Series(steps=(), means=(), deviations=())


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, as plotly takes it, and the metrics that it shows."""

    title: str
    metrics: Sequence[str]
    traces: Sequence[Trace]
    axis: dict[str, Any] = field(default_factory=dict)  # plotly's yaxis
    captions: Sequence[str] = ()  # what a reader without the picture is told: a sentence a curve


def charts_of(arms: Sequence[Arm]) -> list[Chart]:
    """Every chart that the runs have numbers for, in the order in which they are read."""
    evaluations = measures(line for arm in arms for run in arm.runs for line in run.lines)
    of_size: dict[str, Any] = {"rangemode": "tozero", "autorangeoptions": {"minallowed": 0}}
    few = {"minallowed": 0, "include": 0.01}  # or a fraction that is always 0 would be drawn from -1 to 1
    fraction: dict[str, Any] = {"tickformat": ".2~%", "rangemode": "tozero", "autorangeoptions": few}
    layered = _names(arms, lambda name: name == "moe/expert_change_fraction_by_layer")
    found = [
        _reward(arms, evaluations),
        _lines(arms, "Response length, tokens", ["response/mean_tokens"], of_size),
        _lines(arms, "Responses cut off", ["response/truncated_fraction"], fraction),
        _lines(arms, "Clipped, by sequence and by token", ["clip/sequence_fraction", "clip/token_fraction"], fraction),
        _quantiles(arms),
        _lines(arms, "Groups of equal reward", ["group/zero_variance_fraction"], fraction),
        _lines(arms, "Entropy, nats a token", ["policy/entropy"], of_size),
        _lines(arms, "Gradient norm", ["policy/grad_norm", "critic/grad_norm"], of_size),
        _lines(arms, "KL from the reference, nats a token", ["reference/kl"], {}),
        _lines(arms, "Variance of the returns that the value model explains", ["critic/explained_variance"], {}),
        _lines(arms, "Experts that an update changes", ["moe/expert_change_fraction"], fraction),
        *(_expert_maps(arms) if layered else ()),
        _time(arms),
        _lines(
            arms,
            "Tokens a second",
            ["throughput/generated_tokens_per_second", "throughput/trained_tokens_per_second"],
            of_size,
        ),
        _lines(arms, "Peak memory, MiB", ["memory/peak_bytes"], of_size, scale=1 / _MIB),
    ]
    return [chart for chart in found if chart is not None]


def every_metric(arms: Sequence[Arm]) -> dict[str, Chart]:
    """A chart of each number that the runs have, a list's as many curves, for the one that a reader may choose."""
    found = {}
    for name in _names(arms, lambda name: name != "step"):
        places = sorted(set().union(*(places_of(arm, name) for arm in arms)))
        places = places[:: -(-len(places) // _MOST_CURVES) or 1]
        chart = _list(arms, name, places) if places else _lines(arms, name, [name], {})
        if chart is not None:
            found[name] = chart
    return found


def _names(arms: Sequence[Arm], is_meant: Callable[[str], bool]) -> list[str]:
    names = dict.fromkeys(name for arm in arms for run in arm.runs for line in run.lines for name in line)
    return [name for name in names if is_meant(name)]


def _label(arms: Sequence[Arm], arm: Arm, metric: str, several_metrics: bool) -> str:
    """What tells a curve from the others of its chart."""
    if len(arms) == 1:
        return metric
    return f"{arm.label}: {metric}" if several_metrics else arm.label


def _lines(
    arms: Sequence[Arm],
    title: str,
    metrics: Sequence[str],
    axis: dict[str, Any],
    *,
    scale: float = 1.0,
    num_more: int = 0,
) -> Chart | None:
    """Arms are told apart by colour; the metrics of a chart by dashes, and by colour where there is one arm.

    `num_more` metrics are yet to be drawn in the chart.
    """
    known = [metric for metric in metrics if any(series_of(arm, metric) for arm in arms)]
    traces, captions = [], []
    for number, arm in enumerate(arms):
        for place, metric in enumerate(known):
            series = _scaled(series_of(arm, metric), scale)
            if series is not None:
                label = _label(arms, arm, metric, len(known) > 1)
                dash = _dash(number, place, len(known) + num_more)
                traces += curve(series, label, colour=place if len(arms) == 1 else number, dash=dash)
                captions.append(_caption(label, series))
    return Chart(title=title, metrics=known, traces=traces, axis=axis, captions=captions) if traces else None


def _dash(number: int, place: int, num_metrics: int) -> int:
    """Of a metric of an arm: beyond the colours, arms too are told apart by dashes."""
    return place + number // COLOURS * num_metrics


def _reward(arms: Sequence[Arm], evaluations: Sequence[Measure]) -> Chart | None:
    rewards = _lines(arms, "Reward and pass@1", ["reward/mean"], {}, num_more=len(evaluations))
    traces, captions = list(rewards.traces if rewards else []), list(rewards.captions if rewards else [])
    shown: list[str] = []
    for number, arm in enumerate(arms):
        for place, measure in enumerate(evaluations, start=1):
            series = series_of(arm, measure.name)
            if series is not None:
                errors = series_of(arm, measure.error) or _NOTHING
                label = _label(arms, arm, measure.name, several_metrics=True)
                colour = place if len(arms) == 1 else number
                dash = _dash(number, place, 1 + len(evaluations))
                traces += curve(series, label, colour=colour, dash=dash, errors=errors)
                captions.append(_caption(label, series))
                shown.append(measure.name)
    metrics = [*(rewards.metrics if rewards else []), *dict.fromkeys(shown)]
    return Chart(title="Reward and pass@1", metrics=metrics, traces=traces, captions=captions) if traces else None


def _quantiles(arms: Sequence[Arm]) -> Chart | None:
    """1 to 99, 5 to 95 and 25 to 75 % of the sequences, and the middle; of several arms 5 to 95 % and the middle."""
    name, traces, captions = "ratio/sequence_quantiles", [], []
    for number, arm in enumerate(arms):
        rows = [series_of(arm, name, place) for place in range(7)]
        known = [row for row in rows if row is not None]
        if len(known) < 7 or len({tuple(row.steps) for row in known}) > 1:
            continue
        label = "middle (50 %)" if len(arms) == 1 else arm.label
        shares = ("1 %", "5 %", "25 %", "50 %", "75 %", "95 %", "99 %")
        for low, high in ((0, 6), (1, 5), (2, 4)) if len(arms) == 1 else ((1, 5),):
            traces += band(known[low].steps, known[low].means, known[high].means, label, colour=number, opacity=0.18)
        middle = Series(steps=known[3].steps, means=known[3].means, deviations=[None] * len(known[3].steps))
        (line,) = curve(middle, label, colour=number, dash=_dash(number, 0, 1))
        line["customdata"] = list(zip(*(rounded(row.means) for row in known), strict=True))
        told = ", ".join(f"{share}: %{{customdata[{place}]:.4g}}" for place, share in enumerate(shares) if place != 3)
        line["hovertemplate"] = f"%{{y:.4g}} ({told})"
        traces.append(line)
        captions += [
            _caption(share if len(arms) == 1 else f"{arm.label}, {share}", row)
            for share, row in zip(shares, known, strict=True)
        ]
    drawn = "1–99, 5–95 and 25–75 %" if len(arms) == 1 else "5–95 %"
    title = f"Sequence ratio s: {drawn} of the sequences, and the middle"
    return Chart(title=title, metrics=[name], traces=traces, captions=captions) if traces else None


def _expert_maps(arms: Sequence[Arm]) -> list[Chart]:
    """One an arm, all in the same colours."""
    found = [chart for arm in arms if (chart := _experts(arm, several=len(arms) > 1)) is not None]
    rows = [row for chart in found for trace in chart.traces for row in trace["z"]]
    most = max((value for row in rows for value in row if value is not None), default=0.0)
    for chart in found:
        chart.traces[0].update(zmin=0.0, zmax=most)
    return found


def _experts(arm: Arm, *, several: bool) -> Chart | None:
    name = "moe/expert_change_fraction_by_layer"
    rows = [series_of(arm, name, place) for place in range(length_of(arm, name))]
    known = [(f"layer {place}", row) for place, row in enumerate(rows) if row is not None]
    if not known:
        return None
    title = "Experts that an update changes, by layer" + (f": {arm.label}" if several else "")
    every = -(-len(known) * len(known[0][1].steps) // _MOST_CELLS)
    trace = heat_map([row for _, row in known], [label for label, _ in known], every=every)
    captions = [_caption(label, row) for label, row in known[:4]]
    return Chart(title=title, metrics=[name], traces=[trace], captions=captions, axis={"type": "category"})


_STAGES = ("rollout", "reward", "appraisal", "likelihood", "update", "checkpoint")


def _time(arms: Sequence[Arm]) -> Chart | None:
    """A stack of the stages for one arm; with several, what a step of each takes in all."""
    metrics = [f"time/{stage}_seconds" for stage in (*_STAGES, "total")]
    if len(arms) > 1:
        return _lines(arms, "Seconds a step", metrics[-1:], {"rangemode": "tozero"})
    found = {name: series for name in metrics if (series := series_of(arms[0], name)) is not None}
    layers = [
        area(s.steps, s.means, name, colour=place)
        for place, (name, s) in enumerate(found.items())
        if s is not found.get(metrics[-1])
    ]
    captions = [_caption(name, series) for name, series in found.items()]
    if not layers:
        return None
    return Chart(title="Seconds a step, by stage", metrics=list(found), traces=layers, captions=captions)


def _list(arms: Sequence[Arm], name: str, places: Sequence[tuple[int, ...]]) -> Chart | None:
    traces, captions = [], []
    for number, arm in enumerate(arms):
        for place in places:
            if (series := series_of(arm, name, *place)) is not None:
                label = _label(arms, arm, "/".join(map(str, (name, *place))), several_metrics=True)
                dash = _dash(number, place[0], len(places))
                traces += curve(series, label, colour=place[-1] if len(arms) == 1 else number, dash=dash)
                captions.append(_caption(label, series))
    return Chart(title=name, metrics=[name], traces=traces, captions=captions) if traces else None


def _scaled(series: Series | None, scale: float) -> Series | None:
    if series is None or scale == 1:
        return series
    means = [None if value is None else value * scale for value in series.means]
    deviations = [None if value is None else value * scale for value in series.deviations]
    return Series(steps=series.steps, means=means, deviations=deviations)


def _caption(label: str, series: Series) -> str:
    known = [value for value in series.means if value is not None]
    spread = next((one for one in reversed(series.deviations) if one is not None), None)
    last = f"{known[-1]:.4g}" + (f" ± {spread:.2g}" if spread is not None else "")
    middle = statistics.median(known)
    return f"{label}: {known[0]:.4g} → {last} (from {min(known):.4g} to {max(known):.4g}, median {middle:.4g})"
