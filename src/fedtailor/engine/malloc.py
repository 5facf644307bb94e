"""How the C library hands memory out, where that costs time."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt

_LARGEST = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Have glibc, in the whole process, keep what is freed for the next step: it asks for the same
    large blocks over and over, and every 4 kB that come anew from the system cost a page fault."""
    mallopt = _glibc("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _LARGEST)


def give_back_freed_memory() -> None:
    """Have glibc give what is free now back to the system; nothing under another C library."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _glibc(name: str) -> Any:
    """A function of glibc; None under another C library, as musl is one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
