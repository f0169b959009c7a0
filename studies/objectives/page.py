"""Draw the figure and write the tables between their markers in README.md: no number there is typed by hand.

python -m studies.objectives.page
"""

from pathlib import Path

from studies.harness.page import write_page
from studies.objectives.figures import draw_all
from studies.objectives.jobs import RESULTS
from studies.objectives.runs import load_runs
from studies.objectives.tables import TABLES

PAGE = Path(__file__).with_name("README.md")

if __name__ == "__main__":
    write_page(PAGE, __doc__, results=RESULTS, load_runs=load_runs, draw_all=draw_all, tables=TABLES)
