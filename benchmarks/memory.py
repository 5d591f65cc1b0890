"""Is the memory really freed? Peak and resident memory of a prompt, full against compressed.

Each arm runs in a process of its own. If layers are released one by one, the compressed peak is
lower than the full one by nearly (full cache - one full layer - kept cache); the figure printed
last is the share of that difference which was found.

    python benchmarks/memory.py [--model M] [--tokens 8000] [--budget 512]
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import common
import torch
from transformers import DynamicCache

import pyramidkv
from pyramidkv.engine import cache_parameter
from pyramidkv.measure import PeakMemory
from pyramidkv.records import format_bytes


def resident_bytes() -> int:
    """Return this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def run_arm(arm: str, arguments: Any) -> dict[str, int]:
    """Process the prompt once with one kind of cache and measure."""
    model, ids = common.load(arguments)
    name = cache_parameter(model)
    with torch.inference_mode():
        model(ids[:, :64], logits_to_keep=1)  # buffers that any pass allocates
        gc.collect()
        before = resident_bytes()
        cache: Any
        if arm == "full":
            cache = DynamicCache(config=model.config)
        else:
            cache = pyramidkv.CompressedCache(model, arguments.method, arguments.budget)
        peak = PeakMemory(torch.device("cpu"))
        peak.start()
        model(ids, logits_to_keep=1, use_cache=True, **{name: cache})
        highest = peak.bytes()
    gc.collect()
    if arm == "full":
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    else:
        held = cache.allocated_bytes
    return {
        "before": before,
        "peak_above": highest - before,
        "after_above": resident_bytes() - before,
        "cache_bytes": held,
        "layers": len(cache.layers),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--arm", choices=("full", "compressed"), help="run one arm only")
    parser.add_argument(
        "--return-blocks",
        action="store_true",
        help="have the C library return every freed block at once, in both arms: what remains is "
        "what is held, without what the library keeps for itself",
    )
    arguments = parser.parse_args()
    if arguments.arm:
        print(json.dumps(run_arm(arguments.arm, arguments)))
        return
    environment = dict(os.environ)
    if arguments.return_blocks:
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    runs: dict[str, list[dict[str, int]]] = {"full": [], "compressed": []}
    for _ in range(arguments.repeats):
        for arm, results in runs.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--arm", arm]
            finished = subprocess.run(
                command, check=True, capture_output=True, text=True, env=environment
            )
            results.append(json.loads(finished.stdout.splitlines()[-1]))

    def middle(arm: str, name: str) -> int:
        return int(common.median([run[name] for run in runs[arm]]))

    full, kept = middle("full", "cache_bytes"), middle("compressed", "cache_bytes")
    possible = full - full // middle("full", "layers") - kept
    saved = middle("full", "peak_above") - middle("compressed", "peak_above")
    saved_after = middle("full", "after_above") - middle("compressed", "after_above")
    for arm in runs:
        print(
            f"{arm:<11} cache {format_bytes(middle(arm, 'cache_bytes')):>9}, above the weights: "
            f"peak {format_bytes(middle(arm, 'peak_above')):>9}, "
            f"after the prompt {format_bytes(middle(arm, 'after_above')):>9}"
        )
    print(f"full - one layer - kept: {format_bytes(possible)}")
    print(f"peak lower by {format_bytes(saved)}: {saved / possible:.0%} of it")
    print(f"resident after the prompt lower by {format_bytes(saved_after)}")
    figures = {"runs": runs, "possible": possible, "saved": saved, "share": saved / possible}
    common.report(arguments, figures)


if __name__ == "__main__":
    main()
