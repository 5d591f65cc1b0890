"""FlashAttention's functions on blocks, written out; the tables and lengths given are noted.

The arguments are those by which vLLM calls them.
"""

from __future__ import annotations

import torch

GIVEN = set()
"""Addresses of block tables and lengths that `attend` was given, in pairs."""


def attend(q, k, v, out, cu_seqlens_q, seqused_k, max_seqlen_k, block_table, softmax_scale, **_):
    """Attention of packed queries to blocks `[blocks, size, heads, head_dim]`."""
    GIVEN.add((block_table.data_ptr(), seqused_k.data_ptr()))
    size, group = k.shape[1], q.shape[1] // k.shape[2]
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        start, end = starts[row], starts[row + 1]
        if end == start:
            continue
        assert end - start <= length <= max_seqlen_k
        blocks = block_table[row, : -(-length // size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1).repeat_interleave(group, 0)
            for cache in (k, v)
        )
        seen = torch.ones((end - start, length), dtype=torch.bool).tril(length - (end - start))
        out[start:end] = torch.nn.functional.scaled_dot_product_attention(
            q[start:end].transpose(0, 1), keys, values, attn_mask=seen, scale=softmax_scale
        ).transpose(0, 1)
    return out


def store(key, value, key_cache, value_cache, slot_mapping, *_):
    """Write each token's key and value to its slot; negative slots are padding."""
    size = key_cache.shape[1]
    real = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[real]
    key_cache[slots // size, slots % size] = key[real]
    value_cache[slots // size, slots % size] = value[real]


def plan_ahead(cache_seqlens, **_):
    """Scheduler metadata in the shape of FlashAttention 3's."""
    return torch.zeros(1 + -(-len(cache_seqlens) // 4) * 16, dtype=torch.int32)
