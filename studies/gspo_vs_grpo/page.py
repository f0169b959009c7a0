"""Draw the figures and write the tables between their markers in README.md: no number there is typed by hand.

python -m studies.gspo_vs_grpo.page
"""

import argparse
import sys
from pathlib import Path

from studies.gspo_vs_grpo.figures import draw_all
from studies.gspo_vs_grpo.jobs import RESULTS
from studies.gspo_vs_grpo.runs import load_runs
from studies.gspo_vs_grpo.tables import TABLES
from studies.harness.markdown import write_tables

PAGE = Path(__file__).with_name("README.md")


def main() -> None:
    """Write the page and its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=PAGE.parent, help="the page's folder; figures/ lies in it")
    options = parser.parse_args()
    runs = load_runs(options.results)
    if not runs.found:
        sys.exit(
            f"no result of the study's recipes in {options.results}: make them with python -m studies.gspo_vs_grpo.run"
        )
    if runs.missing:
        print(f"no result of the recipes as they are now: {', '.join(runs.missing)}")
    draw_all(runs, options.output / "figures")
    write_tables(PAGE, options.output, {name: table(runs) for name, table in TABLES.items()})


if __name__ == "__main__":
    main()
