"""Curves, bands and areas as plotly draws them; the page gives them their colours, which change with its theme."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from gspo.report.page.series import Series

Trace = dict[str, Any]
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COLOURS = 7  # of the page's palettes
_DIGITS = 6
_FEW = 3  # steps of which a line alone could not be seen


def curve(series: Series, label: str, *, colour: int, dash: int = 0, errors: Series | None = None) -> list[Trace]:
    """A line; around it, where there are seeds, the band of a deviation; else `errors`, if any, as bars.

    With `errors` it is a number that few steps have: the line goes from one to the next.
    """
    is_sparse = errors is not None
    if is_sparse:
        series = series.without_gaps
    if series.has_deviations:
        errors = None
    line: Trace = {
        "type": "scatter",
        "mode": "lines+markers" if is_sparse or len(series.steps) < _FEW else "lines",
        "name": label,
        "x": list(series.steps),
        "y": rounded(series.means),
        "line": {"dash": _DASHES[dash % len(_DASHES)], "width": 2},
        "hovertemplate": "%{y:.4g}",
        "meta": {"colour": colour},
        "legendgroup": label,
    }
    if errors is not None:
        bars = dict(zip(errors.steps, errors.means, strict=True))
        line["error_y"] = {"type": "data", "array": rounded([bars.get(step) for step in series.steps]), "width": 3}
        line["hovertemplate"] = "%{y:.4g} ± %{error_y.array:.2g}"
    if series.has_deviations:
        line["customdata"] = rounded(series.deviations)
        line["hovertemplate"] = "%{y:.4g} ± %{customdata:.2g}"
        return [*spread(series, label, colour=colour), line]
    return [line]


def spread(series: Series, label: str, *, colour: int) -> list[Trace]:
    """The band of a deviation up and down."""
    low = [_sum(mean, deviation, -1) for mean, deviation in zip(series.means, series.deviations, strict=True)]
    high = [_sum(mean, deviation, 1) for mean, deviation in zip(series.means, series.deviations, strict=True)]
    return band(series.steps, low, high, label, colour=colour)


def band(
    steps: Sequence[int],
    low: Sequence[float | None],
    high: Sequence[float | None],
    label: str,
    *,
    colour: int,
    opacity: float = 0.2,
) -> list[Trace]:
    """An area between two curves, in as many pieces as they have."""
    rows = list(zip(steps, low, high, strict=True))
    found = []
    for whole, group in groupby(rows, key=lambda row: row[1] is not None and row[2] is not None):
        piece = list(group)
        if whole:
            there, back = piece, piece[::-1]
            found.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": label,
                    "x": [row[0] for row in there] + [row[0] for row in back],
                    "y": rounded([row[1] for row in there] + [row[2] for row in back]),
                    "fill": "toself",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "legendgroup": label,
                    "meta": {"colour": colour, "fill": opacity},
                }
            )
    return found


def area(steps: Sequence[int], values: Sequence[float | None], label: str, *, colour: int) -> Trace:
    """One layer of a stack."""
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) >= _FEW else "lines+markers",
        "name": label,
        "x": list(steps),
        "y": rounded(values),
        "stackgroup": "all",
        "line": {"width": 1},
        "hovertemplate": "%{y:.3g}",
        "meta": {"colour": colour, "fill": 0.55},
    }


def heat_map(rows: Sequence[Series], names: Sequence[str], *, every: int = 1) -> Trace:
    """A number by step and layer, of every so many steps."""
    steps = sorted({step for row in rows for step in row.steps if step > 0})[::every]
    columns = [dict(zip(row.steps, row.means, strict=True)) for row in rows]
    return {
        "type": "heatmap",
        "x": steps,
        "y": list(names),
        "z": [rounded([column.get(step) for step in steps]) for column in columns],
        "colorscale": "Cividis",
        "hoverongaps": False,
        "hovertemplate": "step %{x}, %{y}: %{z:.4g}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0},
        "meta": {},
    }


def rounded(values: Sequence[float | None]) -> list[float | None]:
    """To as many digits as anybody reads off a curve: the page is smaller for it."""
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def _sum(mean: float | None, deviation: float | None, sign: int) -> float | None:
    return None if mean is None else mean + sign * (deviation or 0.0)
