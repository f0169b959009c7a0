"""Memory that passes on a CPU have freed is kept for the next: new pages cost more than what is computed in them."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, as malloc.h numbers them
_MOST = 2**31 - 1  # bytes, the most that it takes


def keep_freed_memory() -> None:
    """Have glibc take large blocks from its heap and keep up to 2 GiB that are free at the heap's end.

    By default a block of 32 MiB or more is given back when it is freed, and the kernel clears every page of the next
    one: 41 ms for the gradient of an embedding of 113 MB, which is added to in 5. Other C libraries stay as they are.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_TRIM_THRESHOLD, _MOST)
        mallopt(_MMAP_THRESHOLD, _MOST)
