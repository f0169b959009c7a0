"""Draw the figures and write the tables between their markers in README.md: no number there is typed by hand.

python -m studies.gspo_vs_grpo.page
"""

from pathlib import Path

from studies.gspo_vs_grpo.figures import draw_all
from studies.gspo_vs_grpo.jobs import RESULTS
from studies.gspo_vs_grpo.runs import load_runs
from studies.gspo_vs_grpo.tables import TABLES
from studies.harness.page import write_page

PAGE = Path(__file__).with_name("README.md")

if __name__ == "__main__":
    write_page(PAGE, __doc__, results=RESULTS, load_runs=load_runs, draw_all=draw_all, tables=TABLES)
