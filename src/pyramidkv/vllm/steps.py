"""The rows of the current step, found once for all groups of layers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import running
from .checks import last_tokens
from .prompts_of_step import StepRows, split_rows
from .settings import ServingError, ServingSettings

_Metadata = TypeVar("_Metadata")


def extended(metadata: Any, kind: type[_Metadata], **more: Any) -> _Metadata:
    """Return vLLM's metadata of a step as a dataclass that extends theirs, with these fields."""
    own = {field.name: getattr(metadata, field.name) for field in dataclasses.fields(metadata)}
    return kind(**own, **more)


class Steps:
    """What the builders of one vLLM share: they are asked one after the other in each step."""

    def __init__(self, vllm_config: Any, settings: ServingSettings, block_size: int):
        """Prepare for builders whose blocks have `block_size` tokens.

        vLLM may give kernels smaller blocks than it manages; what is freed is counted in its own.
        """
        managed = vllm_config.cache_config.block_size
        if managed % block_size:
            raise ServingError(
                f"blocks of {managed} tokens do not consist of the kernel's, of {block_size}; "
                "give another --block-size"
            )
        self._settings, self._managed = settings, managed
        self._kernel_blocks = managed // block_size
        self._config = weakref.ref(vllm_config)
        self._together = last_tokens(vllm_config, settings)
        self._step: Any = None
        self._rows: StepRows | None = None
        self._past: Tensor | None = None

    def _skipped_of(self, prompt: int) -> list[int]:
        freed = self._settings.freed_by_group(prompt, self._managed)
        return [blocks * self._kernel_blocks for blocks in freed]

    def rows(self, common: Any) -> tuple[StepRows, Tensor | None]:
        """Return the rows and, on the device, int64 `[groups, rows]` blocks that are skipped.

        The latter is None where no request is past its prompt.

        Args:
            common: vLLM's `CommonAttentionMetadata`.
        """
        if self._rows is None or common.query_start_loc_cpu is not self._step:
            runner = running.runner_of(self._config())
            prompts, computed, new = running.rows_of(runner, common)
            rows = split_rows(prompts, computed, new, self._skipped_of, self._together)
            self._rows, self._past = rows, None
            if any(any(row) for row in rows.past):
                device = common.block_table_tensor.device
                past = torch.tensor(rows.past, pin_memory=device.type == "cuda")
                self._past = past.to(device, non_blocking=True)
            self._step = common.query_start_loc_cpu  # one object for all groups of a step
        return self._rows, self._past


_steps: dict[int, tuple[weakref.ref[Any], tuple[int, int], Steps]] = {}


def steps_of(vllm_config: Any, settings: ServingSettings, block_size: int) -> Steps:
    """Return what the builders of a vLLM share."""
    sizes = block_size, vllm_config.cache_config.block_size
    config, known, steps = _steps.get(id(vllm_config), (lambda: None, (0, 0), None))
    if config() is not vllm_config or known != sizes or steps is None:
        steps = Steps(vllm_config, settings, block_size)
        _steps[id(vllm_config)] = weakref.ref(vllm_config), sizes, steps
    return steps
