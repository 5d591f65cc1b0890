"""Attention of new queries over what a cache holds, dense or ragged, without repeating KV heads.

The query heads that share a KV head are further queries to it. A ragged cache's flat part is taken
tile by tile, all of them in one call, or segment by segment, if they are few and short; what the
parts of a segment and its tail give is merged by the logarithms of their softmax sums, so that it
is one softmax over all. Logits are float32 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .ragged import RaggedStorage
from .scores import workspace_bytes

SPLIT_ROWS = 1024
"""Keys that are worth a thread of their own, on a CPU."""
FEW_SEGMENTS = 4
"""Heads of batch rows that a CPU takes one after the other, if they are short."""


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last `n` rows' queries over a dense cache.

    Args:
        queries: `[batch, query_heads, n, head_dim]`; they see each other causally, and every row
            before.
        keys, values: `[batch, kv_heads, rows, head_dim]`, the new tokens' rows included.
        scale, softcap: of the attention logits.
        visible: bool `[batch, rows]` or `[batch, kv_heads, rows]`, which rows are real; None if
            all are.

    Returns:
        `[batch, query_heads, n, head_dim]`; zero for a query that sees nothing.
    """
    mask = _mask(queries, keys, visible)
    grouped = group_queries(queries, keys.shape[1])
    if mask is None:
        output = _attend_split(grouped, keys, values, scale, softcap)
    else:
        output = _attend(grouped, keys, values, scale, softcap, mask).output
    return output.to(queries.dtype).reshape(*queries.shape[:3], -1)


def attend_ragged(
    queries: Tensor, storage: RaggedStorage, scale: float, softcap: float | None = None
) -> Tensor:
    """Return the attention of the tail's last `n` rows' queries over a ragged cache.

    Takes and returns what `attend` does, the storage in place of dense states.

    Raises:
        ValueError: there are more queries than rows in the tail.
    """
    check_new(queries, storage)
    tail = storage.tail
    grouped = group_queries(queries, storage.kv_heads)
    mask = _mask(queries, tail.keys, tail.visible())
    after = _attend(grouped, tail.keys, tail.values, scale, softcap, mask).by_segment()
    segments = grouped.flatten(0, 1)[:, None]
    kept, count = len(storage.keys), len(segments)
    if kept and (
        count > FEW_SEGMENTS or kept > count * SPLIT_ROWS or storage.keys.device.type != "cpu"
    ):
        output = _attend_tiles(segments, after, storage, scale, softcap)
    else:
        output = _attend_each(segments, storage, scale, softcap).merge(after).output
    return output.to(queries.dtype).reshape(*queries.shape[:3], -1)


