"""python supervise.py PARENT COMMAND…: run a server that ends, with all it has started, as soon as its parent does.

It is the first process of a group of its own, and looks a few times a second whether it has still the parent that has
started it: however that ends, the whole group is killed, this process with it. Only the standard library is used.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1  # of prctl


def main() -> None:
    """Start the command, and kill the group once the command or the parent has ended."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    with_us = (lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)) if libc else None
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=with_us)  # noqa: PLW1509 - no threads
        while server.poll() is None and os.getppid() == parent:
            time.sleep(0.1)
        status = server.poll()
        print(f"gspo: the server {'is ended' if status is None else f'has ended with status {status}'}", flush=True)
    except OSError as error:
        print(f"gspo: {command[0]} cannot be started: {error.strerror}", flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
