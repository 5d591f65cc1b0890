"""Token scores: how much each cached token matters. Pure functions of one layer's states.

All scores share one signature and return float32 of shape `[batch, kv_heads, tokens]` where larger
means keep. States are those after the rotary embedding. Work is done in blocks of queries, so the
memory beyond inputs and result stays near `workspace_bytes` whatever the prompt length, and an
N x N matrix never exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Reduction = Literal["mean", "max"]

WORKSPACE_BYTES = 4 * 2**20
"""Aim for the largest block of attention weights held at once, in bytes of float32, on a CPU: what
its caches hold."""

GPU_WORKSPACE_BYTES = 128 * 2**20
"""The same on other devices, where many small blocks cost more than their arithmetic. A large
model's feed-forward layers take several times as much of a prompt of the same length."""


class Score(Protocol):
    """Rates every token of a prompt from the states of one layer."""

    def query_count(self, prompt_length: int) -> int:
        """Return how many of the prompt's last queries the score reads."""
        ...

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the scores.

        Args:
            queries: `[batch, query_heads, W, head_dim]`, the last W tokens' queries.
            keys, values: `[batch, kv_heads, N, head_dim]`.
            valid: bool `[batch, N]`, False for padding; None when nothing is padded.
            scale: factor on the attention logits, usually `head_dim ** -0.5`.
            softcap: the model's cap on attention logits (Gemma 2), if it has one.

        Returns:
            float32 `[batch, kv_heads, N]`; padding is minus infinity.
        """
        ...


@runtime_checkable
class AccumulatingScore(Score, Protocol):
    """A score made from sums over queries, so that later queries add to it."""

    def accumulate(
        self,
        queries: Tensor,
        keys: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
        earlier: Tensor | None = None,
    ) -> Tensor:
        """Return the sums of these queries, on top of those of earlier ones.

        Takes what `__call__` takes; `earlier` and the result are float32
        `[batch, kv_heads, query heads per KV head, N]`.
        """
        ...

    def reduce(self, sums: Tensor) -> Tensor:
        """Return the scores `[batch, kv_heads, N]` that the sums amount to."""
        ...


@dataclass(frozen=True)
class WindowAttention:
    """Attention of the last `window` queries to each token (SnapKV, arXiv 2404.14469, eq. 3-5;
    PyramidKV, arXiv 2406.02069, section 4.3).

    Attributes:
        window: number of queries that vote.
        window_reduce: how their votes are combined: `mean` as published, or `max`.
        group_reduce: how the query heads that share a KV head are combined.
        value_norm: weight each token by the L2 norm of its value vector.
    """

    window: int
    window_reduce: Reduction = "mean"
    group_reduce: Reduction = "mean"
    value_norm: bool = False

    def query_count(self, prompt_length: int) -> int:
        return min(self.window, prompt_length)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        by_head = _reduce_attention(queries, keys, valid, scale, softcap, self.window_reduce)
        result = _reduce_group(by_head, self.group_reduce)
        if self.value_norm:
            for row, weighted in zip(values.detach(), result, strict=True):
                for head, scores in zip(row, weighted, strict=True):  # one float32 copy at a time
                    scores *= torch.linalg.vector_norm(head, dim=-1, dtype=torch.float32)
        return _mask_padding(result, valid)


@dataclass(frozen=True)
class AccumulatedAttention:
    """Attention each token receives from all prompt queries (H2O, arXiv 2306.14048, section 4).

    The score of a token is its column sum in the causal softmax over the whole prompt. That is as
    much work as the prompt's own attention, which is what this method costs.
    """

    group_reduce: Reduction = "mean"

    def query_count(self, prompt_length: int) -> int:
        return prompt_length

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        return _mask_padding(
            self.reduce(self.accumulate(queries, keys, valid, scale, softcap)), valid
        )

    def accumulate(
        self,
        queries: Tensor,
        keys: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
        earlier: Tensor | None = None,
    ) -> Tensor:
        sums = _reduce_attention(queries, keys, valid, scale, softcap, "sum")
        return sums if earlier is None else sums.add_(earlier)

    def reduce(self, sums: Tensor) -> Tensor:
        return _reduce_group(sums, self.group_reduce)


@dataclass(frozen=True)
class Recency:
    """The position itself: later tokens matter more (StreamingLLM, arXiv 2309.17453)."""

    def query_count(self, prompt_length: int) -> int:
        return 0

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        batch, kv_heads, tokens, _ = keys.shape
        positions = torch.arange(tokens, dtype=torch.float32, device=keys.device)
        return _mask_padding(positions.expand(batch, kv_heads, tokens).clone(), valid)


def workspace_bytes(device: torch.device) -> int:
    """Return what a block of attention weights may take on a device, in bytes."""
    return WORKSPACE_BYTES if device.type == "cpu" else GPU_WORKSPACE_BYTES


def _mask_padding(scores: Tensor, valid: Tensor | None) -> Tensor:
    if valid is not None:
        scores.masked_fill_(~valid[:, None], float("-inf"))
    return scores


def _reduce_attention(
    queries: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    scale: float,
    softcap: float | None,
    query_reduce: Literal["mean", "max", "sum"],
) -> Tensor:
    """Reduce the causal softmax over queries.

    Queries are the last ones of the sequence, so query i of W sees tokens up to N - W + i.
    Returns float32 `[batch, kv_heads, group, N]`, with the query heads of each KV head one by one.
    Queries that are padding do not vote.
    """
    batch, query_heads, count, head_dim = queries.shape
    _, kv_heads, tokens, _ = keys.shape
    group = query_heads // kv_heads
    grouped = queries.reshape(batch, kv_heads, group, count, head_dim)
    shape = (batch, kv_heads, group, tokens)
    result = torch.empty(shape, dtype=torch.float32, device=keys.device)
    head_step = max(1, workspace_bytes(keys.device) // (4 * group * count * tokens))
    for row in range(batch):
        row_valid = None if valid is None else valid[row]
        for head in range(0, kv_heads, head_step):
            heads = slice(head, head + head_step)
            result[row, heads] = _reduce_queries(
                grouped[row, heads], keys[row, heads], row_valid, scale, softcap, query_reduce
            )
    return result


def _reduce_group(by_head: Tensor, group_reduce: Reduction) -> Tensor:
    return by_head.amax(2) if group_reduce == "max" else by_head.mean(2)


def _reduce_queries(
    queries: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    scale: float,
    softcap: float | None,
    query_reduce: Literal["mean", "max", "sum"],
) -> Tensor:
    """Do the work of `_reduce_attention` for some KV heads of one batch row.

    Takes what `visit_attention` takes; returns `[heads, group, N]`.
    """
    heads, group, count, _ = queries.shape
    reduced = torch.zeros((heads, group, keys.shape[1]), dtype=torch.float32, device=keys.device)

    def visit(weights: Tensor) -> None:
        target = reduced[:, :, : weights.shape[-1]]
        if query_reduce == "max":
            torch.maximum(target, weights.amax(2), out=target)
        else:
            target += weights.sum(2)

    visit_attention(queries, keys, valid, scale, softcap, visit)
    if query_reduce == "mean":
        votes = count if valid is None else valid[-count:].sum().clamp(min=1)
        reduced /= votes
    return reduced


def visit_attention(
    queries: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    scale: float,
    softcap: float | None,
    visit: Callable[[Tensor], None],
) -> None:
    """Hand out the causal softmax of the last queries of a sequence, block by block.

    Args:
        queries: `[heads, group, W, head_dim]`, the query heads of each KV head; query i of W sees
            the tokens up to N - W + i.
        keys: `[heads, N, head_dim]`.
        valid: bool `[N]`, False for padding, whose queries get no weights at all; or None.
        scale, softcap: of the attention logits.
        visit: called with float32 `[heads, group, rows, seen]` for some queries after the other;
            `seen` tokens are visible to the last of these rows.
    """
    heads, group, count, head_dim = queries.shape
    tokens = keys.shape[1]
    queries, keys = queries.detach(), keys.detach()  # what works in place has no gradients
    keys_transposed = keys.float().transpose(1, 2)
    step = max(1, workspace_bytes(keys.device) // (4 * heads * group * tokens))
    for start in range(0, count, step):
        rows = min(step, count - start)
        seen = tokens - count + start + rows  # later tokens are hidden from all of these queries
        block = queries[:, :, start : start + rows].float().reshape(heads, group * rows, head_dim)
        logits = torch.bmm(block * scale, keys_transposed[:, :, :seen])
        logits = logits.view(heads, group, rows, seen)
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        future = torch.ones((rows, rows), dtype=torch.bool, device=keys.device).triu_(1)
        logits[..., -rows:].masked_fill_(future, float("-inf"))
        if valid is not None:
            logits.masked_fill_(~valid[:seen], float("-inf"))
        weights = torch.softmax(logits, -1, out=logits)  # in place: nothing else reads them
        if valid is not None:
            weights.masked_fill_(~valid[seen - rows : seen, None], 0.0)
        visit(weights)
        del logits, weights  # or the next block would be made while this one is still held
