"""Attention on transformers' public surface: each pass on all its keys, then the layer evicts.

A function registered with `AttentionInterface` wraps the model's own implementation (eager, sdpa,
flash attention). `CompressedLayer.update` tags the keys it returns with itself; by that tag the
function finds the layer to compress once the attention is computed. Keys without the tag
(sliding-window layers, other caches, no cache) go to the wrapped implementation untouched, so a
switched model behaves exactly as before for everything but our caches.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .errors import PyramidKVError

if TYPE_CHECKING:
    from .layer import CompressedLayer
    from .static_cache import StaticCompressedLayer

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

LAYER_TAG = "_pyramidkv_layer"
PREFIX = "pyramidkv_"


class AttentionError(PyramidKVError, RuntimeError):
    """The model's attention implementation cannot be wrapped, or was changed meanwhile."""


def _wrapped_name(base: str) -> str:
    # transformers treats any name that contains "flash" as flash attention itself.
    return PREFIX + base.replace("flash_attention_", "fa")


def _is_flash(base: str) -> bool:
    return base.startswith("flash_attention_")


def _register(base: str) -> str:
    """Register our function over the implementation `base` and return its name."""
    if base not in ("eager", "sdpa") and not _is_flash(base):
        raise AttentionError(
            f"the attention implementation {base!r} is not supported; load the model with "
            "attn_implementation 'sdpa', 'eager' or 'flash_attention_2'"
        )
    name = _wrapped_name(base)
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, _make_attention(base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _make_attention(base: str) -> AttentionFunction:
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        output: tuple[Tensor, Tensor | None]
        layer: CompressedLayer | StaticCompressedLayer | None = getattr(key, LAYER_TAG, None)
        if layer is None:
            run = _base_function(base, module)
            return run(module, query, key, value, attention_mask, **kwargs)
        visible = layer.visible(key, attention_mask, _valid_tokens)
        scale, softcap = kwargs.get("scaling") or query.shape[-1] ** -0.5, kwargs.get("softcap")
        if layer.attends(base, query):
            output = layer.attend(query, scale, softcap).transpose(1, 2).contiguous(), None
        else:
            if not layer.at_start:
                attention_mask = _step_mask(base, visible, key, query.shape[2])
            run = _base_function(base, module)
            output = run(module, query, key, value, attention_mask, **kwargs)
        layer.finish(query, key, value, scale, softcap)
        return output

    return attention


def _base_function(base: str, module: torch.nn.Module) -> AttentionFunction:
    if base == "eager":
        # Each modeling file has its own eager function; it is no entry of the interface.
        modeling = importlib.import_module(type(module).__module__)
        return modeling.eager_attention_forward  # type: ignore[no-any-return]
    function: AttentionFunction = ALL_ATTENTION_FUNCTIONS[base]
    if not _is_flash(base):
        return function

    def flash(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return function(_NamedImplementation(module, base), *args, **kwargs)

    return flash


class _NamedImplementation:
    """A module seen with the wrapped implementation's name, by which flash attention loads."""

    def __init__(self, module: Any, base: str):
        self._module = module
        self.config = _ConfigView(module.config, base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _ConfigView:
    def __init__(self, config: Any, base: str):
        self._config = config
        self._attn_implementation = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _valid_tokens(attention_mask: Tensor) -> Tensor:
    """Read from any implementation's mask which tokens are real: bool `[batch, tokens]`.

    Flash attention takes the 2-D padding mask itself. The 4-D masks of eager (additive) and sdpa
    (bool) show every real token in the row of the last query.
    """
    last = attention_mask if attention_mask.ndim == 2 else attention_mask[:, 0, -1, :]
    if last.dtype == torch.bool:
        return last
    additive = last.is_floating_point()
    return last == 0 if additive else last > 0


def _step_mask(base: str, visible: Tensor | None, key: Tensor, count: int) -> Tensor | None:
    """Build the mask of `count` new queries over the stored keys, in the form `base` takes.

    `visible` is bool `[batch, stored]`, or None when every stored row is real. The new tokens are
    the last rows and see each other causally; everything before them is visible.
    """
    if _is_flash(base):
        return visible  # causal from the bottom right by itself
    if visible is None and count == 1:
        return None
    stored = key.shape[2]
    mask = torch.ones((1, 1, count, stored), dtype=torch.bool, device=key.device)
    mask = mask.tril_(stored - count)
    if visible is not None:
        mask = mask & visible[:, None, None, :]
    if base == "sdpa":
        return mask
    additive = torch.zeros(mask.shape, dtype=key.dtype, device=key.device)
    return additive.masked_fill_(~mask, torch.finfo(key.dtype).min)


class _Users:
    def __init__(self, original: str):
        self.original = original
        self.count = 0


_switching = threading.RLock()  # a cache may be dropped by any thread, at any moment
_switched: WeakKeyDictionary[PreTrainedModel, _Users] = WeakKeyDictionary()


def acquire(model: PreTrainedModel) -> None:
    """Switch the model to our attention function until every user has released it.

    Raises:
        AttentionError: the model's implementation cannot be wrapped.
    """
    with _switching:
        users = _switched.get(model)
        if users is None:
            users = _Users(model.config._attn_implementation)
            name = _register(users.original)
            model.set_attn_implementation(name)
            if model.config._attn_implementation != name:
                raise AttentionError(
                    f"{type(model).__name__} does not let its attention implementation be set, so "
                    "its cache cannot be compressed"
                )
            _switched[model] = users
        users.count += 1


def release(model: PreTrainedModel) -> None:
    """Undo one `acquire`; the last one gives the model its own implementation back."""
    with _switching:
        users = _switched.get(model)
        if users is None:
            return
        users.count -= 1
        if users.count == 0:
            del _switched[model]
            if model.config._attn_implementation == _wrapped_name(users.original):
                model.set_attn_implementation(users.original)
