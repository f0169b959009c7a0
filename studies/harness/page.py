"""A study's page: its figures drawn, and its tables written between their markers in README.md."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from studies.harness.markdown import write_tables


def write_page(
    page: Path,
    description: str | None,
    *,
    results: Path,
    load_runs: Callable[[Path], Any],
    draw_all: Callable[[Any, Path], Any],
    tables: Mapping[str, Callable[[Any], str]],
) -> None:
    """From the results that the command line names, the study's own by default; ends where there are none."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=results)
    parser.add_argument("--output", type=Path, default=page.parent, help="the page's folder; figures/ lies in it")
    options = parser.parse_args()
    runs = load_runs(options.results)
    if not runs.found:
        command = f"python -m studies.{page.parent.name}.run"
        sys.exit(f"no result of the study's recipes in {options.results}: make them with {command}")
    if runs.missing:
        print(f"no result of the recipes as they are now: {', '.join(runs.missing)}")
    draw_all(runs, options.output / "figures")
    write_tables(page, options.output, {name: table(runs) for name, table in tables.items()})
