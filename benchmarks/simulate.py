"""How long does `pyramidkv simulate` take, from the shell's prompt back to it?

Each run is a process of its own, so that starting Python and importing numpy count. The first of
each length is a warm-up and not counted.

    python benchmarks/simulate.py [--lengths 4096,131072] [--layers 32] [--repeats 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common

COMMAND = [sys.executable, "-m", "pyramidkv", "simulate"]


def one(layers: int, length: int, threads: int) -> float:
    """Return the seconds that one run takes."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [*COMMAND, "--layers", str(layers), "--length", str(length)]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="4096,131072", help="prompt tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for length in map(int, arguments.lengths.split(",")):
        _, *seconds = (
            one(arguments.layers, length, arguments.threads) for _ in range(arguments.repeats + 1)
        )
        runs.append({"length": length, "layers": arguments.layers, "seconds": seconds})
        print(
            f"{length:>9,} tokens, {arguments.layers} layers: {common.spread(seconds)}", flush=True
        )
    common.report(arguments, {"runs": runs})


if __name__ == "__main__":
    main()
