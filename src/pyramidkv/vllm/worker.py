"""vLLM's CPU worker, whose full-attention layers have budgets by group."""

from __future__ import annotations

import re
from typing import Any

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from . import running
from .blocks import CompressedSpec
from .checks import check_config, check_hook, settings_of
from .seeds import keep_seeds
from .settings import ServingError

register_backend(AttentionBackendEnum.CPU_ATTN, "pyramidkv.vllm.cpu.CompressedCPUBackend")


check_hook(CPUWorker, "init_device")
check_hook(CPUWorker, "get_kv_cache_spec")


class CompressedCPUWorker(CPUWorker):
    """Replaces the specification of each full-attention layer by one with its group's budget."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        if not current_platform.is_cpu():
            raise ServingError(
                f"pyramidkv serves on CPUs only so far; vLLM found {current_platform.device_name}"
            )
        self._settings = settings_of(vllm_config)  # refuses before anything is loaded
        check_config(vllm_config, self._settings)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        running.remember(self.vllm_config, self.model_runner)
        keep_seeds(self.model_runner)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        self._check_attention()
        if shared := getattr(self.model_runner, "shared_kv_cache_layers", None):
            raise ServingError(
                "pyramidkv cannot serve with layers that share another layer's cache; "
                f"{len(shared)} of this model do"
            )
        others = {type(s).__name__ for s in specs.values() if type(s) is not FullAttentionSpec}
        if others:
            raise ServingError(
                "pyramidkv serves models whose layers all have full attention; this one has "
                f"{', '.join(sorted(others))} too, which was not tried yet"
            )
        layers = self.vllm_config.model_config.get_total_num_hidden_layers()
        per_group = layers // self._settings.groups
        return {
            name: CompressedSpec.of(spec, self._settings, _layer_number(name) // per_group)
            for name, spec in specs.items()
        }

    def _check_attention(self) -> None:
        """Refuse attention that would not compress: blocks would be freed all the same."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        others = {type(layer.impl).__name__ for layer in layers.values()} - {"CompressedCPUImpl"}
        if others:
            raise ServingError(
                f"vLLM uses {', '.join(sorted(others))} as its attention; if it was started "
                "without pyramidkv in this process before, it goes on with what it chose then: use "
                "another process"
            )


def _layer_number(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise ServingError(f"the layer {name!r} has no number, so it belongs to no group")
    return int(found[1])
