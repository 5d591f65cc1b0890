"""Is decoding really faster? Time per token, and what compression adds to the prompt.

Three caches in one process, in turns: the full prompt in a `DynamicCache`, the compressed prompt,
and a prompt as short as the budget in a `DynamicCache`, which is the best that can be hoped for.
Medians over the repeats; the first of each is a warm-up and not counted. What compression itself
takes of a prompt (scores, selection, copying what is kept) is timed apart, since it is less than
the noise between two prompts.

    python benchmarks/decode.py [--model M] [--tokens 8000] [--budget 512] [--dtype bfloat16]
        [--allocation entropy]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import torch
from transformers import DynamicCache

import pyramidkv
from pyramidkv.engine import cache_parameter
from pyramidkv.layer import CompressedLayer


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long `work` took, in seconds, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded per repeat")
    parser.add_argument("--allocation", help="instead of the method's own, such as entropy")
    arguments = parser.parse_args()
    model, ids = common.load(arguments)
    name = cache_parameter(model)
    options = {} if arguments.allocation is None else {"allocation": arguments.allocation}
    compressed = pyramidkv.CompressedCache(model, arguments.method, arguments.budget, **options)

    def forward(tokens: torch.Tensor, cache: Any) -> None:
        model(tokens, logits_to_keep=1, use_cache=True, **{name: cache})

    def prompt(make: Callable[[], Any], tokens: torch.Tensor) -> Any:
        cache = make()
        forward(tokens, cache)
        return cache

    def full_cache() -> DynamicCache:
        return DynamicCache(config=model.config)

    def fresh_compressed() -> Any:
        compressed.reset()
        return compressed

    compressing: list[float] = []
    spent = 0.0
    finish = CompressedLayer.finish

    def timed_finish(layer: CompressedLayer, *args: Any, **kwargs: Any) -> None:
        nonlocal spent
        seconds, _ = timed(lambda: finish(layer, *args, **kwargs))
        spent += seconds

    CompressedLayer.finish = timed_finish  # type: ignore[method-assign]

    arms: dict[str, Any] = {}
    prefill: dict[str, list[float]] = {"full": [], "compressed": []}
    with torch.inference_mode():
        for repeat in range(arguments.repeats + 1):
            for arm, make in (("full", full_cache), ("compressed", fresh_compressed)):
                arms.pop(arm, None)
                spent = 0.0
                seconds, arms[arm] = timed(lambda make=make: prompt(make, ids))
                if repeat:
                    prefill[arm].append(seconds)
                if repeat and arm == "compressed":
                    compressing.append(spent)
        CompressedLayer.finish = finish  # type: ignore[method-assign]
        arms["short"] = prompt(full_cache, ids[:, : arguments.budget])
        decode: dict[str, list[float]] = {arm: [] for arm in arms}
        step = ids[:, :1]
        for repeat in range(arguments.repeats + 1):
            for arm, cache in arms.items():
                seconds, _ = timed(
                    lambda c=cache: [forward(step, c) for _ in range(arguments.steps)]
                )
                cache.crop(-arguments.steps)
                if repeat:
                    decode[arm].append(seconds / arguments.steps)

    for arm, label in (
        ("full", f"full cache, {arguments.tokens:,} tokens"),
        ("compressed", f"{arguments.method}, budget {arguments.budget}"),
        ("short", f"prompt of {arguments.budget} tokens"),
    ):
        print(f"time per token, {label}: {common.spread(decode[arm])}")
    against = {
        "decode_against_full": common.median(decode["compressed"]) / common.median(decode["full"]),
        "decode_against_short": common.median(decode["compressed"])
        / common.median(decode["short"]),
        "prefill_against_full": common.median(prefill["compressed"])
        / common.median(prefill["full"]),
    }
    print(f"prompt, full: {common.spread(prefill['full'])}")
    print(f"prompt, compressed: {common.spread(prefill['compressed'])}")
    shares = [part / whole for part, whole in zip(compressing, prefill["compressed"], strict=True)]
    against["compression_share_of_prompt"] = common.median(shares)
    print(f"of which compressing: {common.spread(compressing)}")
    for ratio, value in against.items():
        print(f"{ratio.replace('_', ' ')}: {value:.3f}")
    common.report(
        arguments,
        {"compressing_s": compressing, "decode_s": decode, "prefill_s": prefill, **against},
    )


if __name__ == "__main__":
    main()
