"""Make every result of the study that is missing, the model that runs begin from first.

python -m studies.staleness.run                                 # all of it; interrupted, it goes on where it was
python -m studies.staleness.run --only staleness_0 staleness_8/gspo
"""

from pathlib import Path

from studies.harness.command import make_all
from studies.staleness.jobs import RESULTS, all_jobs

WORK = Path(__file__).parents[2] / "runs" / "staleness"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
