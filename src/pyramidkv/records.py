"""Records on disk and figures in words; without torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file's path beside `path`, which it replaces if the block succeeds.

    Whatever happens meanwhile, `path` has its old content or all of the new one. A link's target
    is written, not the link.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode if path.exists() else 0o666 & ~_umask())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, whole or not at all; a link's target is written, not the link.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def method_title(parameters: Mapping[str, Any] | None) -> str:
    """Name a method and how much it keeps, from `Compression.parameters`; None: the full cache."""
    if parameters is None:
        return "full"
    if parameters["budget"] is not None:
        return f"{parameters['method']} {parameters['budget']}"
    if parameters["compression_ratio"] is not None:
        return f"{parameters['method']} {parameters['compression_ratio']:.0%} off"
    return str(parameters["method"])


def format_both(count: int) -> str:
    """Format bytes in decimal and, from 1 MiB on, in binary units: GiB is 2^30 bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{format_bytes(count)} ({count / size:,.1f} {unit})"
    return format_bytes(count)


def format_bytes(count: int) -> str:
    """Format bytes in decimal units: MB is 10^6 bytes, GB is 10^9."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
