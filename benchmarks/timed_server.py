"""`pyramidkv serve`, which writes how long compressing takes into the file `COMPRESSING_TIMES`.

A line for each layer and prompt, in seconds. `serving_steps.py` starts it. vLLM's processes import
this file too, so that they have what it replaces.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from pyramidkv.cli import main
from pyramidkv.vllm import cpu

_compress = cpu.CompressedCPUImpl._compress


def timed(layer: Any, *given: Any) -> None:
    """Compress one layer's prompt and note the time."""
    start = time.perf_counter()
    _compress(layer, *given)
    with Path(os.environ["COMPRESSING_TIMES"]).open("a") as file:
        file.write(f"{time.perf_counter() - start}\n")


cpu.CompressedCPUImpl._compress = timed  # type: ignore[method-assign]


def run_here(_: str, command: list[str]) -> None:
    """Run `python -m MODULE ...` in this process instead of in its place."""
    sys.argv = command[2:]
    runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    os.execv = run_here  # type: ignore[assignment]
    sys.argv.insert(1, "serve")
    main()
