"""Which process a number means: numbers are used again, and clocks are set."""

from pathlib import Path

import psutil

_STARTED = 19  # where a process's start, in ticks since boot, comes after its name in /proc/PID/stat


def process_identity(number: int) -> str | None:
    """What no other process has, on this machine or after its next boot; None where there is none of the number.

    On Linux the boot and the tick at which it began; elsewhere the time, which moves when the clock is set.
    """
    try:
        process = psutil.Process(number)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        stat = Path(f"/proc/{number}/stat")
        if not stat.exists():
            return f"{process.create_time():.0f}"
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {stat.read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()[_STARTED]}"
    except (psutil.Error, OSError, ValueError):  # ValueError: a number that no process can have
        return None
