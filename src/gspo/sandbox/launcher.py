"""Become bubblewrap as an unprivileged user, from root: a program of its own, standard library only.

A sandbox that real root starts could write /proc/sys, and no limit of processes would bind it. What root alone can
reach, such as an interpreter below /root, is mounted where that user finds it, in a mount namespace of this process.
"""

import ctypes
import json
import os
import sys
from contextlib import suppress

NEW_MOUNTS = 0x20000  # CLONE_NEWNS
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # MS_BIND, MS_REC, MS_PRIVATE
PLACE = "/mnt"
libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Mount the sources, drop the user, become the command with its sources there."""
    user, sources, home, command = json.loads(sys.argv[1])
    moved: dict[str, str] = {}
    with suppress(PermissionError):  # root of a container, who may not mount: then the user must be able to reach them
        check(libc.unshare(NEW_MOUNTS))
        moved = mount(sources)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    command = [
        moved.get(word, word) if command[number - 1] == "--ro-bind" else word for number, word in enumerate(command)
    ]
    try:
        os.execv(moved.get(home, home) + command[0], command)
    except OSError as error:
        sys.exit(f"the user {user}, whom root becomes for it, cannot execute {home}{command[0]}: {error.strerror}")


def mount(sources: list[str]) -> dict[str, str]:
    """Mount each source below a new file system; where each lies then."""
    opened = {source: os.open(source, os.O_PATH) for source in sources}  # before anything covers it
    check(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
    check(libc.mount(b"tmpfs", PLACE.encode(), b"tmpfs", 0, b"mode=755,size=1m"))
    moved = {}
    for source, number in opened.items():
        target = f"{PLACE}/{number}"
        if os.path.isdir(source):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        check(libc.mount(f"/proc/self/fd/{number}".encode(), target.encode(), None, BIND, None))
        os.close(number)
        moved[source] = target
    return moved


def check(status: int) -> None:
    """OSError where a call of the C library's failed."""
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
