"""What our workers share: a model's layers in groups, each with its budget."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker.worker_base import WorkerBase

from . import running
from .blocks import CompressedSpec
from .checks import check_config, full_layers, settings_of
from .settings import WORKERS, Device, ServingError


class GroupedWorker(WorkerBase):
    """Replaces the specification of each full-attention layer by one with its group's budget.

    To be inherited from before one of vLLM's workers.

    Attributes:
        device_kind: where it runs.
        attention: the name of the class that compresses.
    """

    device_kind: ClassVar[Device]
    attention: ClassVar[str]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any):
        check_device(self.device_kind)
        self._settings = settings_of(vllm_config)  # refuses before anything is loaded
        check_config(vllm_config, self._settings)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        running.remember(self.vllm_config, self.model_runner)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        check_attention({name: layer.impl for name, layer in layers.items()}, self.attention)
        shared = [name for name in layers if layers[name].kv_sharing_target_layer_name]
        if shared:
            raise ServingError(
                "pyramidkv cannot serve with layers that share another layer's cache; "
                f"{len(shared)} of this model do"
            )
        numbers = full_layers(self.vllm_config)
        check_specs(specs, numbers)
        per_group = len(numbers) // self._settings.groups
        return {
            name: CompressedSpec.of(
                spec, self._settings, numbers.index(layer_number(name)) // per_group
            )
            if type(spec) is FullAttentionSpec
            else spec
            for name, spec in specs.items()
        }


def check_device(wanted: Device) -> None:
    """Refuse another platform than a worker is for.

    Raises:
        ServingError: it names the worker for the platform that vLLM found, if there is one.
    """
    platform = current_platform
    found: Device | None = "cpu" if platform.is_cpu() else "cuda" if platform.is_cuda() else None
    if found is None:
        raise ServingError(
            "pyramidkv serves on CPUs and, to be tried, on GPUs of NVIDIA; vLLM found "
            f"{platform.device_name}"
        )
    if found != wanted:
        raise ServingError(
            f"vLLM runs on {platform.device_name} here; give --worker-cls {WORKERS[found]}, or "
            f"start with pyramidkv serve --device {found}"
        )


def check_attention(impls: dict[str, Any], wanted: str) -> None:
    """Refuse attention that would not compress (blocks would be freed all the same), or whose
    results depend on where in a sequence a token is stored.

    Args:
        impls: vLLM's implementation by layer.
        wanted: the name of the class that compresses.

    Raises:
        ServingError: see above.
    """
    others = {type(impl).__name__ for impl in impls.values()} - {wanted}
    if others:
        raise ServingError(
            f"vLLM uses {', '.join(sorted(others))} as its attention; if it was started "
            "without pyramidkv in this process before, it goes on with what it chose then: use "
            "another process"
        )
    for impl in impls.values():
        if getattr(impl, "alibi_slopes", None) is not None:
            raise ServingError("pyramidkv cannot serve with ALiBi, which counts stored positions")
        if getattr(impl, "sinks", None) is not None:
            raise ServingError(
                "pyramidkv cannot serve with learned attention sinks, which its scores do not know"
            )


def check_specs(specs: Mapping[str, KVCacheSpec], full: Sequence[int]) -> None:
    """Refuse layers that are neither compressed nor bounded by a window.

    Args:
        specs: vLLM's, by layer.
        full: the numbers of the layers that have full attention, by the model's configuration.

    Raises:
        ServingError: see above.
    """
    kinds = (FullAttentionSpec, SlidingWindowSpec)
    others = {type(spec).__name__ for spec in specs.values() if type(spec) not in kinds}
    if others:
        raise ServingError(
            "pyramidkv serves models whose layers have full attention or a sliding window; this "
            f"one has {', '.join(sorted(others))} too, which was not tried yet"
        )
    found = [layer_number(name) for name, s in specs.items() if type(s) is FullAttentionSpec]
    if sorted(found) != list(full):
        raise ServingError(
            f"vLLM gives {len(found)} layers of this model full attention, but by its "
            f"configuration it has {len(full)} of them"
        )


def layer_number(name: str) -> int:
    """Return the number in a layer's name.

    Raises:
        ServingError: it has none.
    """
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise ServingError(f"the layer {name!r} has no number, so it belongs to no group")
    return int(found[1])
