"""Files of samples: those of real benchmarks, in `../shared/data` beside the project's root, and
small ones that tests write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def shared_data(name: str) -> Path:
    """Return a file or folder of the data; skip the test if it is not there."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"needs {name}, in the folder ../shared/data beside the project's root")
    return path


def json_lines(path: Path, *lines: object) -> Path:
    """Write objects, or texts as they are, one per line."""
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path
