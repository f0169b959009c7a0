"""Draw the figure and write the table between their markers in README.md: no number there is typed by hand.

python -m studies.sampler.page
"""

from functools import partial
from pathlib import Path

from studies.harness.page import write_page
from studies.harness.runs import read_runs
from studies.sampler.figures import draw_all
from studies.sampler.jobs import RESULTS, all_jobs
from studies.sampler.tables import TABLES

PAGE = Path(__file__).with_name("README.md")

if __name__ == "__main__":
    load = partial(read_runs, jobs=[*all_jobs()])
    write_page(PAGE, __doc__, results=RESULTS, load_runs=load, draw_all=draw_all, tables=TABLES)
