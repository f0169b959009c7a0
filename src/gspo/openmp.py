"""How OpenMP's threads wait for work, which is to be said before torch is imported."""

import os
import sys

# The embedded engine decodes in a thread, which has a team of OpenMP threads of its own. GNU's OpenMP then counts more
# threads than cores and lets them sleep after 100 looks for work, so that small models are sampled at half the speed.
# With `active` they look 1000 times. The spin count is the default, which `active` alone would make endless.
OPENMP = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"} if sys.platform == "linux" else {}


def set_wait_policy() -> None:
    """Set the variables, unless the user has said how threads wait."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ.update(OPENMP)
