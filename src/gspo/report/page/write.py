"""Writing the page of a run, or of several side by side."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gspo.errors import UserError
from gspo.report.page.data import run_data
from gspo.report.page.sample_data import samples_json
from gspo.report.run_files import RunFiles, read_run, runs_in
from gspo.run.plain_files import read_plain, replace_text

Note = Callable[[str], object]

_COMPARED = "compared.html"  # a page of several runs does not replace a run's own page
_MARK, _MARKED = b'<meta name="generator" content="gspo report">', 1_000  # in the first bytes of a page
_UPLOT = "uPlot-1.6.32"
_SCRIPTS = ("store.js", "theme.js", "charts.js", "plot.js", "tokens.js", "queries.js", "samples.js", "page.js")


def write_report(paths: Sequence[Path], out: Path | None = None, *, note: Note) -> Path:
    """Write the page of a run or of several, and say where.

    By default the page of a run goes into its directory, that of several into the working directory as `compared.html`.

    Raises UserError where a directory is no run, or the file cannot be written.
    """
    target = _target(distinct(paths), out)
    replace_page(target, document([read_run(path) for path in distinct(paths)]))
    note(f"report: {target}")
    return target


def document(runs: Sequence[RunFiles], *, live: bool = False) -> str:
    """The whole page. A live page has no samples in it: it fetches them, and its data again, from its server."""
    parts = {
        "title": escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs"),
        "connect": "; connect-src 'self'" if live else "",
        "uplot_style": asset(f"{_UPLOT}.min.css"),
        "style": asset("style.css") + asset("samples.css"),
        "uplot": f"/*\n{asset('uPlot-LICENSE.txt')}*/\n{asset(f'{_UPLOT}.iife.min.js')}",
        "script": "\n".join(map(asset, _SCRIPTS)),
        "data": page_json(runs, live=live),
        "samples": '{"live":true}' if live else samples_json(runs),
    }
    return filled("page.html", parts)


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with each `{{name}}` replaced by its part, once: a part is left as it is."""
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset(template))
    return text.encode(errors="replace").decode()  # half a character becomes a question mark


def page_json(runs: Sequence[RunFiles], *, live: bool = False) -> str:
    """All that the page shows but the samples."""
    return script_json(run_data(runs, live=live))


def script_json(content: Any) -> str:
    """JSON without a letter that means something to HTML."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")


def asset(name: str) -> str:
    """The text of a file that the page is made of."""
    return files("gspo.report.page").joinpath("assets", name).read_text(encoding="utf-8")


def _target(paths: Sequence[Path], out: Path | None) -> Path:
    is_own = out is None and len(paths) == 1  # any other file may be one of the run's
    target = paths[0] / "report.html" if is_own else out or Path(_COMPARED)
    if not is_own:
        check_replaceable(target)
    return target


def check_replaceable(target: Path) -> None:
    """UserError where a file is there that is no page of ours."""
    if os.path.lexists(target) and not _is_page(target):
        fix = "name a file that is not there yet, such as --out page.html"
        raise UserError("this is there already, and is no page that gspo has written", where=str(target), fix=fix)


def _is_page(path: Path) -> bool:
    try:
        return _MARK in read_plain(path)[:_MARKED]
    except OSError:  # whatever it is, it is not ours
        return False


def distinct(paths: Sequence[Path]) -> list[Path]:
    """The runs, those in a directory of runs too, each once, however it is spelled: or it would pass for two seeds."""
    inside = {path: [] if os.path.lexists(path / "recipe.yaml") else runs_in(path) for path in paths}
    paths = [run for path in paths for run in map(Path, inside[path] or [str(path)])]
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def replace_page(target: Path, text: str) -> None:
    """At any instant there is a whole page, though `gspo report` and a run that ends may write at once."""
    try:
        replace_text(target, text, is_only_writer=False)
    except OSError as error:
        fix = "name another file: --out page.html"
        raise UserError(f"cannot be written: {error.strerror}", where=str(target), fix=fix) from None
