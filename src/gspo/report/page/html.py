"""The page as one file: text, charts and samples put into its template, everything from a run escaped."""

import base64
import gzip
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from gspo.metrics.words import measures
from gspo.report.page.arms import Arm, differences
from gspo.report.page.charts import Chart
from gspo.report.page.glossary import anchor, general_name, glossary
from gspo.report.page.overview import Overview, duration
from gspo.report.page.sample_data import SampleData
from gspo.report.page.series import from_to

_PLOTLY = "plotly-cartesian-4.1.1.min.js.gz"
_SCRIPTS = ("store.js", "theme.js", "charts.js", "tokens.js", "samples.js", "page.js")


def asset(name: str) -> bytes:
    """A file that the page is made of."""
    return files("gspo.report.page").joinpath("assets", name).read_bytes()


def page(parts: Mapping[str, str]) -> str:
    """The template with each `{{name}}` replaced by its part, once: what a part contains is left as it is.

    What has no encoding, such as half a character of a file's name, becomes a question mark.
    """
    fixed = {
        "style": asset("style.css").decode(),
        "script": "\n".join(asset(name).decode() for name in _SCRIPTS),
        "plotly": base64.b64encode(asset(_PLOTLY)).decode(),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: {**fixed, **parts}[found[1]], asset("page.html").decode())
    return text.encode(errors="replace").decode()


def packed(content: Any) -> str:
    """JSON, compressed, in letters that mean nothing to HTML."""
    return base64.b64encode(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)).decode()


def overview_part(overviews: Sequence[Overview]) -> str:
    """A run in full, or several in a table with what differs from run to run."""
    if len(overviews) == 1:
        return _one(overviews[0])
    columns = list(dict.fromkeys(about for one in overviews for about, _ in one.scores))
    rows = []
    for one in overviews:
        told = dict(one.scores)
        said = "<br>".join(map(escape, [*one.diagnoses, *one.notes])) or "–"
        cells = [one.name, one.state, duration(one.seconds), *(told.get(column, "–") for column in columns)]
        rows.append([*map(escape, cells), said])
    return _table(["run", "state", "time", *columns, "diagnoses"], rows)


def differences_part(arms: Sequence[Arm]) -> str:
    """Where the recipes of several arms differ; nothing for one."""
    if len(arms) < 2:
        return ""
    rows = [[f"<code>{escape(key)}</code>", *map(escape, values)] for key, values in differences(arms)]
    told = _table(["key", *(arm.label for arm in arms)], rows)
    return f'<section id="differences"><h2>Where the recipes differ</h2>{told}</section>'


def arms_part(arms: Sequence[Arm]) -> str:
    """Of arms with seeds the first and last numbers as mean ± sd; nothing where none has any."""
    if all(len(arm.runs) == 1 for arm in arms):
        return ""
    evaluated = measures(line for arm in arms for run in arm.runs for line in run.lines)
    names = [*(measure.name for measure in evaluated), "reward/mean", "response/mean_tokens"]
    rows = [
        [escape(arm.label), escape(", ".join(str(run.recipe.get("seed", "?")) for run in arm.runs))]
        + [escape(from_to(arm, name)) for name in names]
        for arm in arms
    ]
    return f"<h3>Arms, mean ± sd over their seeds</h3>{_table(['arm', 'seeds', *names], rows)}"


def chart_part(number: int, chart: Chart) -> str:
    """A chart's place: its title, which leads to the metric's definition, and what it shows in words."""
    links = ", ".join(_metric_link(metric) for metric in chart.metrics)
    captions = "".join(f"<li>{escape(caption)}</li>" for caption in chart.captions)
    target = anchor(chart.metrics[0])
    return (
        f'<figure class="chart" id="chart-{number}"><h3><a href="#{target}">{escape(chart.title)}</a></h3>'
        f'<div class="plot" data-chart="{number}" role="group" aria-label="{escape("; ".join(chart.captions))}"></div>'
        f"<figcaption><details><summary>in numbers: {links}</summary><ul>{captions}</ul></details></figcaption>"
        "</figure>"
    )


def figure_of(chart: Chart) -> dict[str, Any]:
    """What the page's script draws a chart of."""
    target = anchor(chart.metrics[0]) if general_name(chart.metrics[0]) in glossary() else None
    return {"traces": [_escaped_names(trace) for trace in chart.traces], "axis": chart.axis, "definition": target}


