"""The root of every error this package raises on purpose."""

from __future__ import annotations

import traceback
from pathlib import Path


class PyramidKVError(Exception):
    """Something the user can put right; the message is one sentence that says how."""


class PromptError(PyramidKVError, ValueError):
    """The prompt, or the batch of prompts, cannot be processed as it is."""


class CacheStateError(PyramidKVError, RuntimeError):
    """The cache cannot do this in its present state; the message says what to do instead."""


class ContextFileError(PyramidKVError, OSError):
    """A saved context that cannot be written, or cannot be used; the message says why."""


class HarnessError(PyramidKVError):
    """What lm-evaluation-harness needs or asks for cannot be had; the message says why."""


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def raised_in(error: BaseException, file: str | None) -> str:
    """Tell an error of a user's own code: its type, what it says, and the line of that file."""
    name = type(error).__name__
    said = error.msg if isinstance(error, SyntaxError) else first_line(error)
    told = name if said == name else f"{name}: {said}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    return f"{told} (line {lines[-1]} of {Path(file).name!r})" if file and lines else told
