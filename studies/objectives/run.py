"""Make every result of the study that is missing, the models that runs begin from first.

python -m studies.objectives.run                                 # all of it; interrupted, it goes on where it was
python -m studies.objectives.run --only objectives length_16
"""

from pathlib import Path

from studies.harness.command import make_all
from studies.objectives.jobs import RESULTS, all_jobs

WORK = Path(__file__).parents[2] / "runs" / "objectives"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
