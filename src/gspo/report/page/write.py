"""Writing the page: once, or again whenever a run has gone on."""

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path

from gspo.errors import UserError
from gspo.report.page import html
from gspo.report.page.arms import MOST_STEPS, Arm, arms_of
from gspo.report.page.charts import charts_of, every_metric
from gspo.report.page.overview import overview
from gspo.report.page.sample_data import sample_data
from gspo.report.page.told import state_told
from gspo.report.run_files import RunFiles, read_run
from gspo.report.shapes import section
from gspo.run.plain_files import content_of, read_plain, replace_text

Note = Callable[[str], object]

MAX_BYTES = 6_000_000  # of a page
_COMPARED = "compared.html"  # a run's own page is not replaced by one of several
_MARK, _MARKED = b'<meta name="generator" content="gspo report">', 1_000  # in the first bytes of a page
_LOOK_SECONDS = 2.0  # between two looks at a run that is watched
_REST = 10.0  # times as long as a page took to write: the cores are for training
_RELOAD_SECONDS = 20  # after which a page of a run under way shows what there is then


def write_report(paths: Sequence[Path], out: Path | None = None, *, note: Note) -> Path:
    """Write the page of one run or several, and say where.

    By default that of one into its directory, and that of several, `compared.html`, into the working directory.

    Raises UserError where a directory is no run, or the file cannot be written.
    """
    target = _target(paths, out)
    _replace(target, document([read_run(path) for path in _distinct(paths)]))
    note(f"report: {target}")
    return target


def watch(
    paths: Sequence[Path], out: Path | None = None, *, note: Note, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write the page, and again whenever there is more to show, until none of the runs is under way.

    Raises UserError as `write_report` does.
    """
    target, seen, said = _target(paths, out), None, False
    while True:
        runs = [read_run(path) for path in _distinct(paths)]
        running = any(run.state == "running" for run in runs)
        now = [(run.num_steps, len(run.cold_start), len(run.history), len(run.rollout_files)) for run in runs]
        started = time.monotonic()
        if now != seen or not running:
            _replace(target, document(runs, reload_seconds=_RELOAD_SECONDS if running else None))
            seen = now
        if not said and running:
            note(f"report: {target} (written again as the run goes on; Ctrl-C ends this)")
            said = True
        if not running:
            for run in runs:
                note(f"{run.name}: {state_told(run)}")
            note(f"report: {target}{'' if said else ' (written once: no run is under way)'}")
            return
        sleep(max(_LOOK_SECONDS, _REST * (time.monotonic() - started)))


def document(runs: Sequence[RunFiles], *, reload_seconds: int | None = None) -> str:
    """The whole page."""
    arms = arms_of(runs)
    charts, others = charts_of(arms), every_metric(arms)
    figures = {
        "charts": [html.figure_of(chart) for chart in charts],
        "others": {name: html.figure_of(chart) for name, chart in others.items()},
        "reload_seconds": reload_seconds,
        "resumed": _resumed(runs),
    }
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    recipes = {str(run.path): content_of(run.path / "recipe.yaml").decode(errors="replace") for run in runs}
    parts = {
        "title": escape(title),
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "overview": html.overview_part([overview(run) for run in runs]) + html.arms_part(arms),
        "differences": html.differences_part(arms),
        "thinned": _thinned(arms),
        "charts": "".join(html.chart_part(number, chart) for number, chart in enumerate(charts))
        or "<p>There is no line in metrics.jsonl yet: no step is done.</p>",
        "figures": html.packed(figures),
        "recipes": html.recipe_part(arms, {str(run.path): rerun_command(run) for run in runs}, recipes),
        "glossary": html.glossary_part(),
    }
    samples, told = html.samples_part(
        _samples(runs, MAX_BYTES - len(html.page({**parts, "samples": "", "told": ""}).encode()))
    )
    return html.page({**parts, "samples": samples, "told": told})


def rerun_command(run: RunFiles) -> str:
    """What runs the recipe again, under another name, from where the run was begun."""
    name = f"name={run.name}-again"
    home = run.last("begun", "resumed").get("working_directory")
    recipe = str((run.path / "recipe.yaml").absolute())
    queries = section(run.recipe, "queries")
    if not run.recipe.get("reward") or not (queries.get("path") or queries.get("procedural")):
        return f'gspo.train(gspo.load_recipe({json.dumps(recipe)}, ["{name}", "output_dir=null"]), queries=…, reward=…)'
    go = f"cd {shlex.quote(str(home))} && " if home else ""
    return f"{go}gspo train {shlex.quote(recipe)} {shlex.quote(name)} output_dir=null"


def _samples(runs: Sequence[RunFiles], max_characters: int) -> list[tuple[str, html.SampleData]]:
    """The runs share what is left of the page evenly; base64 takes four letters for three bytes."""
    around = 2_000  # a run's tag and what is told of it
    names = [run.name if sum(other.name == run.name for other in runs) == 1 else str(run.path) for run in runs]
    each = max(0, max_characters // len(runs) - around) * 3 // 4
    return [(name, sample_data(run, each)) for name, run in zip(names, runs, strict=True)]


def _resumed(runs: Sequence[RunFiles]) -> list[int]:
    """The steps after which a single run was taken up again."""
    if len(runs) > 1:
        return []
    return [line["step"] for line in runs[0].history if line.get("event") == "resumed" and line.get("step")]


def _thinned(arms: Sequence[Arm]) -> str:
    most = max(arm.num_steps for arm in arms)
    if most <= MOST_STEPS:
        return ""
    return f"<p>Of {most:,} steps about {MOST_STEPS:,}, evenly spread, are drawn; all are in metrics.jsonl.</p>"


def _target(paths: Sequence[Path], out: Path | None) -> Path:
    is_one = len(_distinct(paths)) == 1
    target = out or (paths[0] / "report.html" if is_one else Path(_COMPARED))
    if out is None:
        read_run(paths[0])  # says what is wrong with it rather than with the file
    if _is_directory(target):
        raise UserError("this is a directory", where=str(target), fix="name a file: --out report.html")
    if not _is_directory(target.parent):
        raise UserError("there is no such directory to write to", where=str(target.parent), fix="make it first")
    is_own = out is None and is_one  # any other file may be one of the run's
    if not is_own and os.path.lexists(target) and not _is_page(target):
        fix = "name a file that is not there yet, such as --out page.html"
        raise UserError("this file exists and is no page that gspo has written", where=str(target), fix=fix)
    return target


def _is_page(path: Path) -> bool:
    try:
        return _MARK in read_plain(path)[:_MARKED]
    except OSError:  # whatever it is, it is not ours
        return False


def _distinct(paths: Sequence[Path]) -> list[Path]:
    """Each directory once, however it is spelled: or it would pass for two seeds."""
    found: dict[str, Path] = {}
    for path in paths:
        found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # no such name can be
        return False


def _replace(target: Path, text: str) -> None:
    """At any instant there is a whole page, though a process that watches and one that trains write at once."""
    try:
        replace_text(target, text, is_only_writer=False)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", where=str(target), fix="set --out") from None
