"""Make every result of the study that is missing, the model that runs begin from first.

python -m studies.turns.run                     # all of it; interrupted, it goes on where it was
python -m studies.turns.run --only quiz/turn
"""

from pathlib import Path

from studies.harness.command import make_all
from studies.turns.jobs import RESULTS, all_jobs

WORK = Path(__file__).parents[2] / "runs" / "turns"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
