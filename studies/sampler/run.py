"""Make every result of the study that is missing, the models that runs begin from first.

python -m studies.sampler.run                     # all of it; interrupted, it goes on where it was
python -m studies.sampler.run --only mixed/difficulty
"""

from pathlib import Path

from studies.harness.command import make_all
from studies.sampler.jobs import RESULTS, all_jobs

WORK = Path(__file__).parents[2] / "runs" / "sampler"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
