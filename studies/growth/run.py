"""Make every result of the study that is missing, the model that runs begin from first.

python -m studies.growth.run                     # all of it; interrupted, it goes on where it was
python -m studies.growth.run --only sums/phases
"""

from pathlib import Path

from studies.growth.jobs import RESULTS, all_jobs
from studies.harness.command import make_all

WORK = Path(__file__).parents[2] / "runs" / "growth"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
