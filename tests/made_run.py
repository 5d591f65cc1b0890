"""Runs made by hand: no model has answered, the scores are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from pyramidkv.compression import describe_method, make_compression

LAYERS = 4
LOSS = {"streamingllm": 0.7, "h2o": 0.45, "snapkv": 0.3, "pyramidkv": 0.25}


def make_arms(methods=tuple(LOSS), budgets=(64, 128, 256, 512)):
    compressions = [make_compression("full")]
    compressions += [make_compression(name, budget) for name in methods for budget in budgets]
    return {describe_method(one.parameters()): one.parameters() for one in compressions}


def make_lines(arms, tasks=("find", "trace", "words"), lengths=(2048, 4096), count=20, seed=0):
    """Samples with a depth; those of the first task are found or lost, others are between."""
    rng = np.random.default_rng(seed)
    return [
        make_line(arms, rng, task, n * len(lengths) + place, length, 25 * (n % 5), task != tasks[0])
        for task in tasks
        for place, length in enumerate(lengths)
        for n in range(count)
    ]


def make_line(arms, rng, task, index, length, depth, partly):
    ease = rng.uniform(0.2, 1)
    right = f"{rng.integers(10**6, 10**7)}"
    given = {}
    for name, parameters in arms.items():
        kept = length if name == "full" else parameters["budget"]
        loss = LOSS.get(parameters["method"], 0) * (64 / kept) ** 0.5 * length / 3000
        value = np.clip(ease + 0.35 - loss + rng.normal(0, 0.1), 0, 1)
        score = round(float(value), 2) if partly else float(value > 0.5)
        given[name] = {
            "text": right if score > 0.5 else f"I do not know the number of {task} {index}.",
            "score": score,
            "generated_tokens": 8,
            "kept_tokens": LAYERS * kept,
            "kept_bytes": LAYERS * kept * 512,
            "compressed_tokens": length,
            "full_tokens": LAYERS * length,
            "footprint": (kept + 4) / (length + 4),
        }
    return {
        "task": task,
        "index": index,
        "facts": {"length": length, "tokens": length, "depth": depth},
        "question": f"\n\nWhat is the magic number of {task} {index}?",
        "answers": [right],
        "metric": "match_all",
        "prompt_tokens": length,
        "context_tokens": length - 20,
        "dropped_tokens": 0,
        "arms": given,
    }


def write_run(folder: Path, lines, arms, shard="", machine="a laptop", **asked):
    """Write a run's folder, or a shard of it such as `-1-of-2`."""
    folder.mkdir(exist_ok=True)
    told = {
        "model": "models/tiny-chat",
        "dtype": "bfloat16",
        "arms": arms,
        "agnostic": False,
        "limit": 8192,
        "samples": len(lines),
        "content": "0123abcd",
        "settings": {"benchmark": "ruler", "lengths": [2048, 4096], "seed": 0, "data": None},
        **asked,
    }
    circumstances = {
        "versions": {"python": "3.11.2", "torch": "2.13.0", "transformers": "5.24.0"},
        "machine": {"processor": machine, "cpu_count": 2, "device_name": None},
    }
    (folder / f"run{shard}.json").write_text(json.dumps({"asked": told, **circumstances}))
    with (folder / f"samples{shard}.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
