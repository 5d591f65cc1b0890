"""What does a compressed layer cost the host, for each token? On GPUs, small steps wait for that.

A random model of many tiny layers decodes from a compressed cache and from a `DynamicCache`, in
turns; the difference of the medians is divided by the layers. One thread.

    python benchmarks/host_overhead.py [--layers 32] [--repeats 5]
"""

from __future__ import annotations

import time
from typing import Any

import common
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import pyramidkv
from pyramidkv.engine import cache_parameter

PROMPT, STEPS = 200, 60


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(budget=64)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
    )
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(0, 200, (1, PROMPT))
    caches: dict[str, Any] = {
        "compressed": pyramidkv.CompressedCache(model, arguments.method, arguments.budget),
        "full": DynamicCache(config=config),
    }
    name = cache_parameter(model)
    seconds: dict[str, list[float]] = {arm: [] for arm in caches}
    with torch.inference_mode():
        for cache in caches.values():
            model(ids, use_cache=True, **{name: cache})
        for repeat in range(arguments.repeats + 1):
            for arm, cache in caches.items():
                for _ in range(STEPS):
                    start = time.perf_counter()
                    model(ids[:, :1], use_cache=True, **{name: cache})
                    if repeat:
                        seconds[arm].append(time.perf_counter() - start)
    compressed, full = (common.median(seconds[arm]) for arm in caches)
    more = (compressed - full) / arguments.layers
    print(f"a step of {arguments.layers} layers: {1000 * compressed:.2f} ms compressed, ", end="")
    print(f"{1000 * full:.2f} ms full; {1e6 * more:.0f} microseconds more per layer")
    common.report(arguments, {"seconds": seconds, "more_per_layer_s": more})


if __name__ == "__main__":
    main()
