"""Against other libraries, each in its own environment, on the same prompts, in turns.

kvpress is another library for transformers; OpenVINO GenAI is an engine of its own with a paged
cache and its own eviction. Each engine is a process (`peer_worker.py`) that loads the model once;
one measures while the others wait. What compressing adds to a prompt is told against the same
engine's full cache, in the same turn.

    python benchmarks/peers.py --model FOLDER [--lengths 4096,8192] [--budget 512] [--steps 32]
        [--arms pyramidkv,adakv] [--kvpress PYTHON]
        [--openvino PYTHON --openvino-model FILE_OR_FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common

WORKER = Path(__file__).with_name("peer_worker.py")
WARM_UP = {"tokens": 600, "budget": 128, "steps": 4, "seed": 0}


class Worker:
    """An engine that waits for its turn."""

    def __init__(self, python: str, engine: str, model: str, threads: int):
        command = [python, str(WORKER), engine, model, "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        told = self._read()
        self.engine, self.arms, self.versions = engine, told["arms"], told["versions"]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended: {self._process.args}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def choose(self, names: str | None) -> None:
        """Leave only the arms of these names, and the full cache; run each on a short prompt."""
        if names is not None:
            self.arms = [arm for arm in self.arms if arm in ("full", *names.split(","))]
        for arm in self.arms:
            self.measure(arm=arm, **WARM_UP)

    def measure(self, **asked: Any) -> dict[str, Any]:
        """Return what the engine measures."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._read()


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(repeats=3)
    parser.add_argument("--lengths", default="8192", help="instead of --tokens, such as 4096,8192")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--arms", help="only these, besides full, of each engine that has them")
    parser.add_argument("--kvpress", help="a Python that has kvpress")
    parser.add_argument("--openvino", help="a Python that has openvino-genai")
    parser.add_argument("--openvino-model", help="the model as OpenVINO takes it")
    arguments = parser.parse_args()
    engines = {"pyramidkv": (sys.executable, arguments.model)}
    if arguments.kvpress:
        engines["kvpress"] = arguments.kvpress, arguments.model
    if arguments.openvino:
        engines["openvino"] = arguments.openvino, arguments.openvino_model
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(python, engine, model, arguments.threads))
            for engine, (python, model) in engines.items()
        ]
        for worker in workers:
            worker.choose(arguments.arms)
        for tokens in map(int, arguments.lengths.split(",")):
            found = measure(workers, tokens, arguments)
            figures[str(tokens)] = {
                f"{engine} {arm}": runs for (engine, arm), runs in found.items()
            }
            show(tokens, found)
        versions = {f"{w.engine}: {n}": v for w in workers for n, v in w.versions.items()}
    common.report(arguments, {"lengths": figures}, versions)


def measure(
    workers: list[Worker], tokens: int, arguments: argparse.Namespace
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return what each arm of each engine measured in each turn."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in range(arguments.repeats):
        for worker in workers:
            for arm in worker.arms:
                asked = {"tokens": tokens, "budget": arguments.budget, "steps": arguments.steps}
                told = worker.measure(arm=arm, seed=turn, **asked)
                told["step_s"] = common.median(told["step_s"])
                found.setdefault((worker.engine, arm), []).append(told)
    return found


def show(tokens: int, found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Print a length's figures."""
    print(f"\nprompts of {tokens:,} tokens")
    for (engine, arm), runs in found.items():
        full = found[engine, "full"]
        added = [a["prefill_s"] / b["prefill_s"] - 1 for a, b in zip(runs, full, strict=True)]
        of_full = [a["step_s"] / b["step_s"] for a, b in zip(runs, full, strict=True)]
        print(
            f"{engine} {arm}: prompt {common.spread([r['prefill_s'] for r in runs])}, "
            f"{100 * common.median(added):+.1f}% of full; token "
            f"{common.spread([r['step_s'] for r in runs])}, {common.median(of_full):.2f}x; "
            f"{runs[0]['kv_bytes'] / 1e6:.1f} MB",
            flush=True,
        )


if __name__ == "__main__":
    main()
