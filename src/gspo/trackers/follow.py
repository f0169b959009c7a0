"""A process that sends a run to one tracker while it trains: python -m gspo.trackers.follow RUN_DIR NAME PID.

It only reads what training writes, so that nothing a tracker does or fails to do can hold training up.
"""

import os
import sys
import threading
import time
import traceback
from pathlib import Path

from gspo.report.run_files import read_run
from gspo.trackers.sender import sending
from gspo.trackers.track import send

NICENESS = 10
ORPHAN_SECONDS = 600.0  # for what is left to be sent once training was killed; then a tracker that hangs is let go of


def main() -> None:
    """Follow until the run has ended and everything is sent; exit code 1, the reason said last, where that fails."""
    path, name, parent = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.nice(NICENESS)
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()
    try:
        with sending(read_run(path), name, wait=True) as sender:
            for error in send([sender], path, follow=True).values():
                raise error
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a library that has failed may have more to say at an exit, or wait there for ever


def _end_after(parent: int) -> None:
    """End this process some time after the one that has started it."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(ORPHAN_SECONDS)
    print(
        f"training is gone, and the tracker is not done after {ORPHAN_SECONDS:g} s: ended", file=sys.stderr, flush=True
    )
    os._exit(1)


if __name__ == "__main__":
    main()
