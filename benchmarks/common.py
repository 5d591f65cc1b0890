"""What the benchmarks share: threads, prompts, medians, and how results are kept."""

from __future__ import annotations

import os
import statistics

# Older OpenBLAS builds need these on some machines, but they slow a current one.
for _name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(_name, None)
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from pyramidkv import loading, measure
from pyramidkv.records import write_json


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--model", default=loading.demo_model(), help="hub id, folder or GGUF file")
    result.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    result.add_argument("--tokens", type=int, default=8000, help="prompt length")
    result.add_argument("--budget", type=int, default=512)
    result.add_argument("--method", default="pyramidkv")
    result.add_argument("--threads", type=int, default=os.cpu_count())
    result.add_argument("--repeats", type=int, default=5)
    result.add_argument("--output", type=Path, help="write the figures as JSON")
    return result


def load(arguments: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """Return the model and a prompt of exactly the asked length, `[1, tokens]`."""
    torch.set_num_threads(arguments.threads)
    tokenizer = loading.load_tokenizer(arguments.model)
    model = loading.load_model(arguments.model, dtype=arguments.dtype, device=_device(arguments))
    text = files("pyramidkv").joinpath("data/constitution.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    ids = (ids * (arguments.tokens // len(ids) + 1))[: arguments.tokens]
    return model, torch.tensor([ids], device=_device(arguments))


def _device(arguments: argparse.Namespace) -> str:
    """Return where the model runs: on the CPU, unless a benchmark has an option for it."""
    return getattr(arguments, "device", "cpu")


def median(values: list[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """Return median, lowest and highest in milliseconds."""
    low, middle, high = (f"{1000 * v:.1f}" for v in (min(values), median(values), max(values)))
    return f"{middle} ms ({low} to {high})"


def report(
    arguments: argparse.Namespace, figures: dict[str, Any], versions: dict[str, str] | None = None
) -> None:
    """Print the figures' circumstances, further versions included, and keep them if asked."""
    circumstances = {
        "versions": measure.versions() | (versions or {}),
        "machine": measure.machine(torch.device(_device(arguments))),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k != "output"},
    }
    print(f"\n{json.dumps(circumstances)}")
    if arguments.output is not None:
        write_json(arguments.output, {**circumstances, **figures})
