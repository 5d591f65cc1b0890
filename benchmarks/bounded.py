"""Is memory bounded when a prompt comes in pieces? Cache bytes after every piece, and the process.

Each length runs in a process of its own. Without `--model` the model is a random one with a long
context, so that lengths beyond any small real model's can be tried.

    python benchmarks/bounded.py --lengths 8000,16000,32000,64000
    python benchmarks/bounded.py --model M --lengths 8000,30000
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import common
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pyramidkv
from pyramidkv.generation import plan_pieces, process
from pyramidkv.measure import PeakMemory
from pyramidkv.records import format_bytes


def random_model() -> Any:
    """Return a model with long rotary embeddings whose cache is large for its weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return LlamaForCausalLM(config).eval()


def run_length(arguments: Any, tokens: int) -> dict[str, Any]:
    """Process a prompt in pieces and measure after each."""
    if arguments.random:
        torch.set_num_threads(arguments.threads)
        model = random_model()
        ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    else:
        arguments.tokens = tokens
        model, ids = common.load(arguments)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        model(ids[:, :64], logits_to_keep=1)
    row_bytes: list[int] = []
    held: list[list[int]] = []

    def measure(done: int, total: int) -> None:
        if done % len(schedule) == 0:  # the last layer of a piece
            held.append([kept[0] for kept in cache.kept_lengths()])
            row_bytes.append(cache.kv_bytes)

    cache = pyramidkv.CompressedCache(model, arguments.method, arguments.budget, on_layer=measure)
    cache.expect_prompt(mask)
    schedule = cache.schedules[0]
    peak = PeakMemory(torch.device("cpu"))
    peak.start()
    pieces = plan_pieces(tokens, arguments.chunk, cache.compression)
    process(model, cache, ids, mask, pieces)
    cache.end_prompt()
    per_row = cache.kv_bytes // sum(schedule)
    for kept, size in zip(held, row_bytes, strict=True):
        assert all(k <= share for k, share in zip(kept, schedule, strict=True))
        assert size <= sum(schedule) * per_row
    assert held[-1] == schedule
    return {
        "tokens": tokens,
        "pieces": len(pieces),
        "schedule_total": sum(schedule),
        "highest_cache_bytes": max(row_bytes),
        "bound_bytes": sum(schedule) * per_row,
        "full_cache_bytes": tokens * len(schedule) * per_row,
        "peak_bytes": peak.bytes(),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.set_defaults(model=None)
    parser.add_argument("--lengths", default="8000,16000,32000,64000")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--one", type=int, help="run one length only")
    arguments = parser.parse_args()
    arguments.random = arguments.model is None
    if arguments.one:
        print(json.dumps(run_length(arguments, arguments.one)))
        return
    runs = []
    for length in arguments.lengths.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--one", length]
        finished = subprocess.run(command, check=True, capture_output=True, text=True)
        run = json.loads(finished.stdout.splitlines()[-1])
        runs.append(run)
        print(
            f"{run['tokens']:>7,} tokens in {run['pieces']} pieces: cache at most "
            f"{format_bytes(run['highest_cache_bytes'])} after a piece (bound "
            f"{format_bytes(run['bound_bytes'])}, full {format_bytes(run['full_cache_bytes'])}), "
            f"process at most {format_bytes(run['peak_bytes'])}",
            flush=True,
        )
    growth = runs[-1]["peak_bytes"] / runs[0]["peak_bytes"] - 1
    print(f"process memory from the first length to the last: {growth:+.1%}")
    common.report(arguments, {"runs": runs, "growth": growth})


if __name__ == "__main__":
    main()
