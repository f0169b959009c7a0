"""Draw the figure and write tables and answer between their markers in README.md: no number there is typed by hand.

python -m studies.engine_likelihoods.page
"""

from pathlib import Path

from studies.engine_likelihoods.figures import draw_all
from studies.engine_likelihoods.jobs import RESULTS
from studies.engine_likelihoods.runs import load_runs
from studies.engine_likelihoods.tables import TABLES
from studies.harness.page import write_page

PAGE = Path(__file__).with_name("README.md")

if __name__ == "__main__":
    write_page(PAGE, __doc__, results=RESULTS, load_runs=load_runs, draw_all=draw_all, tables=TABLES)
