"""Attention over a ragged cache in Triton, for GPUs. Needs the package triton.

UNVERIFIED ON HARDWARE: tested in Triton's interpreter, compiled for compute capability 9.0, but
never run or timed on a GPU.

The flat part is cut into tiles of equally many rows, whatever heads they belong to, so that every
program has the same work however unequal the heads are. A tile attends to each segment it has rows
of, and the query heads of a KV head share what is loaded. Tile t leaves its share of segment s in
slot t + s: both only grow along the flat part, so no two shares meet, and sizes follow from the
number of rows alone. A second pass puts the shares of each segment and of its tail together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import check_new, group_queries
from .ragged import RaggedStorage

PROGRAMS = 256
"""Tiles to aim for: about two for each multiprocessor of a large GPU."""

LEAST_TILE, LARGEST_TILE = 64, 1024
QUERY_BLOCK = 32
"""Queries of a KV head that one program takes, at most: heads of the group x new tokens."""


def attend_ragged(
    queries: Tensor, storage: RaggedStorage, scale: float, softcap: float | None = None
) -> Tensor:
    """Return what `decode_attention.attend_ragged` returns, without waiting for the device."""
    check_new(queries, storage)
    batch, heads, new, head_dim = queries.shape
    kv_heads, tail = storage.kv_heads, storage.tail
    grouped = group_queries(queries, kv_heads).flatten(0, 1).contiguous()
    segments, count, _ = grouped.shape
    kept, value_dim = storage.values.shape
    wanted = triton.next_power_of_2(triton.cdiv(max(kept, 1), PROGRAMS))
    tile = min(LARGEST_TILE, max(LEAST_TILE, wanted))
    tiles, splits = triton.cdiv(kept, tile), triton.cdiv(tail.rows, tile)
    slots = tiles + segments
    parts = grouped.new_empty((slots + segments * splits, count, value_dim), dtype=torch.float32)
    log_sums = parts.new_empty(parts.shape[:2])
    block = min(QUERY_BLOCK, max(16, triton.next_power_of_2(count)))
    blocks = triton.cdiv(count, block)
    sizes = {
        "QUERIES": count,
        "KEY_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "QUERY_BLOCK": block,
        "KEY_WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "VALUE_WIDTH": max(16, triton.next_power_of_2(value_dim)),
    }
    logits = {"scale": scale, "softcap": softcap or 1.0, "CAPPED": softcap is not None}
    rows = {"TILE": tile, "ROW_BLOCK": 64 if head_dim <= 128 else 32}
    if tiles:
        _attend_tile[(tiles, blocks)](
            grouped,
            storage.keys,
            storage.values,
            storage.offsets,
            parts,
            log_sums,
            kept,
            segments,
            SEGMENT_WIDTH=triton.next_power_of_2(segments),
            **logits,
            **rows,
            **sizes,
        )
    visible = tail.visible()
    _attend_tail[(segments, splits, blocks)](
        grouped,
        tail.keys,
        tail.values,
        tail.keys if visible is None else visible,
        parts,
        log_sums,
        tail.rows,
        new,
        kv_heads,
        slots,
        *tail.keys.stride()[:3],
        *tail.values.stride()[:3],
        0 if visible is None else visible.stride(0),
        HOLES=visible is not None,
        **logits,
        **rows,
        **sizes,
    )
    output = queries.new_empty((segments, count, value_dim))
    _combine[(segments, blocks)](
        parts, log_sums, storage.offsets, output, slots, splits, TILE=tile, **sizes
    )
    return output.view(batch, heads, new, value_dim)


@triton.jit
def _attend_tile(
    queries,
    keys,
    values,
    offsets,
    parts,
    log_sums,
    kept,
    segments,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    SEGMENT_WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Attend to the rows of one tile of the flat part, segment after segment."""
    tile = tl.program_id(0)
    query = tl.program_id(1) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    row = tile * TILE
    end = tl.minimum(row + TILE, kept)
    every = tl.arange(0, SEGMENT_WIDTH)
    ends = tl.load(offsets + 1 + every, mask=every < segments, other=2**31 - 1)
    segment = tl.sum((ends <= row).to(tl.int32))  # the first that ends behind this row
    while row < end:
        stop = tl.minimum(tl.load(offsets + segment + 1), end)
        if stop > row:
            own = _load_queries(queries, segment, query, QUERIES, KEY_DIM, KEY_WIDTH)
            peak, total, output = _begin(QUERY_BLOCK, VALUE_WIDTH)
            for start in range(row, stop, ROW_BLOCK):
                at = start + tl.arange(0, ROW_BLOCK)
                peak, total, output = _add_rows(
                    peak,
                    total,
                    output,
                    own,
                    _load_rows(keys, at, stop, KEY_DIM, KEY_DIM, KEY_WIDTH),
                    _load_rows(values, at, stop, VALUE_DIM, VALUE_DIM, VALUE_WIDTH),
                    (query < QUERIES)[:, None] & (at < stop)[None, :],
                    scale,
                    softcap,
                    CAPPED,
                )
            _store_part(
                parts,
                log_sums,
                tile + segment,
                query,
                peak,
                total,
                output,
                QUERIES,
                VALUE_DIM,
                VALUE_WIDTH,
            )
            row = stop
        segment += 1


