"""What a layer's attention looks like: how far it spreads, and where it goes.

Pure functions of one layer's states, computed in blocks of queries as the scores are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PyramidKVError
from .scores import visit_attention

EPSILON = 1e-12
"""Added to a weight inside of the logarithm, so that no attention adds no entropy."""


class MeasurementError(PyramidKVError, ArithmeticError):
    """Attention that cannot be measured; the message says why."""


@dataclass(frozen=True)
class AttentionStatistics:
    """Statistics of one layer's attention, averaged over queries.

    Attributes:
        entropy: bits, float64 `[query_heads]`: the mean over queries of
            `-sum_k A log2(A + EPSILON)`.
        sink_mass: share of the attention on the first tokens, float64 `[query_heads]`.
        recent_mass: share on the last tokens before each query, itself included, sinks not
            counted again, float64 `[query_heads]`.
        received: attention that each token gets, float64 `[kv_heads, query heads of each, N]`.
    """

    entropy: Tensor
    sink_mass: Tensor
    recent_mass: Tensor
    received: Tensor

    @property
    def effective_tokens(self) -> Tensor:
        """Tokens that an even attention of the same entropy would spread over, `[query_heads]`."""
        return self.entropy.exp2()


def measure_attention(
    queries: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    sinks: int = 0,
    recent: int = 0,
) -> AttentionStatistics:
    """Measure the causal attention of a sequence's last queries.

    Args:
        queries: `[query_heads, W, head_dim]`, after the rotary embedding; W of N for all of them.
        keys: `[kv_heads, N, head_dim]`.
        scale, softcap: of the model's attention logits.
        sinks, recent: how many first and last tokens count as such.

    Raises:
        MeasurementError: the states have values that are no numbers.
    """
    kv_heads, tokens, head_dim = keys.shape
    query_heads, count, _ = queries.shape
    grouped = queries.reshape(kv_heads, query_heads // kv_heads, count, head_dim)
    shape = grouped.shape[:2]
    sums = torch.zeros((3, *shape), dtype=torch.float64, device=keys.device)
    received = torch.zeros((*shape, tokens), dtype=torch.float64, device=keys.device)
    for head in range(kv_heads):  # one at a time, within the workspace
        one = slice(head, head + 1)
        visit = _Sums(sums[:, one], received[one], tokens - count, sinks, recent)
        visit_attention(grouped[one], keys[one], None, scale, softcap, visit)
    sums /= count
    if not bool(sums.isfinite().all()):
        raise MeasurementError(
            "the attention of this model is no number (NaN) in places, as in half precision when "
            "values overflow; load it in another type, such as --dtype float32"
        )
    entropy, sink_mass, recent_mass = sums.flatten(1)
    return AttentionStatistics(entropy, sink_mass, recent_mass, received / count)


class _Sums:
    """Adds up blocks of attention weights `[heads, group, rows, seen]`, in order."""

    def __init__(self, sums: Tensor, received: Tensor, first: int, sinks: int, recent: int):
        self._entropy, self._sink_mass, self._recent_mass = sums
        self._received = received
        self._next = first  # position of the next query
        self._sinks, self._recent = sinks, recent

    def __call__(self, weights: Tensor) -> None:
        rows, seen = weights.shape[2:]
        spread = (weights + EPSILON).log2_().mul_(weights)
        self._entropy -= spread.sum((2, 3), dtype=torch.float64)
        del spread
        self._received[..., :seen] += weights.sum(2)
        self._sink_mass += weights[..., : self._sinks].sum((2, 3), dtype=torch.float64)
        if self._recent:
            # of these rows, the columns that are recent for any
            left = max(self._sinks, self._next - self._recent + 1)
            columns = torch.arange(left, max(seen, left), device=weights.device)
            own = torch.arange(self._next, self._next + rows, device=weights.device)
            old = columns <= own[:, None] - self._recent
            near = weights[..., left:].masked_fill(old, 0.0)
            self._recent_mass += near.sum((2, 3), dtype=torch.float64)
        self._next += rows


def effective_context(
    queries: Tensor, keys: Tensor, scale: float, softcap: float | None = None
) -> float:
    """Return how many tokens a layer's attention spreads over: the mean of 2^H over its heads.

    Takes what `measure_attention` takes.
    """
    return float(measure_attention(queries, keys, scale, softcap).effective_tokens.mean())
