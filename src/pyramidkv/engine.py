"""`compress`: every generation inside the `with` block uses a compressed cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from transformers import Cache, DynamicCache, PreTrainedModel

from . import attention
from .cache import CompressedCache
from .compression import Compression, make_compression
from .errors import CacheStateError
from .methods import Method
from .model_shape import layers_to_compress
from .rotary import key_frequencies
from .support import check_model

_compressing: WeakSet[PreTrainedModel] = WeakSet()  # models inside a `compress` block
_CACHE_NAMES = ("cache", "past_key_values")  # the newer name first


def cache_parameter(model: PreTrainedModel) -> str:
    """Return what this transformers release calls the cache argument of `model`."""
    parameters = inspect.signature(model.forward).parameters
    return next(name for name in _CACHE_NAMES if name in parameters)


@contextmanager
def compress(
    model: PreTrainedModel,
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    decode_budget: int | None = None,
    decode_interval: int | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[Compression]:
    """Compress the cache of everything `model` generates inside the block.

    Each `generate()` call, and each forward pass that starts without a cache or with an empty
    one, gets a fresh `CompressedCache` (an empty `DynamicCache` becomes one). On leaving the
    block, by an exception too, the model is exactly as it was.

    Args:
        model: a supported decoder-only model (see `support.SUPPORTED_MODEL_TYPES`).
        method, budget, compression_ratio, decode_budget, decode_interval, on_layer, options: see
            `CompressedCache`.

    Yields:
        The `Compression` in force.

    Raises:
        UnsupportedModelError, MethodError, BudgetError, AttentionError: before any work.

    Example:
        >>> with pyramidkv.compress(model, method="pyramidkv", budget=512):
        ...     out = model.generate(**inputs, max_new_tokens=200)
    """
    compression = make_compression(
        method,
        budget,
        compression_ratio,
        decode_budget=decode_budget,
        decode_interval=decode_interval,
        **options,
    )
    check_model(model)
    layers_to_compress(model.config, compression)
    if model in _compressing:
        raise CacheStateError(
            "this model is inside a `compress` block already; leave that one first, or give "
            "generate a CompressedCache of its own"
        )
    if compression.method.renumber:
        key_frequencies(model)  # refuses what cannot be renumbered
    decoder = model.get_decoder()
    name = cache_parameter(decoder)
    place = list(inspect.signature(decoder.forward).parameters).index(name)

    def give_cache(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        use_cache = kwargs.get("use_cache")
        if use_cache is False or (use_cache is None and not model.config.use_cache):
            raise CacheStateError(
                "use_cache is False, so there is no cache to compress; leave the `compress` block "
                "or use a cache"
            )
        kwargs = dict(kwargs)
        given = args[place] if len(args) > place else None
        for key in _CACHE_NAMES:
            given = kwargs.pop(key, None) if given is None else given
        cache = _compressed(given)
        if len(args) > place:
            return (*args[:place], cache, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: cache}

    def _compressed(given: Cache | None) -> CompressedCache:
        if isinstance(given, CompressedCache):
            return given
        if given is None:
            return CompressedCache.for_switched_model(model, compression, on_layer)
        if type(given) is DynamicCache and given.get_seq_length() == 0 and not given.offloading:
            return CompressedCache.convert(given, model, compression, on_layer)
        raise CacheStateError(
            f"a {type(given).__name__} that holds {given.get_seq_length()} tokens was given inside "
            "a `compress` block; give an empty DynamicCache (without offloading), a "
            "CompressedCache or no cache"
        )

    attention.acquire(model)
    _compressing.add(model)
    try:
        hook = decoder.register_forward_pre_hook(give_cache, with_kwargs=True)
        try:
            yield compression
        finally:
            hook.remove()
    finally:
        _compressing.discard(model)
        attention.release(model)