def attend_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Return what `attend` returns, as one masked softmax in float32.

    For a ragged cache, give it `RaggedStorage.dense()`.
    """
    batch, heads, new, _ = queries.shape
    kv_heads, rows = keys.shape[1:3]
    grouped = queries.float().view(batch, kv_heads, heads // kv_heads, new, -1)
    logits = torch.einsum("bhgqd,bhkd->bhgqk", grouped, keys.float()) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mask = torch.ones((new, rows), dtype=torch.bool, device=keys.device).tril(rows - new)
    if visible is not None:
        by_head = visible if visible.ndim == 3 else visible[:, None]
        mask = mask & by_head[:, :, None, None]
    weights = logits.masked_fill(~mask, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    output = torch.einsum("bhgqk,bhkd->bhgqd", weights, values.float())
    return output.flatten(1, 2).to(queries.dtype)


@dataclass(frozen=True)
class _Part:
    """Attention over some of the keys.

    Attributes:
        output: `[batch, kv_heads, queries, head_dim]`, as if there were no other keys.
        log_sum: float32 `[batch, kv_heads, queries]`, the logarithm of the softmax's sum; minus
            infinity, and an output of zero, where nothing is seen.
    """

    output: Tensor
    log_sum: Tensor

    @classmethod
    def nothing(cls, queries: Tensor, values: Tensor) -> _Part:
        output = queries.new_zeros((*queries.shape[:3], values.shape[-1]), dtype=torch.float32)
        return cls(output, output.new_full(queries.shape[:3], float("-inf")))

    @classmethod
    def join(cls, parts: Sequence[_Part]) -> _Part:
        """Return them as one batch, one behind the other."""
        return cls(torch.cat([p.output for p in parts]), torch.cat([p.log_sum for p in parts]))

    def by_segment(self) -> _Part:
        """Return it with one row for each KV head of each row."""
        return _Part(self.output.flatten(0, 1)[:, None], self.log_sum.flatten(0, 1)[:, None])

    def merge(self, other: _Part) -> _Part:
        """Return the attention over the keys of both."""
        share = torch.sigmoid((other.log_sum - self.log_sum).nan_to_num(0.0))  # both see nothing
        output = self.output.float().lerp(other.output.float(), share[..., None])
        return _Part(output, torch.logaddexp(self.log_sum, other.log_sum))


def check_new(queries: Tensor, storage: RaggedStorage) -> None:
    """Raise what `attend_ragged` raises."""
    new, rows = queries.shape[2], storage.tail.rows
    if new > rows:
        raise ValueError(
            f"{new} queries were given, but only {rows} rows follow the prompt; append the new "
            "tokens' states first"
        )


def group_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """Return the queries of each KV head, `[batch, kv_heads, query heads of it * n, head_dim]`."""
    batch, heads, new, head_dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * new, head_dim)


def _mask(queries: Tensor, keys: Tensor, visible: Tensor | None) -> Tensor | None:
    """Return which keys each grouped query sees, bool `[batch or 1, kv_heads or 1, queries, rows]`.

    None if every query sees every key.
    """
    heads, new = queries.shape[1:3]
    kv_heads, rows = keys.shape[1:3]
    if visible is not None:
        visible = visible[:, None, None] if visible.ndim == 2 else visible[:, :, None]
    if new == 1:
        return None if visible is None else visible.expand(-1, -1, heads // kv_heads, -1)
    mask = torch.ones((new, rows), dtype=torch.bool, device=keys.device).tril_(rows - new)
    mask = mask.repeat(heads // kv_heads, 1)[None, None]
    return mask if visible is None else mask & visible


def _attend_each(
    queries: Tensor, storage: RaggedStorage, scale: float, softcap: float | None
) -> _Part:
    """Return the attention of `[segments, 1, queries, head_dim]` over the flat part, one by one."""
    lengths = [end - start for start, end in pairwise(storage.bounds())]
    keys, values = (flat[None, None].split(lengths, 2) for flat in (storage.keys, storage.values))
    each = zip(queries.split(1), keys, values, strict=True)
    return _Part.join([_attend(*segment, scale, softcap) for segment in each])


def _attend_tiles(
    queries: Tensor, after: _Part, storage: RaggedStorage, scale: float, softcap: float | None
) -> Tensor:
    """Return the attention of `[segments, 1, queries, head_dim]` over the flat part and the tail.

    That over the tail, `after`, is there already; tiles, and windows on what they leave, join it.
    """
    tiles, keys, values = storage.tiles(), storage.keys, storage.values
    _, of_tiles, of_windows = queries.index_select(0, tiles.owners).split(tiles.sizes)
    whole = _attend(of_tiles, tiles.tiles_of(keys), tiles.tiles_of(values), scale, softcap)
    copies = tiles.windows_of(keys), tiles.windows_of(values)
    rest = _attend(of_windows, *copies, scale, softcap, tiles.hidden)
    counted = _Part(whole.output, whole.log_sum + tiles.shared)
    return _merge([after, counted, rest], tiles.owners)


def _merge(parts: Sequence[_Part], owners: Tensor) -> Tensor:
    """Return the output of each owner, those that come first in all parts together.

    Args:
        parts: `[any, 1, queries, head_dim]` each; the first has one for each owner, in order.
        owners: int64, of each one of all parts.
    """
    joined = _Part.join(parts)
    log_sum = joined.log_sum
    highest = parts[0].log_sum.clamp_min(torch.finfo(log_sum.dtype).min)  # finite
    highest.scatter_reduce_(0, owners.view(-1, 1, 1).expand_as(log_sum), log_sum, "amax")
    shares = (log_sum - highest.index_select(0, owners)).exp_()[..., None]
    total = torch.zeros_like(highest[..., None]).index_add_(0, owners, shares)
    mixed = torch.zeros_like(parts[0].output, dtype=torch.float32)
    mixed.index_add_(0, owners, joined.output * shares)
    return mixed / total.clamp_min(torch.finfo().tiny)


def _attend_split(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return the output of `_attend`, with long keys split so that no thread of a CPU is idle."""
    batch, kv_heads, rows, _ = keys.shape
    pieces = 1
    if keys.device.type == "cpu":
        pieces = min(torch.get_num_threads() // (batch * kv_heads), rows // SPLIT_ROWS)
    if pieces <= 1:
        return _attend(queries, keys, values, scale, softcap).output
    outputs = []
    for row in zip(queries.split(1), keys.split(1), values.split(1), strict=True):
        part = _Part.join(_attend_pieces(*row, pieces, scale, softcap))
        shares = part.log_sum.softmax(0)[..., None]
        outputs.append((part.output * shares).sum(0, keepdim=True))
    return torch.cat(outputs)


def _attend_pieces(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    pieces: int,
    scale: float,
    softcap: float | None,
) -> list[_Part]:
    """Return the attention of one row of a batch over so many pieces of the keys, and the rest."""
    end = keys.shape[2] // pieces * pieces
    # As rows of a batch, which a kernel takes side by side; views, whatever lies between heads.
    split_keys, split_values = (
        states[0, :, :end].unflatten(1, (pieces, -1)).transpose(0, 1) for states in (keys, values)
    )
    expanded = queries.expand(pieces, -1, -1, -1)
    parts = [_attend(expanded, split_keys, split_values, scale, softcap)]
    if end < keys.shape[2]:
        parts.append(_attend(queries, keys[:, :, end:], values[:, :, end:], scale, softcap))
    return parts


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None = None,
) -> _Part:
    """Return the attention of `[batch, kv_heads, queries, head_dim]` over keys of as many heads.

    The mask tells which keys a query sees; or it is float32, to be added to the logits, and no
    query sees nothing.
    """
    if keys.shape[2] == 0 or queries.shape[0] == 0:
        return _Part.nothing(queries, values)
    if softcap is None and has_kernel(queries, keys, values):
        additive = mask
        if mask is not None and mask.dtype == torch.bool:
            additive = torch.zeros(mask.shape, device=keys.device)
            additive.masked_fill_(~mask, float("-inf"))
        part = _Part(
            *torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries, keys, values, attn_mask=additive, scale=scale
            )
        )
        return _without_blind(part, mask)
    return _attend_in_blocks(queries, keys, values, scale, softcap, mask)


