"""Requests with a seed whose prompt takes several steps, on CPUs.

vLLM samples a token for every request in every step, discards it while the request's prompt is not
complete, and then winds the request's generator back by an offset. Generators on CPUs have none:
they raise, and the engine ends with all its requests.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from .checks import check_hook

check_hook(GPUModelRunner, "_sample", "logits", "spec_decode_metadata")
check_hook(GPUModelRunner, "_bookkeeping_sync", "scheduler_output", "sampler_output")


def keep_seeds(runner: Any) -> None:
    """Have a model runner discard tokens without using up a request's random numbers."""
    sample, bookkeep = runner._sample, runner._bookkeeping_sync

    def discarded() -> dict[int, torch.Generator]:
        mask = runner.discard_request_mask.np
        return {row: own for row, own in runner.input_batch.generators.items() if mask[row]}

    def sampling(*args: Any, **kwargs: Any) -> Any:
        before = [(own, own.get_state()) for own in discarded().values()]
        result = sample(*args, **kwargs)
        for own, state in before:
            own.set_state(state)
        return result

    def bookkeeping(*args: Any, **kwargs: Any) -> Any:
        generators, hidden = runner.input_batch.generators, discarded()
        for row in hidden:
            del generators[row]
        try:
            return bookkeep(*args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = sampling, bookkeeping
