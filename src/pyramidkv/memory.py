"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

HAND_BACK_BYTES = 64 * 2**20
"""Freed memory is handed back each time this much has gathered: often enough to keep the peak
down, seldom enough for the system calls not to matter."""


class FreedMemory:
    """Makes the C library hand freed pages of the CPU's memory back to the system.

    glibc keeps blocks of a few MB on its own heap once one such block has been freed, and
    whatever is allocated among them stops the heap from shrinking: without this, a process that
    frees all but a few of its keys and values stays about as large as one that keeps them all.
    """

    def __init__(self) -> None:
        self._gathered = 0

    def add(self, device: torch.device, count: int) -> None:
        """Note `count` bytes that are freed or about to be; hand back if enough has gathered."""
        if device.type == "cpu":
            self._gathered += count
            if self._gathered >= HAND_BACK_BYTES:
                self.hand_back()

    def hand_back(self) -> None:
        """Hand back now what has gathered."""
        trim = _malloc_trim() if self._gathered else None
        if trim is not None:
            trim(0)
        self._gathered = 0


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # a C library other than glibc
        return None
    return function
