"""The parts that compression and ragged decoding consist of, on a GPU: right, and how fast?

First the Triton kernel against the reference, over unequal heads, groups, head dimensions, tails
and softcaps. Then, without a model: choosing (scores and selection of all layers), and one token's
attention, dense and ragged, against the time to read the keys and values at the bandwidth of a
large copy. Takes about two minutes; `--device cpu --small` tries the script itself anywhere.

    python benchmarks/gpu_parts.py [--device cuda] [--small] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode_attention import SMALL, ragged_like
from torch import Tensor
from torch.nn import functional

from pyramidkv import decode_attention, measure
from pyramidkv.methods import METHODS
from pyramidkv.ragged import RaggedStorage
from pyramidkv.records import write_json
from pyramidkv.storage import RowStorage

HEADS, GROUP, HEAD_DIM, LAYERS = 8, 4, 128, 32  # of Llama 3 8B


def timed(work: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Return the median seconds of `work`, after three that warm up."""
    seconds = []
    for turn in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def kernels(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Return the functions that attend to ragged caches, by name."""
    found: dict[str, Callable[..., Tensor]] = {"torch": decode_attention.attend_ragged}
    if device.type == "cuda":
        from pyramidkv import triton_attention

        found["triton"] = triton_attention.attend_ragged
    return found


def ragged(counts: list[list[int]], head_dim: int, dtype: torch.dtype, tail: int) -> RaggedStorage:
    """Return a ragged cache of random states with `tail` rows after the prompt, on the CPU."""
    kept, heads = sum(map(sum, counts)), len(counts[0])
    flat = [torch.randn(kept, head_dim).to(dtype) for _ in range(2)]
    rows = [torch.randn(len(counts), heads, tail, head_dim).to(dtype) for _ in range(2)]
    storage = RowStorage(rows[0], rows[1], 0, tail)
    storage.append(rows[0], rows[1])
    positions = torch.zeros(kept, dtype=torch.int32)
    totals = [sum(row) for row in counts]
    return RaggedStorage(flat[0], flat[1], positions, torch.tensor(counts), totals, storage)


def moved(storage: RaggedStorage, device: torch.device) -> RaggedStorage:
    """Return the same cache on a device."""
    tail = RowStorage.holding(storage.tail.keys.to(device), storage.tail.values.to(device))
    states = (each.to(device) for each in (storage.keys, storage.values, storage.positions))
    return RaggedStorage(*states, storage.prompt_counts().to(device), storage.totals, tail)


def check(device: torch.device) -> float:
    """Return the largest relative error of any kernel over all shapes.

    Raises:
        SystemExit: one is wrong.
    """
    lengths = [[[700, 3]], [[1, 5000], [2600, 90]], [[64, 65], [1, 1], [3000, 1]]]
    worst = 0.0
    for counts, group, head_dim, dtype, tail, softcap in itertools.product(
        lengths, (1, 4, 7, 8), (64, 128, 256), SMALL, (1, 70), (None, 30.0)
    ):
        storage = ragged(counts, head_dim, dtype, tail)
        queries = torch.randn(len(counts), len(counts[0]) * group, 1, head_dim).to(dtype)
        scale = head_dim**-0.5
        keys, values, visible = storage.dense()
        exact = decode_attention.attend_reference(
            queries.float(), keys.float(), values.float(), scale, softcap, visible
        )
        there = moved(storage, device)
        for name, kernel in kernels(device).items():
            found = kernel(queries.to(device), there, scale, softcap).float().cpu()
            error = float((found - exact).norm() / exact.norm())
            worst = max(worst, error)
            if not error <= SMALL[dtype]:
                shape = f"{counts}, group {group}, {head_dim}, {dtype}, tail {tail}, {softcap}"
                raise SystemExit(f"{name} is wrong for {shape}: relative error {error:.1e}")
    return worst


def choosing(tokens: int, device: torch.device, dtype: torch.dtype, layers: int) -> dict[str, Any]:
    """Return seconds of scores and selection of all layers, at a budget of 2,048 or a quarter."""
    options = METHODS["pyramidkv"].options
    score = METHODS["pyramidkv"].build_score()
    assert score is not None
    keys = torch.randn(1, HEADS, tokens, HEAD_DIM, device=device).to(dtype)
    queries = torch.randn(1, HEADS * GROUP, options.window_size, HEAD_DIM, device=device).to(dtype)
    budget, scale = min(2048, tokens // 4), HEAD_DIM**-0.5

    def rate() -> Tensor:
        return score(queries, keys, keys, None, scale)

    scores = rate()
    parts = {"scores": rate, "selection": lambda: options.select(scores, budget)}
    found = {
        name: timed(lambda work=work: [work() for _ in range(layers)], device)
        for name, work in parts.items()
    }
    return {**found, "together": sum(found.values())}


def attention(rows: int, device: torch.device, dtype: torch.dtype, speed: float) -> dict[str, Any]:
    """Return seconds of one token's attention over `rows` keys, and the bound."""
    keys, values = torch.randn(2, 1, HEADS, rows, HEAD_DIM).to(dtype)
    storage = moved(ragged_like(keys, values), device)
    keys, values = keys.to(device), values.to(device)
    queries = torch.randn(1, HEADS * GROUP, 1, HEAD_DIM, device=device).to(dtype)
    scale, sdpa = HEAD_DIM**-0.5, functional.scaled_dot_product_attention
    arms: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa(queries, keys, values, scale=scale, enable_gqa=True),
        "dense": lambda: decode_attention.attend(queries, keys, values, scale),
    }
    for name, kernel in kernels(device).items():
        arms[f"ragged {name}"] = lambda kernel=kernel: kernel(queries, storage, scale)
    bound = (keys.nbytes + values.nbytes) / speed
    return {"bound": bound, **{name: timed(work, device) for name, work in arms.items()}}


def copy_speed(device: torch.device, size: int) -> float:
    """Return bytes per second of copying `size` bytes, those read and those written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * size / timed(lambda: target.copy_(source), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here; give --device cpu --small to try the script")
    torch.manual_seed(0)
    dtype = torch.bfloat16
    sizes = (512, 2048) if arguments.small else (32_768, 131_072)
    layers = 2 if arguments.small else LAYERS
    figures: dict[str, Any] = {"worst_relative_error": check(device)}
    print(f"kernels are right, relative error at most {figures['worst_relative_error']:.1e}")
    speed = copy_speed(device, (64 if arguments.small else 2048) * 2**20)
    print(f"copying: {speed / 1e9:.0f} GB/s, read and written")
    with torch.inference_mode():
        for tokens in sizes:
            for name, found in (
                (f"choosing, {layers} layers", choosing(tokens, device, dtype, layers)),
                ("one token's attention", attention(tokens, device, dtype, speed)),
            ):
                figures[f"{name}, {tokens}"] = found
                told = ", ".join(f"{part} {1000 * s:.3f} ms" for part, s in found.items())
                print(f"{name}, {tokens:,} tokens: {told}", flush=True)
    circumstances = {"versions": measure.versions(), "machine": measure.machine(device)}
    print(json.dumps(circumstances))
    if arguments.output is not None:
        write_json(arguments.output, {**circumstances, **figures})


if __name__ == "__main__":
    main()
