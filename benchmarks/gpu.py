"""On a GPU: bytes and milliseconds of a large model's shape, full against compressed.

The weights are random (an 8B Llama 3 by default), since only shapes matter to memory and time. Each
arm processes the same prompt and decodes from it: peak memory above the weights, bytes of the
cache, time of the prompt, of which compressing, and time per token. Medians over the repeats; a
warm-up comes before the first shape.

    python benchmarks/gpu.py [--shapes 32768x1,32768x8,131072x1] [--budget 2048]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.initialization import no_init_weights

import pyramidkv
from pyramidkv import measure
from pyramidkv.layer import CompressedLayer
from pyramidkv.records import format_bytes, write_json

LLAMA_3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072 + 1024,
    "rope_theta": 500_000.0,
}


def random_model(config: LlamaConfig, device: torch.device) -> Any:
    """Return a model of this shape, made on the device itself: initialising one takes a minute."""
    with no_init_weights(), device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def seconds_since(start: float) -> float:
    """Return seconds since `start`, when the GPU is done."""
    torch.cuda.synchronize()
    return time.perf_counter() - start


class CompressionTimer:
    """Sums what compressing takes on the GPU, by events around each layer's."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, Any]] = []
        self._finish = CompressedLayer.finish

    def __enter__(self) -> CompressionTimer:
        def finish(layer: CompressedLayer, *args: Any, **kwargs: Any) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._finish(layer, *args, **kwargs)
            end.record()
            self._events.append((start, end))

        CompressedLayer.finish = finish  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        CompressedLayer.finish = self._finish  # type: ignore[method-assign]

    def take(self) -> float:
        """Return seconds since the last call."""
        torch.cuda.synchronize()
        total = sum(start.elapsed_time(end) for start, end in self._events) / 1000
        self._events.clear()
        return total


def run_arm(model: Any, ids: torch.Tensor, make: Any, timer: CompressionTimer, steps: int) -> Any:
    """Process the prompt and decode; return the figures."""
    gc.collect()
    timer.take()  # what earlier tokens took
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = make()

    def forward(tokens: torch.Tensor) -> None:
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)

    start = time.perf_counter()
    forward(ids)
    prompt = seconds_since(start)
    figures = {
        "prompt_s": prompt,
        "compressing_s": timer.take(),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
        "held_bytes": torch.cuda.memory_allocated() - before,
    }
    step = ids[:, :1]
    for _ in range(4):
        forward(step)
    each = []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        forward(step)
        each.append(seconds_since(start))
    return {**figures, "token_s": statistics.median(each)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="32768x1,32768x8,131072x1", help="TOKENSxBATCH")
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--method", default="pyramidkv")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; this benchmark needs one")
    device = torch.device("cuda")
    config = LlamaConfig(**{**LLAMA_3_8B, "num_hidden_layers": arguments.layers})
    config._attn_implementation = "sdpa"
    model = random_model(config, device)
    arms = {
        "full": lambda: DynamicCache(config=config),
        "compressed": lambda: pyramidkv.CompressedCache(model, arguments.method, arguments.budget),
    }
    figures: dict[str, Any] = {}
    with torch.inference_mode(), CompressionTimer() as timer:
        for shape in arguments.shapes.split(","):
            tokens, batch = map(int, shape.split("x"))
            ids = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
            runs: dict[str, list[Any]] = {arm: [] for arm in arms}
            if not figures:  # a warm-up
                for make in arms.values():
                    run_arm(model, ids, make, timer, arguments.steps)
            for _ in range(arguments.repeats):
                for arm, make in arms.items():
                    runs[arm].append(run_arm(model, ids, make, timer, arguments.steps))
            figures[shape] = {
                arm: {name: statistics.median(r[name] for r in found) for name in found[0]}
                for arm, found in runs.items()
            }
            for arm, found in figures[shape].items():
                print(
                    f"{shape:>10} {arm:<10} prompt {found['prompt_s']:.3f} s (compressing "
                    f"{1000 * found['compressing_s']:.1f} ms), peak "
                    f"{format_bytes(found['peak_bytes'])}, held "
                    f"{format_bytes(found['held_bytes'])}, "
                    f"{1000 * found['token_s']:.2f} ms per token",
                    flush=True,
                )
    circumstances = {"versions": measure.versions(), "machine": measure.machine(device)}
    print(json.dumps(circumstances))
    if arguments.output is not None:
        given = {k: str(v) for k, v in vars(arguments).items() if k != "output"}
        write_json(arguments.output, {**circumstances, "arguments": given, "shapes": figures})


if __name__ == "__main__":
    main()
