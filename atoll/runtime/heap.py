"""Keep what the C library's heap was given: a training step frees and takes the same sizes over and over.

By default glibc hands every block above some size back to the kernel when it is freed, and takes it anew with fresh zeroed
pages at the next microbatch. In a small GPT on one core that cost a tenth of the step in page faults, and their time varied
with what else the machine did, so that neither profile nor run could be trusted.
"""

from __future__ import annotations

import ctypes
import gc
import sys

__all__ = ["freeze_objects", "keep_heap"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_LARGEST = 32 << 20  # glibc refuses a higher threshold; larger blocks go on being mapped one by one
_NEVER = (1 << 31) - 1


def keep_heap() -> bool:
    """From here on freed memory stays with this process. Returns whether its C library has such a setting (glibc has).

    Cost: the process keeps the size of its high-water mark, which a step reaches anyway.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))


def freeze_objects() -> None:
    """Take everything that exists now out of the garbage collector's sight: it was made to stay, and walking through all
    of it (some 0.1 s with PyTorch and transformers loaded) would hit a random instruction of a random worker."""
    gc.collect()
    gc.freeze()
