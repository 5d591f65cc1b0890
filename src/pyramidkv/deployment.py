"""What a plan is for: requests, types and machines."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import PyramidKVError

WEIGHT_BYTES = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
"""Bytes per weight, without the scales that quantised types carry."""

CACHE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "int8": 1,
}
"""Bytes per number in the cache, without scales."""

UTILIZATION = 0.9
"""Fraction of a GPU's memory that serving may use, as vLLM's default."""

LARGEST_CONTEXT = 10**8
LARGEST_BATCH = 10**6
LARGEST_PARALLEL = 1024


class PlanError(PyramidKVError, ValueError):
    """Something that cannot be planned; the message says what is allowed."""


@dataclass(frozen=True)
class Deployment:
    """What to plan for.

    Attributes:
        context: prompt tokens of a request.
        batch: requests processed together.
        max_new_tokens: tokens generated for each; figures are those after the last one.
        dtype: type of the weights, one of `WEIGHT_BYTES`; None: the model's own.
        kv_dtype: type of the cache, one of `CACHE_BYTES`; None: the weights', or bfloat16 if
            they are quantised.
        tensor_parallel: GPUs that share each layer.
        gpu_memory: bytes of each GPU; None: not given.
        utilization: fraction of them that may be used.
        kv_memory: bytes for the cache on all GPUs together, instead of `gpu_memory`.
        bandwidth: bytes per second that each GPU reads.
        prefill_chunk: tokens of a piece, if the prompt is processed in pieces.

    Raises:
        PlanError: a value is out of its range.
    """

    context: int
    batch: int = 1
    max_new_tokens: int = 0
    dtype: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    gpu_memory: int | None = None
    utilization: float = UTILIZATION
    kv_memory: int | None = None
    bandwidth: int | None = None
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("context", 1, LARGEST_CONTEXT),
            ("batch", 1, LARGEST_BATCH),
            ("max_new_tokens", 0, LARGEST_CONTEXT),
            ("tensor_parallel", 1, LARGEST_PARALLEL),
            ("prefill_chunk", 1, LARGEST_CONTEXT),
            ("gpu_memory", 1, 10**18),
            ("kv_memory", 1, 10**18),
            ("bandwidth", 1, 10**18),
        ):
            value = getattr(self, name)
            may_lack = name in ("prefill_chunk", "gpu_memory", "kv_memory", "bandwidth")
            if value is None and may_lack:
                continue
            if type(value) is not int or not least <= value <= most:
                raise PlanError(
                    f"{name} is {value!r}; it must be a whole number from {least} to {most:,}"
                )
        if not 0 < self.utilization <= 1:
            raise PlanError(f"utilization is {self.utilization}; it must be above 0 and at most 1")
        for name, allowed in (("dtype", WEIGHT_BYTES), ("kv_dtype", CACHE_BYTES)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise PlanError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if self.gpu_memory is not None and self.kv_memory is not None:
            raise PlanError(
                "give either the memory of a GPU, of which the weights take their part, or the "
                "memory for the cache; both given"
            )