def has_kernel(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Say whether torch's fused kernel for CPUs takes these; it gives out its softmax's sums."""
    return (
        keys.device.type == "cpu"
        and queries.dtype == keys.dtype
        and keys.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and keys.shape[3] == values.shape[3]
        and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    )


def _without_blind(part: _Part, mask: Tensor | None) -> _Part:
    """Return a part with nothing in it for queries that see nothing."""
    if mask is None or mask.dtype != torch.bool:
        return part
    blind = ~mask.any(-1)
    output = part.output.masked_fill(blind[..., None], 0.0)
    return _Part(output, part.log_sum.masked_fill(blind, float("-inf")))


def _attend_in_blocks(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    softcap: float | None,
    mask: Tensor | None,
) -> _Part:
    """Do the work of `_attend`, in float32, with a bounded number of keys at once."""
    batch, kv_heads, count, head_dim = queries.shape
    row_bytes = 4 * batch * kv_heads * max(count, head_dim)
    step = max(1, workspace_bytes(keys.device) // row_bytes)
    scaled = queries.float() * scale
    part = None
    for start in range(0, keys.shape[2], step):
        rows = slice(start, start + step)
        logits = scaled @ keys[:, :, rows].float().mT
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        if mask is not None and mask.dtype == torch.bool:
            logits.masked_fill_(~mask[..., rows], float("-inf"))
        elif mask is not None:
            logits.add_(mask[..., rows])
        log_sum = logits.logsumexp(-1)
        weights = logits.sub_(log_sum[..., None]).exp_()
        block = _Part(weights @ values[:, :, rows].float(), log_sum)
        block = _without_blind(block, None if mask is None else mask[..., rows])
        part = block if part is None else part.merge(block)
    assert part is not None
    return part
