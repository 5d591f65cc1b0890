"""vLLM's CPU worker, whose full-attention layers have budgets by group."""

from __future__ import annotations

import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from . import running
from .checks import check_hook
from .grouped import GroupedWorker
from .seeds import SeededCPUModelRunner

register_backend(AttentionBackendEnum.CPU_ATTN, "pyramidkv.vllm.cpu.CompressedCPUBackend")

check_hook(CPUWorker, "init_device")
check_hook(CPUWorker, "get_kv_cache_spec")


class CompressedCPUWorker(GroupedWorker, CPUWorker):
    """Compresses prompts on CPUs."""

    device_kind = "cpu"
    attention = "CompressedCPUImpl"

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = SeededCPUModelRunner(self.vllm_config, torch.device("cpu"))
        running.remember(self.vllm_config, self.model_runner)
