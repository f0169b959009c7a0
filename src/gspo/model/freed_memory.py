"""Memory that passes on a CPU have freed is kept for the next: new pages cost more than what is computed in them."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, as malloc.h numbers them
_MOST = 2**31 - 1  # bytes, the most that an int holds
_MOST_OF_OLDER = 2**25  # bytes, the most that glibc before 2.35 takes


def keep_freed_memory() -> None:
    """Have glibc take large blocks from its heap, and keep there what is free, also up to 2 GiB at its end.

    By default a block of 32 MiB or more is given back when it is freed, and the kernel clears every page of the next
    one: 41 ms for the gradient of an embedding of 113 MB, which is added to in 5. It holds for the whole process, whose
    memory may stay larger between passes. Other C libraries stay as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # The first that is taken ends the threshold's own growth, so the order matters.
    if mallopt is not None and any(mallopt(_MMAP_THRESHOLD, size) for size in (_MOST, _MOST_OF_OLDER)):
        mallopt(_TRIM_THRESHOLD, _MOST)
