"""Requests with a seed whose prompt takes several steps, on CPUs.

vLLM samples a token for every request in every step, discards it while the request's prompt is not
complete, and then winds the request's generator back by an offset. Generators on CPUs have none:
they raise, and the engine ends with all its requests, with and without the plugin.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from .checks import check_hook

check_hook(CPUModelRunner, "__init__", "vllm_config", "device")
check_hook(CPUModelRunner, "_sample", "logits", "spec_decode_metadata")
check_hook(CPUModelRunner, "_bookkeeping_sync", "scheduler_output", "sampler_output")


class SeededCPUModelRunner(CPUModelRunner):
    """Discards tokens without using up a request's random numbers."""

    def _discarded(self) -> dict[int, torch.Generator]:
        mask = self.discard_request_mask.np
        return {row: own for row, own in self.input_batch.generators.items() if mask[row]}

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        before = [(own, own.get_state()) for own in self._discarded().values()]
        result = super()._sample(*args, **kwargs)
        for own, state in before:
            own.set_state(state)
        return result

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        generators, hidden = self.input_batch.generators, self._discarded()
        for row in hidden:
            del generators[row]
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            generators.update(hidden)
