"""Run commands of gspo on a pretended GPU: `python -m tests.pretended_gpu DIRECTORY < commands`.

Each line of the input is a command's words as JSON, or `weights` and what hand_over.py takes. Each gets a line of
output that begins with MARK: its exit status, what waited for the GPU in it, by line, and what was copied there while
the host waited. With GSPO_TESTS_ON_GPU=1 the GPU is a real one, and nothing is counted.
"""

import json
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

from tests.pretended_gpu import guard

MARK = "pretended GPU: "


def main() -> None:
    """Run the commands in this directory, where what the pretence needs is built, too."""
    is_real = os.environ.get("GSPO_TESTS_ON_GPU") == "1"
    if not is_real:
        guard.load(Path(sys.argv[1]))  # before torch is imported

    from tests.pretended_gpu import gpu
    from tests.pretended_gpu.hand_over import write_weights

    from gspo import cli

    if not is_real:
        gpu.install()
    for line in sys.stdin:
        first, *rest = words = json.loads(line)
        try:
            with nullcontext() if is_real else gpu.PretendedGpu():
                status = write_weights(rest[0], rest[1:]) if first == "weights" else cli.main(words)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            status = 1
        print(MARK + json.dumps({"status": status, "waits": gpu.waits, "copies": gpu.copies}), flush=True)
        gpu.waits.clear()
        gpu.copies.clear()


if __name__ == "__main__":
    main()
