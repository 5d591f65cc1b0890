"""How long prompts and tokens take, and what the cache weighs, method by method, side by side.

Every arm processes the same random prompts in the same process and in turns, so that a noisy
machine disturbs all of them alike; ratios are made within a turn. The first turn is a warm-up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from . import measure
from .cache import CompressedCache, stored_bytes
from .compression import Compression, describe_method
from .engine import cache_parameter
from .errors import PyramidKVError
from .model_shape import layers_to_compress
from .prompts import context_length
from .support import check_model

BASELINE = "DynamicCache"
"""The arm all others are compared with: transformers' own cache and attention, uncompressed."""


class BenchError(PyramidKVError, ValueError):
    """What cannot be measured; the message says why."""


def run_bench(
    model: PreTrainedModel,
    compressions: Sequence[Compression],
    lengths: Sequence[int],
    batches: Sequence[int] = (1,),
    *,
    steps: int = 32,
    repeats: int = 3,
    seed: int = 0,
    on_run: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure prompts and tokens with each compression and with transformers' own cache.

    Args:
        model: a supported model; `CompressedCache` says which.
        compressions: one arm each.
        lengths: tokens of the prompts.
        batches: prompts processed together.
        steps: tokens generated after each prompt; their time is the median over them.
        repeats: turns that count.
        seed: of the random prompts.
        on_run: called with (runs done, runs).

    Returns:
        A record: versions, machine, model, settings and `results`, one for each length, batch and
        arm, with `prefill_s`, `step_s`, `tokens_per_s` and `compress_s` as median, lowest and
        highest; `compress_share` of the prompt's time; `kv_bytes` after the prompt; `peak_bytes`,
        weights included; and `against` the baseline, the median ratio of prompts and of steps.

    Raises:
        BenchError: a setting is out of range, or a prompt does not fit the model.
        UnsupportedModelError, MethodError, BudgetError, AttentionError: before any work.
    """
    check_model(model)
    check_bench(model.config, compressions, lengths, batches, steps, repeats)
    arms: dict[str, Compression | None] = {BASELINE: None}
    arms |= {describe_method(each.parameters()): each for each in compressions}
    total = len(lengths) * len(batches) * len(arms) * (repeats + 1)
    generator = torch.Generator().manual_seed(seed)
    results, done = [], 0
    for length in lengths:
        for batch in batches:
            shape = (batch, length)
            ids = torch.randint(model.config.vocab_size, shape, generator=generator)
            found: dict[str, list[_Turn]] = {name: [] for name in arms}
            for turn in range(repeats + 1):
                for name, arm in arms.items():
                    measured = _take_turn(model, arm, ids.to(model.device), steps)
                    if turn:
                        found[name].append(measured)
                    done += 1
                    if on_run is not None:
                        on_run(done, total)
            results += [
                _describe(name, arms[name], length, batch, turns, found[BASELINE])
                for name, turns in found.items()
            ]
    return {
        "versions": measure.versions(),
        "machine": measure.machine(model.device),
        "model": {
            "name": model.config._name_or_path,
            "model_type": model.config.model_type,
            "dtype": str(model.dtype).removeprefix("torch."),
            "attn_implementation": model.config._attn_implementation,
        },
        "settings": {"steps": steps, "repeats": repeats, "seed": seed},
        "peak_memory_kind": measure.PeakMemory(model.device).kind,
        "results": results,
    }


def check_bench(
    config: PreTrainedConfig,
    compressions: Sequence[Compression],
    lengths: Sequence[int],
    batches: Sequence[int],
    steps: int,
    repeats: int,
) -> None:
    """Refuse what `run_bench` would refuse, from a model's configuration alone.

    Raises:
        BenchError, UnsupportedModelError, BudgetError, ProfileError: see `run_bench`.
    """
    for name, values in (
        ("lengths", lengths),
        ("batches", batches),
        ("steps", [steps]),
        ("repeats", [repeats]),
    ):
        if not values or min(values) < 1:
            raise BenchError(f"{name} is {list(values)}; give whole numbers of at least 1")
    limit = context_length(config)
    if limit is not None and max(lengths) + steps > limit:
        raise BenchError(
            f"a prompt of {max(lengths):,} tokens and {steps} more do not fit the model's context "
            f"of {limit:,}; give shorter --lengths"
        )
    names = []
    for compression in compressions:
        names.append(describe_method(compression.parameters()))
        if names[-1] in names[:-1]:
            raise BenchError(f"{names[-1]} is given twice; give each method and budget once")
        layers_to_compress(config, compression)
        for length in lengths:
            compression.possible_budget(length)  # refuses what does not fit the prompt


@dataclass
class _Turn:
    """One prompt of one arm, and what followed.

    Attributes:
        prefill, compress: seconds of the prompt, and of it for compressing.
        steps: seconds of each token.
        kv_bytes, peak_bytes: held after the prompt, and at most.
    """

    prefill: float = 0.0
    compress: float = 0.0
    steps: list[float] = field(default_factory=list)
    kv_bytes: int = 0
    peak_bytes: int = 0

    @property
    def step(self) -> float:
        """Seconds of a token: the median."""
        return statistics.median(self.steps)


class _Clock:
    """Notes when a device gets to a point; durations are read after it has got to all of them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._notes: list[Any] = []

    def note(self) -> None:
        """Note the present."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._notes.append(event)
        else:
            self._notes.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time from each note to the next, and forget them."""
        notes, self._notes = self._notes, []
        pairs = list(pairwise(notes))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) / 1000 for a, b in pairs]
        return [b - a for a, b in pairs]


