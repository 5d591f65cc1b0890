"""vLLM's GPU worker, whose full-attention layers have budgets by group. Not tried on a GPU yet."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.gpu_worker import Worker

from .checks import check_hook
from .grouped import GroupedWorker

register_backend(AttentionBackendEnum.CUSTOM, "pyramidkv.vllm.gpu.CompressedGPUBackend")

check_hook(Worker, "init_device")
check_hook(Worker, "get_kv_cache_spec")


class CompressedGPUWorker(GroupedWorker, Worker):
    """Compresses prompts on GPUs of NVIDIA."""

    device_kind = "cuda"
    attention = "CompressedGPUImpl"
