"""Become bubblewrap, as an unprivileged user: a program of its own, standard library only.

What its client passes on without knowing, such as blocked signals, is put back. A sandbox that real root
starts could write /proc/sys, and no limit of processes would bind it. What root alone can reach, such as an
interpreter below /root, is shown to that user, in a mount namespace of its own.
"""

import ctypes
import json
import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path

NEW_MOUNTS = 0x20000  # CLONE_NEWNS
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE
PR_SET_THP_DISABLE = 41
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Show the sources and drop root, where this process has it; become the command."""
    user, sources, command = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # the kernel may keep, uncounted, what is given back of a huge page
    if os.geteuid() == 0:
        drop_root(user, sources)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"the user {os.geteuid()} cannot execute {command[0]}: {error.strerror}")


def drop_root(user: int, sources: list[str]) -> None:
    """Become the user, who can reach the sources."""
    with suppress(PermissionError):  # root of a container, who may not mount: then the user must reach them
        check(libc.unshare(NEW_MOUNTS))
        check(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
        os.umask(0o022)
        opened = [(os.path.realpath(source), source, os.open(source, os.O_PATH)) for source in sources]
        for real, source, number in opened:  # one may cover another
            show(Path(real), number)
            show(Path(source), number)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def show(source: Path, number: int) -> None:
    """Put empty directories in the place of those above the source that others may not enter, and it there."""
    for parent in reversed(source.parents):
        if parent.exists() and not parent.stat().st_mode & stat.S_IXOTH:
            check(libc.mount(b"tmpfs", bytes(parent), b"tmpfs", 0, b"mode=755,size=1m"))
    if source.exists():
        return
    is_directory = stat.S_ISDIR(os.stat(number).st_mode)
    (source if is_directory else source.parent).mkdir(parents=True, exist_ok=True)
    if not is_directory:
        source.touch()
    check(libc.mount(f"/proc/self/fd/{number}".encode(), bytes(source), None, BIND, None))


def check(status: int) -> None:
    """OSError where a call of the C library's failed."""
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
