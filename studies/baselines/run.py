"""Make every result of the study that is missing; `make smollm2` comes first.

python -m studies.baselines.run --only sums_grid instructions_grid   # the grid of learning rates
python -m studies.baselines.rates                                    # each arm's rate, from the grid
python -m studies.baselines.run                                      # the rest; interrupted, it goes on where it was
"""

from pathlib import Path

from studies.baselines.arms import RESULTS, all_jobs
from studies.harness.command import make_all

WORK = Path(__file__).parents[2] / "runs" / "baselines"

if __name__ == "__main__":
    make_all(__doc__, [*all_jobs()], results=RESULTS, work=WORK)
