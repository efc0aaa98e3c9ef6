"""Keeps the memory that an update frees, for the next one.

glibc gives freed memory at the end of its heap back to the system, at most 64 MiB late, and every update then pays for
clean pages again: on small policies a fifth of its time.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**30
# What is larger than this glibc never takes from its heap (its own limit too), and gives back at once.
LARGE = 2**25


def keep_freed_memory() -> bool:
    """Let glibc keep up to 1 GiB of freed memory in blocks below 32 MiB; whether it does. Where the environment says
    how malloc works (``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``) or there is no glibc, nothing changes."""
    if any(name.startswith(("MALLOC_TRIM", "MALLOC_MMAP")) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, LARGE)) and bool(mallopt(_TRIM_THRESHOLD, KEPT))
