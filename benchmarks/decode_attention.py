"""One token's attention over a long cache: ours against PyTorch's and against the memory's bound.

The bound is the time to read the keys and values once, at the bandwidth of copying 256 MB (bytes
read and written). PyTorch's `scaled_dot_product_attention` is given grouped heads (`enable_gqa`),
and repeated ones, as where grouped heads are not taken. `ragged` is the same number of bytes with
heads of very unequal lengths. Arms take turns; each call is given other copies of the keys and
values, so many that the processor's cache does not hold them: a model's weights pass through it
between two tokens. Repeating allocates much, which slows down others, so it has its turns by
itself. Medians.

    python benchmarks/decode_attention.py [--keys 512,8192,32768] [--repeats 15]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional

from pyramidkv.decode_attention import attend, attend_ragged, attend_reference
from pyramidkv.ragged import RaggedStorage
from pyramidkv.storage import RowStorage

SHAPES = ((8, 64), (2, 64), (8, 128))
"""KV heads and head dimension."""
GROUPS = (4, 7)
UNEQUAL = (1, 2, 1, 4)
"""Shares of the tokens that the heads have, over and over, in the ragged cache."""
SMALL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error that is allowed, relative to the norm."""
CACHE = 400 * 10**6
"""Bytes that no processor's cache holds."""


def bandwidth(size: int = 256 * 2**20) -> float:
    """Return bytes per second of a large copy, those read and those written."""
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * size / common.median(seconds)


def ragged_like(keys: Tensor, values: Tensor) -> RaggedStorage:
    """Return a ragged cache of as many tokens, whose last one follows the prompt."""
    heads, rows, head_dim = keys.shape[1:]
    total = heads * (rows - 1)
    shares = [UNEQUAL[head % len(UNEQUAL)] for head in range(heads)]
    counts = [total * share // sum(shares) for share in shares]
    counts[0] += total - sum(counts)
    flat = [torch.randn(total, head_dim).to(keys.dtype) for _ in range(2)]
    tail = RowStorage(keys, values, 0, 64)
    tail.append(keys[:, :, -1:], values[:, :, -1:])
    positions = torch.zeros(total, dtype=torch.int32)
    storage = RaggedStorage(*flat, positions, torch.tensor([counts]), [total], tail)
    storage.tiles()  # made once for a prompt
    return storage


def measure(keys_count: int, heads: int, head_dim: int, group: int, dtype: torch.dtype) -> Any:
    """Return the arms of one shape, by name; each call takes the next of many copies."""
    keys, values = torch.randn(2, 1, heads, keys_count, head_dim).to(dtype)
    queries = torch.randn(1, heads * group, 1, head_dim).to(dtype)
    scale = head_dim**-0.5
    sdpa = functional.scaled_dot_product_attention
    exact = attend_reference(queries.float(), keys.float(), values.float(), scale)
    error = (attend(queries, keys, values, scale).float() - exact).norm() / exact.norm()
    if error > SMALL[dtype]:
        raise SystemExit(f"the result is wrong: relative error {error:.1e}")
    copies = 1 + CACHE // (2 * keys.nbytes)
    dense = cycle([(keys.clone(), values.clone()) for _ in range(copies)])
    ragged = cycle([ragged_like(keys, values) for _ in range(copies)])

    def by_pytorch() -> None:
        own = next(dense)
        sdpa(queries, *own, scale=scale, enable_gqa=True)

    def repeating() -> None:
        own = next(dense)
        sdpa(queries, *(states.repeat_interleave(group, dim=1) for states in own), scale=scale)

    return {
        "ours": lambda: attend(queries, *next(dense), scale),
        "ragged": lambda: attend_ragged(queries, next(ragged), scale),
        "sdpa": by_pytorch,
        "sdpa repeated": repeating,
    }


@torch.inference_mode()
def timed(arms: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return the median seconds of each arm; three turns warm up."""
    *others, last = arms
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for names in (others, [last]):
        for turn in range(repeats + 3):
            for name in names:
                start = time.perf_counter()
                arms[name]()
                if turn >= 3:
                    seconds[name].append(time.perf_counter() - start)
    return {name: common.median(found) for name, found in seconds.items()}


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(repeats=15)
    parser.add_argument("--keys", default="512,8192,32768")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    speed = bandwidth()
    print(f"copying: {speed / 1e9:.1f} GB/s\n")
    print("| keys | KV heads | group | dtype | bound | ours | ragged | SDPA | SDPA, repeated |")
    print("|---|---|---|---|---|---|---|---|---|")
    figures = []
    for keys in map(int, arguments.keys.split(",")):
        for heads, head_dim in SHAPES:
            for group in GROUPS:
                for dtype in SMALL:
                    found = timed(measure(keys, heads, head_dim, group, dtype), arguments.repeats)
                    bound = 2 * heads * keys * head_dim * dtype.itemsize / speed
                    own = found["ours"]
                    cells = [
                        f"{keys:,}",
                        f"{heads} x {head_dim}",
                        str(group),
                        str(dtype).removeprefix("torch."),
                        f"{1000 * bound:.2f} ms",
                        f"{1000 * own:.2f} ms ({own / bound:.1f}x)",
                        f"{1000 * found['ragged']:.2f} ms",
                        *(
                            f"{1000 * found[name]:.2f} ms ({found[name] / own:.1f}x ours)"
                            for name in ("sdpa", "sdpa repeated")
                        ),
                    ]
                    print(f"| {' | '.join(cells)} |", flush=True)
                    shape = {"keys": keys, "heads": heads, "head_dim": head_dim, "group": group}
                    figures.append({**shape, "dtype": str(dtype), "bound_s": bound, **found})
    common.report(arguments, {"bytes_per_second": speed, "shapes": figures})


if __name__ == "__main__":
    main()
