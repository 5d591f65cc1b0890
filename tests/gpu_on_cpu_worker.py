"""A worker on a CPU that takes the plugin's attention for GPUs; see `gpu_on_cpu`."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from pyramidkv.vllm.grouped import GroupedWorker


class Worker(GroupedWorker, CPUWorker):
    device_kind = "cpu"
    attention = "CompressedGPUImpl"
