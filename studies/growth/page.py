"""Draw the figure and write the table between their markers in README.md: no number there is typed by hand.

python -m studies.growth.page
"""

from functools import partial
from pathlib import Path

from studies.growth.figures import draw_all
from studies.growth.jobs import RESULTS, all_jobs
from studies.growth.tables import TABLES
from studies.harness.page import write_page
from studies.harness.runs import read_runs

PAGE = Path(__file__).with_name("README.md")

if __name__ == "__main__":
    load = partial(read_runs, jobs=[*all_jobs()])
    write_page(PAGE, __doc__, results=RESULTS, load_runs=load, draw_all=draw_all, tables=TABLES)
