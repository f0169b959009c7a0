"""Writing the page of a run, of several side by side, or of evaluations: one file that loads nothing."""

import base64
import gzip
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from gspo.errors import UserError, writing
from gspo.report.page.data import run_data
from gspo.report.run_files import RunFiles, read_run, runs_in
from gspo.report.samples import Contents, sample_sets
from gspo.run.plain_files import replace_text

MAX_BYTES = 12_000_000  # of samples in a page: packed a half of that at most, and mostly a twentieth
_MARK, _MARKED = b'<meta name="generator" content="gspo report">', 1_000  # in the first bytes of a page
_UPLOT = "uPlot-1.6.32"
_SCRIPTS = ("store", "theme", "charts", "plot", "tokens", "queries", "samples", "evaluation", "page")


def write_report(paths: Sequence[Path], out: Path | None = None, *, note: Callable[[str], object]) -> Path:
    """Write the page of a run or of several, and say where.

    By default the page of a run goes into its directory, that of several into the working directory as `compared.html`.

    Raises UserError where a directory is no run, or the file cannot be written.
    """
    paths = distinct(paths)
    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("compared.html"))
    replace_page(target, lambda: document([read_run(path) for path in paths]))
    note(f"report: {target}")
    return target


def document(runs: Sequence[RunFiles], *, live: bool = False) -> str:
    """The page of runs. A live page has no samples in it: it fetches them, and its data again, from its server."""
    sets = [] if live else sample_sets(runs)
    contents = [samples.contents(MAX_BYTES // len(sets)) for samples in sets]
    pairs = [(samples.index(own), own) for samples, own in zip(sets, contents, strict=True)]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return filled("run", title, script_json(run_data(runs, live=live)), pairs, live=live)


def filled(kind: str, title: str, data: str, sets: Sequence[tuple[Any, Contents]], *, live: bool = False) -> str:
    """The page of a `run` or an `evaluation`: its data, and the index and the groups of each set of samples."""
    contents = [{step: packed(groups) for step, groups in own.items()} for _, own in sets]
    parts = {
        "title": escape(title),
        "kind": kind,
        "connect": "; connect-src 'self'" if live else "",
        "uplot_style": asset(f"{_UPLOT}.min.css"),
        "style": asset("style.css") + asset("samples.css"),
        "uplot": f"/*\n{asset('uPlot-LICENSE.txt')}*/\n{asset(f'{_UPLOT}.iife.min.js')}",
        "script": "\n".join(asset(f"{name}.js") for name in _SCRIPTS),
        "data": data,
        "samples": json.dumps({"live": live, "index": packed([index for index, _ in sets]), "contents": contents}),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))  # once: a part is left as it is
    return text.encode(errors="replace").decode()  # half a character becomes a question mark


def script_json(content: Any) -> str:
    """JSON without a letter that means something to HTML."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")


def packed(content: Any) -> str:
    """The content as the page's scripts unpack it: JSON, compressed, in letters that mean nothing to HTML."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def asset(name: str) -> str:
    """The text of a file that the page is made of."""
    return files("gspo.report.page").joinpath("assets", name).read_text(encoding="utf-8")


def distinct(paths: Sequence[Path]) -> list[Path]:
    """The runs, those in a directory of runs too, each once, however it is spelled: or it would pass for two seeds."""
    inside = {path: [] if os.path.lexists(path / "recipe.yaml") else runs_in(path) for path in paths}
    paths = [run for path in paths for run in map(Path, inside[path] or [str(path)])]
    return list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]


def replace_page(target: Path, make: Callable[[], str]) -> None:
    """Write a page where no other file is; at any instant it is whole, though two processes may write it at once."""
    fix = "name a file that is not there yet, such as --out page.html"
    with writing(target, fix):
        if os.path.lexists(target) and _MARK not in target.read_bytes()[:_MARKED]:
            raise UserError("this is there already, and is no page that gspo has written", where=str(target), fix=fix)
        replace_text(target, make(), mark=f"{secrets.token_hex(8)}_")
