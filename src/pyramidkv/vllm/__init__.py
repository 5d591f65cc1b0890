"""Compressed KV caches in vLLM: a plugin of public hooks, inert unless it is configured.

Settings travel in vLLM's `additional_config` under the key `pyramidkv`, so that every process has
the same. A request's prompt is compressed when it is complete: each group of layers frees the head
of its blocks, after the tokens to keep were moved out of them.
"""


def register() -> None:
    """Make our attention known before vLLM chooses one, in each of its processes.

    vLLM calls this wherever the package is installed (entry point `vllm.general_plugins`). Without
    our worker and scheduler that attention is vLLM's own; other releases of vLLM are left alone,
    and refused by the worker if they are configured.
    """
    import vllm

    from .checks import TESTED

    if vllm.__version__.partition("+")[0] in TESTED:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        register_backend(AttentionBackendEnum.CPU_ATTN, "pyramidkv.vllm.cpu.CompressedCPUBackend")
