"""Chunks of prompts that end where a prompt can be compressed."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from .checks import check_config, check_hook, check_scheduler, last_tokens, settings_of
from .chunks import end_chunk
from .metrics import count_prompt
from .settings import ServingError, capacity_lines

logger = init_logger("vllm.pyramidkv")

for _scheduler in (Scheduler, AsyncScheduler):
    check_hook(
        _scheduler, "_reserve_prefill_lookahead", "request", "num_computed_tokens", "num_new_tokens"
    )
    check_hook(_scheduler, "add_request", "request")
    check_hook(_scheduler, "_preempt_request", "request")
    check_hook(_scheduler, "_update_after_schedule", "scheduler_output")


class CompressedScheduler(Scheduler):
    """vLLM's scheduler; the last window of a prompt is computed in one step, which ends with it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        self._settings = settings_of(vllm_config)
        check_config(vllm_config, self._settings)
        check_scheduler(vllm_config, self._settings)
        self._together = last_tokens(vllm_config, self._settings)
        super().__init__(vllm_config, *args, **kwargs)
        blocks = self.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one is the null block
        longest = vllm_config.model_config.max_model_len
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        windows = [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)]
        for line in capacity_lines(self._settings, self.block_size, blocks, longest, windows):
            logger.info("%s", line)

    def add_request(self, request: Request) -> None:
        if request.resumable:
            raise ServingError(
                f"pyramidkv cannot serve streaming sessions (request {request.request_id}), whose "
                "prompt grows after it was compressed; start vLLM without it for those"
            )
        super().add_request(request)

    def _evicts(self, request: Request) -> bool:
        return self._settings.freed_blocks(request.num_prompt_tokens, self.block_size) > 0

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        new: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        if not self._evicts(request):
            return new
        prompt = request.num_prompt_tokens
        return end_chunk(num_computed_tokens, new, prompt, self._together)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id, new in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            prompt = request.num_prompt_tokens
            if request.num_computed_tokens - new < prompt <= request.num_computed_tokens:
                kept = self._settings.kept(prompt, self.block_size)
                count_prompt(prompt, kept, self._settings.freed_blocks(prompt, self.block_size))

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if self._evicts(request):
            # Hashes of generated tokens would make the prompt look longer than it is.
            request.skip_reading_prefix_cache = True


class CompressedAsyncScheduler(CompressedScheduler, AsyncScheduler):
    """The same, a step ahead of its results.

    Blocks are freed once the step that compressed the prompt was processed, and what writes to
    them next is queued behind that step, so that none of it has to wait.
    """
