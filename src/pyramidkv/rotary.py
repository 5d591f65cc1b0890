"""Moving cached keys to other positions, for methods that number the kept tokens anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .method_options import MethodError

_FIXED_TYPES = ("default", "linear", "llama3", "yarn")


def key_frequencies(model: PreTrainedModel) -> Tensor:
    """Return the rotary frequencies of the model's full-attention layers, in radians per token.

    Raises:
        MethodError: the frequencies change with the length of the text (dynamic, longrope), so
            keys cannot be moved.
    """
    decoder: Any = model.get_decoder()
    rotary = decoder.pos_emb if model.config.model_type == "lfm2_moe" else decoder.rotary_emb
    kind, name = rotary.rope_type, "inv_freq"
    if isinstance(kind, dict):  # models whose sliding layers have frequencies of their own
        kind, name = kind["full_attention"], "full_attention_inv_freq"
    if kind not in _FIXED_TYPES:
        raise MethodError(
            f"tokens cannot be renumbered with rotary embeddings of type {kind!r}, whose "
            f"frequencies depend on the length; they can with {', '.join(_FIXED_TYPES)}"
        )
    frequencies: Tensor = getattr(rotary, name)
    return frequencies.float()


def move_keys(keys: Tensor, by: Tensor, frequencies: Tensor) -> Tensor:
    """Return keys as they would be `by` positions further on.

    Rotations add up, so a key at p turned by d is the key at p + d (RoFormer, arXiv 2104.09864,
    section 3.2.2). A scale on the embedding (YaRN) stays as it is.

    Args:
        keys: `[batch, kv_heads, tokens, head_dim]`, rotated; dimension i pairs with i + half.
        by: whole numbers `[batch, kv_heads, tokens]`.
        frequencies: `[rotary_dim / 2]`; what lies beyond the rotary dimensions is not turned.
    """
    half = frequencies.shape[0]
    angle = by[..., None].float() * frequencies.to(keys.device)
    cos, sin = angle.cos(), angle.sin()
    first, second = keys[..., :half].float(), keys[..., half : 2 * half].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.to(keys.dtype), keys[..., 2 * half :]], dim=-1)