@triton.jit
def _attend_tail(
    queries,
    keys,
    values,
    visible,
    parts,
    log_sums,
    rows,
    new,
    kv_heads,
    slots,
    key_batch_stride,
    key_head_stride,
    key_row_stride,
    value_batch_stride,
    value_head_stride,
    value_row_stride,
    visible_stride,
    scale,
    softcap,
    CAPPED: tl.constexpr,
    HOLES: tl.constexpr,
    TILE: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Attend to some rows of one head's tail; its last `new` rows see each other causally."""
    segment, split = tl.program_id(0), tl.program_id(1)
    query = tl.program_id(2) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    batch, head = (segment // kv_heads).to(tl.int64), (segment % kv_heads).to(tl.int64)
    keys += batch * key_batch_stride + head * key_head_stride
    values += batch * value_batch_stride + head * value_head_stride
    own = _load_queries(queries, segment, query, QUERIES, KEY_DIM, KEY_WIDTH)
    peak, total, output = _begin(QUERY_BLOCK, VALUE_WIDTH)
    first = split * TILE
    stop = tl.minimum(first + TILE, rows)
    last_seen = rows - new + query % new
    for start in range(first, stop, ROW_BLOCK):
        at = start + tl.arange(0, ROW_BLOCK)
        seen = (query < QUERIES)[:, None] & (at < stop)[None, :]
        seen &= at[None, :] <= last_seen[:, None]
        if HOLES:
            real = tl.load(visible + batch * visible_stride + at, mask=at < stop, other=0)
            seen &= (real != 0)[None, :]
        peak, total, output = _add_rows(
            peak,
            total,
            output,
            own,
            _load_rows(keys, at, stop, key_row_stride, KEY_DIM, KEY_WIDTH),
            _load_rows(values, at, stop, value_row_stride, VALUE_DIM, VALUE_WIDTH),
            seen,
            scale,
            softcap,
            CAPPED,
        )
    slot = slots + segment * tl.num_programs(1) + split
    _store_part(parts, log_sums, slot, query, peak, total, output, QUERIES, VALUE_DIM, VALUE_WIDTH)


@triton.jit
def _combine(
    parts,
    log_sums,
    offsets,
    output,
    slots,
    splits,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Put together what tiles and splits found out about one head of one row."""
    segment = tl.program_id(0)
    query = tl.program_id(1) * QUERY_BLOCK + tl.arange(0, QUERY_BLOCK)
    peak, total, result = _begin(QUERY_BLOCK, VALUE_WIDTH)
    start, end = tl.load(offsets + segment), tl.load(offsets + segment + 1)
    first = start // TILE + segment
    last = tl.where(end > start, (end - 1) // TILE + segment + 1, first)
    for slot in range(first, last):
        peak, total, result = _add_part(
            peak, total, result, parts, log_sums, slot, query, QUERIES, VALUE_DIM, VALUE_WIDTH
        )
    for split in range(splits):
        slot = slots + segment * splits + split
        peak, total, result = _add_part(
            peak, total, result, parts, log_sums, slot, query, QUERIES, VALUE_DIM, VALUE_WIDTH
        )
    result /= tl.where(total == 0, 1.0, total)[:, None]
    column = tl.arange(0, VALUE_WIDTH)
    place = (segment.to(tl.int64) * QUERIES + query)[:, None] * VALUE_DIM + column[None, :]
    real = (query < QUERIES)[:, None] & (column < VALUE_DIM)[None, :]
    tl.store(output + place, result.to(output.dtype.element_ty), mask=real)


@triton.jit
def _load_rows(states, at, end, stride, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows, `[rows, WIDTH]`; zero from row `end` on."""
    column = tl.arange(0, WIDTH)
    place = at.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(states + place, mask=(at < end)[:, None] & (column < DIM)[None, :], other=0.0)


@triton.jit
def _load_queries(
    queries, segment, at, QUERIES: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Load some queries of a segment, `[rows, WIDTH]`."""
    own = queries + segment.to(tl.int64) * QUERIES * DIM
    return _load_rows(own, at, QUERIES, DIM, DIM, WIDTH)


@triton.jit
def _begin(QUERY_BLOCK: tl.constexpr, VALUE_WIDTH: tl.constexpr):
    """Return a softmax over nothing yet: its peak, its sum, and the output so far."""
    peak = tl.full((QUERY_BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((QUERY_BLOCK,), tl.float32)
    return peak, total, tl.zeros((QUERY_BLOCK, VALUE_WIDTH), tl.float32)


@triton.jit
def _add_rows(
    peak, total, output, queries, keys, values, seen, scale, softcap, CAPPED: tl.constexpr
):
    """Add some keys to a softmax that is under way."""
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:
        logits = softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)  # the hyperbolic tangent
    logits = tl.where(seen, logits, float("-inf"))
    higher = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(logits - base[:, None])
    rest = tl.exp(peak - base)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total * rest + tl.sum(weights, 1), output * rest[:, None] + added


@triton.jit
def _store_part(
    parts,
    log_sums,
    slot,
    query,
    peak,
    total,
    output,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Store attention over some keys alone, and the logarithm of its softmax's sum."""
    column = tl.arange(0, VALUE_WIDTH)
    place = slot * QUERIES + query
    seen = tl.where(total == 0, 1.0, total)
    real = (query < QUERIES)[:, None] & (column < VALUE_DIM)[None, :]
    where = parts + place.to(tl.int64)[:, None] * VALUE_DIM + column[None, :]
    tl.store(where, output / seen[:, None], mask=real)
    log_sum = tl.where(total == 0, float("-inf"), peak + tl.log(seen))
    tl.store(log_sums + place, log_sum, mask=query < QUERIES)


@triton.jit
def _add_part(
    peak,
    total,
    result,
    parts,
    log_sums,
    slot,
    query,
    QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Add what was stored to a softmax over parts that is under way."""
    place = slot * QUERIES + query
    log_sum = tl.load(log_sums + place, mask=query < QUERIES, other=float("-inf"))
    part = _load_rows(parts, place, (slot + 1) * QUERIES, VALUE_DIM, VALUE_DIM, VALUE_WIDTH)
    higher = tl.maximum(peak, log_sum)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    rest, share = tl.exp(peak - base), tl.exp(log_sum - base)
    return higher, total * rest + share, result * rest[:, None] + part * share[:, None]