def _take_turn(
    model: PreTrainedModel, compression: Compression | None, ids: Tensor, steps: int
) -> _Turn:
    turn, clock, within = _Turn(), _Clock(model.device), _Clock(model.device)
    peak = measure.PeakMemory(model.device)
    peak.start()
    cache: Any
    if compression is None:
        cache = DynamicCache(config=model.config)
    else:
        # A layer is observed before it evicts, and reported when it has.
        cache = CompressedCache(
            model,
            compression.method,
            **compression.amounts,
            on_layer=lambda *_: within.note(),
            observe=lambda *_: within.note(),
        )
    name = cache_parameter(model)

    def forward(tokens: Tensor) -> Tensor:
        given = {"logits_to_keep": 1, "use_cache": True, name: cache}
        logits: Tensor = model(tokens, **given).logits
        return logits[:, -1:].argmax(-1)

    with torch.inference_mode():
        clock.note()
        tokens = forward(ids)
        clock.note()
        (turn.prefill,) = clock.seconds()
        turn.compress = sum(within.seconds()[::2])  # between the two notes of each layer
        turn.kv_bytes = sum(map(stored_bytes, cache.layers))
        clock.note()
        for _ in range(steps):
            tokens = forward(tokens)
            clock.note()
        turn.steps = clock.seconds()
    turn.peak_bytes = peak.bytes()
    return turn


def _describe(
    name: str,
    compression: Compression | None,
    length: int,
    batch: int,
    turns: Sequence[_Turn],
    baseline: Sequence[_Turn],
) -> dict[str, Any]:
    pairs = list(zip(turns, baseline, strict=True))
    return {
        "arm": name,
        "compression": None if compression is None else compression.parameters(),
        "length": length,
        "batch": batch,
        "prefill_s": _spread([turn.prefill for turn in turns]),
        "step_s": _spread([turn.step for turn in turns]),
        "tokens_per_s": _spread([batch / turn.step for turn in turns]),
        "compress_s": _spread([turn.compress for turn in turns]),
        "compress_share": statistics.median(turn.compress / turn.prefill for turn in turns),
        "kv_bytes": turns[0].kv_bytes,
        "peak_bytes": max(turn.peak_bytes for turn in turns),
        "against": {
            "prefill": statistics.median(own.prefill / full.prefill for own, full in pairs),
            "step": statistics.median(own.step / full.step for own, full in pairs),
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
