"""Does memory stay flat while thousands of tokens are generated within a decode budget?

python benchmarks/long_generation.py [--new-tokens 5000] [--budget 512] [--interval 32]
"""

from __future__ import annotations

import time
from typing import Any

import common
import torch
from memory import resident_bytes

import pyramidkv
from pyramidkv.engine import cache_parameter
from pyramidkv.records import format_bytes


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(tokens=1000)
    parser.add_argument("--new-tokens", type=int, default=5000)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--every", type=int, default=500, help="tokens between two measurements")
    parser.add_argument("--unbounded", action="store_true", help="without a decode budget")
    arguments = parser.parse_args()
    model, ids = common.load(arguments)
    settings: dict[str, Any] = {}
    if not arguments.unbounded:
        settings = {"decode_budget": arguments.budget, "decode_interval": arguments.interval}
    cache = pyramidkv.CompressedCache(model, arguments.method, arguments.budget, **settings)
    name = cache_parameter(model)
    layers = len(cache.compressed_layers)
    rows = []
    most = 0
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=1, use_cache=True, **{name: cache}).logits
        start = time.perf_counter()
        for index in range(1, arguments.new_tokens + 1):
            # sampled: greedy text of a small model soon repeats itself
            token = logits[:, -1].softmax(-1).multinomial(1)
            logits = model(token, use_cache=True, **{name: cache}).logits
            kept = sum(lengths[0] for lengths in cache.kept_lengths())
            most = max(most, kept)
            if index % arguments.every == 0:
                step = (time.perf_counter() - start) / arguments.every
                start = time.perf_counter()
                rows.append(
                    {
                        "generated": index,
                        "kept_per_layer": kept / layers,
                        "allocated_bytes": cache.allocated_bytes,
                        "resident_bytes": resident_bytes(),
                        "seconds_per_token": step,
                    }
                )
                print(
                    f"{index:>6,} generated: {kept / layers:,.1f} kept per layer, cache "
                    f"{format_bytes(cache.allocated_bytes)}, process "
                    f"{format_bytes(resident_bytes())}, {step * 1000:.1f} ms per token",
                    flush=True,
                )
    print(f"at most {most / layers:,.1f} tokens per layer at any step")
    common.report(arguments, {"rows": rows, "most_per_layer": most / layers})


if __name__ == "__main__":
    main()
