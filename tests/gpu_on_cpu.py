"""The plugin's attention for GPUs inside vLLM on a CPU, in a process of its own.

What runs are our builder, implementation, schedulers and compaction, vLLM's FlashAttention classes
around the kernels, and either model runner; not the kernels, nor CUDA graphs. Model Runner V2 needs
Triton, whose interpreter stands in.

    python gpu_on_cpu.py JSON
"""

from __future__ import annotations

import contextlib
import json
import os
import sys


def prepare(runner: int, ahead: bool) -> None:
    """Make vLLM in this process take our classes for GPUs, a model runner and a scheduler."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == 2))
    os.environ["VLLM_PLUGINS"] = ""  # ours would take the attention for CPUs
    if runner == 2:
        _interpret_triton()
    import flash_reference
    from vllm.v1.attention.backends import fa_utils, flash_attn
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pyramidkv.vllm import settings

    settings.WORKERS["cuda"] = "gpu_on_cpu_worker.Worker"
    register_backend(AttentionBackendEnum.CPU_ATTN, "pyramidkv.vllm.gpu.CompressedGPUBackend")
    flash_attn.flash_attn_varlen_func = flash_reference.attend
    flash_attn.reshape_and_cache_flash = flash_reference.store
    flash_attn.get_scheduler_metadata = flash_reference.plan_ahead
    for module in (flash_attn, fa_utils):
        module.get_flash_attn_version = lambda *_, **__: 3
    if ahead:
        _schedule_ahead()


def _interpret_triton() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Compiler: ...

    backends["cpu"] = Backend(compiler=Compiler, driver=Driver)


def _schedule_ahead() -> None:
    """Asynchronous scheduling on a CPU, where every stream is the only one."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    class Stream:
        def __init__(self, *_, **__): ...
        def wait_stream(self, *_): ...
        def record(self, *_): ...
        def synchronize(self): ...

    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls, vllm_config):
        update(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(updated)


def answer(folder, given, asked, steps, options, ahead):
    """Start vLLM, answer, and return what happened."""
    import flash_reference
    import test_serving_vllm as here
    import vllm

    from pyramidkv.vllm import settings

    llm = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=here.BLOCK,
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        worker_cls=settings.WORKERS["cuda"],
        scheduler_cls=settings.ASYNC_SCHEDULER if ahead else settings.SCHEDULER,
        attention_backend=settings.BACKEND,
        additional_config={settings.KEY: given},
        **({"max_num_seqs": 8, "max_model_len": 640, "enforce_eager": True} | options),
    )
    flash_reference.GIVEN.clear()
    core = llm.llm_engine.engine_core.engine_core
    preempted, preempt = [], core.scheduler._preempt_request

    def counting(request, *args, **kwargs):
        preempted.append(request.num_output_tokens)
        return preempt(request, *args, **kwargs)

    core.scheduler._preempt_request = counting
    before = here.free_blocks(llm)
    outputs = here.generate(llm, asked, steps)
    again = here.generate(llm, asked, steps)
    runner = core.model_executor.driver_worker.worker.model_runner
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    told = {
        "answers": [here.tokens(outputs), here.tokens(again)],
        "hits": [output.num_cached_tokens for output in again],
        "preempted": preempted,
        "addresses": len(flash_reference.GIVEN),
        "leaked": before - here.free_blocks(llm),
        "runner": type(runner).__module__,
        "ahead": core.vllm_config.scheduler_config.async_scheduling,
        "accepted": counters.get("vllm:spec_decode_num_accepted_tokens"),
    }
    llm.llm_engine.engine_core.shutdown()
    return told


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    request = json.loads(sys.argv[1])
    prepare(request.pop("runner"), request["ahead"])
    sys.stdout.write(json.dumps(answer(**request)) + "\n")
