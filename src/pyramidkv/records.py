"""Records on disk and figures in words; without torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; a link's target is written, not the link.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    path = path.resolve()
    temporary = path.with_name(f".pyramidkv-{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def format_bytes(count: int) -> str:
    """Format bytes in decimal units: MB is 10^6 bytes, GB is 10^9."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