def recipe_part(arms: Sequence[Arm], commands: Mapping[str, str], recipes: Mapping[str, str]) -> str:
    """Of each run the command that runs it again, its environment and its recipe."""
    parts = []
    for run in (run for arm in arms for run in arm.runs):
        key = str(run.path)
        environment = run.last("begun", "resumed").get("environment") or {}
        rows = [[escape(str(name)), escape(str(value))] for name, value in environment.items()]
        told = _table(["environment", ""], rows) if rows else "<p>No environment is recorded.</p>"
        parts.append(
            f"<article><h3>{escape(run.name)}</h3><p>Run it again:</p>{_copied(commands[key])}"
            f"<details><summary>environment</summary>{told}</details>"
            f"<details><summary>recipe.yaml: every key with its value</summary>{_copied(recipes[key])}</details>"
            "</article>"
        )
    return "".join(parts)


def glossary_part() -> str:
    """Every metric's definition, each with the id that the titles lead to."""
    rows = [
        f'<dt id="{anchor(name)}"><code>{escape(name)}</code></dt><dd>{_markdown(entry.definition)}'
        f"{f' <em>Healthy: {_markdown(entry.healthy)}.</em>' if entry.healthy else ''}</dd>"
        for name, entry in glossary().items()
    ]
    return f"<dl>{''.join(rows)}</dl>"


def samples_part(samples: Sequence[tuple[str, SampleData]]) -> tuple[str, str]:
    """The runs' samples, each in a script that is only data, and what is told of each."""
    scripts = "".join(
        f'<script type="application/octet-stream" class="samples-data" data-run="{escape(name)}">'
        f"{_lines(data)}</script>"
        for name, data in samples
    )
    told = "".join(f"<li>{escape(name)}: {escape(data.told)}</li>" for name, data in samples)
    return scripts, f"<ul class='told'>{told}</ul>" if len(samples) > 1 else f"<p>{escape(samples[0][1].told)}</p>"


def _lines(data: SampleData) -> str:
    """First which step has which queries, then a line a step: one that nobody looks at is never unpacked."""
    index = [{"step": one.step, "queries": list(one.queries), "floor": one.colour_floor} for one in data.steps]
    return "\n".join([packed(index), *(base64.b64encode(one.content).decode() for one in data.steps)])


def _one(one: Overview) -> str:
    facts = [*one.scores, ("time", duration(one.seconds))]
    tiles = "".join(f"<div><dt>{escape(about)}</dt><dd>{escape(value)}</dd></div>" for about, value in facts)
    lines = "".join(f"<p>{escape(line)}</p>" for line in one.introduction)
    said = "".join(f"<li>{escape(sentence)}</li>" for sentence in one.diagnoses)
    notes = "".join(f"<li>{escape(note)}</li>" for note in one.notes)
    history = "".join(f"<li>{escape(event)}</li>" for event in one.history)
    return (
        f"<p class='state'>{escape(one.state)}</p><dl class='tiles'>{tiles}</dl>"
        f"<h3>Diagnoses</h3>{f'<ul class=diagnoses>{said}</ul>' if said else '<p>None.</p>'}"
        f"{f'<h3>Not read</h3><ul>{notes}</ul>' if notes else ''}"
        f"<h3>What was trained, on what</h3>{lines}"
        f"{f'<details><summary>history</summary><ul>{history}</ul></details>' if history else ''}"
    )


def _metric_link(metric: str) -> str:
    known = general_name(metric) in glossary()
    name = f"<code>{escape(metric)}</code>"
    return f'<a href="#{anchor(metric)}">{name}</a>' if known else name


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Heads are escaped here, cells are HTML."""
    head = "".join(f"<th scope='col'>{escape(cell)}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _copied(text: str) -> str:
    return f"<div class='copied'><button type='button' class='copy'>copy</button><pre>{escape(text)}</pre></div>"


def _markdown(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))


def _escaped_names(trace: Mapping[str, Any]) -> dict[str, Any]:
    """plotly reads tags in a name."""
    return {**trace, "name": escape(trace["name"], quote=False)} if "name" in trace else dict(trace)
