"""Records on disk and figures in words; without torch."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import first_line


def versions(*packages: str) -> dict[str, str]:
    """Return the versions a result depends on: Python, this package and those named."""
    names = ("pyramidkv", *packages)
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


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
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # names of files need be no valid text
        data = json.dumps(value, indent=2).encode()
    with replacing(path) as temporary:
        temporary.write_bytes(data + b"\n")


def read_json_object(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the JSON object in a file of bounded size.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no plain file, too large, no JSON in UTF-8, or no object; the message says
            which, to be put behind the file's name.
    """
    if path.exists() and not path.is_file():
        raise ValueError("is no plain file")
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"is larger than {most_bytes // 2**20} MiB")
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, not an object")
    return value


def parse_json(data: bytes, encoding: str = "utf-8-sig") -> Any:
    """Return what JSON in UTF-8 says, with a byte order mark in front or not.

    Raises:
        ValueError: it is none; the message is to be put behind the name of what holds it.
    """
    try:
        return json.loads(data.decode(encoding))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON in UTF-8 ({first_line(error)})") from None


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
