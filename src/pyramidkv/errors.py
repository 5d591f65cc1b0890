"""The root of every error this package raises on purpose."""

from __future__ import annotations


class PyramidKVError(Exception):
    """Something the user can put right; the message is one sentence that says how."""


class PromptError(PyramidKVError, ValueError):
    """The prompt, or the batch of prompts, cannot be processed as it is."""


class CacheStateError(PyramidKVError, RuntimeError):
    """The cache cannot do this in its present state; the message says what to do instead."""


class ContextFileError(PyramidKVError, OSError):
    """A saved context that cannot be written, or cannot be used; the message says why."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
