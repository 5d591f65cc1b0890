"""Selection: from scores to the indices of the tokens that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

PoolingKind = Literal["max", "avg"]


@dataclass(frozen=True)
class Pooling:
    """Smoothing of the scores over neighbouring tokens, so that whole phrases are kept.

    Attributes:
        kind: `max` or `avg`.
        kernel_size: odd number of tokens; 1 leaves the scores as they are.
    """

    kind: PoolingKind = "max"
    kernel_size: int = 1

    def __post_init__(self) -> None:
        if self.kind not in ("max", "avg"):
            raise ValueError(f"pooling is {self.kind!r}; it must be 'max' or 'avg'")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size is {self.kernel_size}; it must be an odd number of at least 1"
            )

    def __call__(self, scores: Tensor) -> Tensor:
        """Pool `[batch, kv_heads, tokens]` over the tokens; the shape stays. Edges see fewer."""
        if self.kernel_size == 1 or scores.shape[-1] == 0:
            return scores
        half = self.kernel_size // 2
        if self.kind == "max":
            return functional.max_pool1d(scores, self.kernel_size, stride=1, padding=half)
        return functional.avg_pool1d(
            scores, self.kernel_size, stride=1, padding=half, count_include_pad=False
        )


def select(scores: Tensor, budget: int, sinks: int, window: int, pooling: Pooling) -> Tensor:
    """Return the tokens that stay: sinks, the best of the evictable tokens, the window.

    Sinks and window take no part in pooling, so a sink's large score does not spread to its
    neighbours. Equal pooled scores are settled by the token's own score, then by position, the
    later token first: a peak widened by max-pooling never loses its centre before its flanks.

    Args:
        scores: float32 `[batch, kv_heads, tokens]`, larger means keep; no padding among them.
        budget: tokens to keep, sinks and window included.
        sinks, window: first and last tokens that always stay.

    Returns:
        int64 `[batch, kv_heads, min(budget, tokens)]`, ascending, no index twice.

    Raises:
        ValueError: the budget is below `min(sinks + window, tokens)` or below 1.
    """
    batch, kv_heads, tokens = scores.shape
    if budget < max(1, min(sinks + window, tokens)):
        raise ValueError(
            f"cannot keep {budget} of {tokens} tokens: {sinks} sinks and a window of {window} are "
            "always kept, and at least 1 token"
        )
    device = scores.device
    if budget >= tokens:
        return torch.arange(tokens, device=device).expand(batch, kv_heads, tokens)
    own = scores[..., sinks : tokens - window]
    count = budget - sinks - window
    chosen = marked_places(mark_best(joint_rank(pooling(own), own), count), count) + sinks
    first = torch.arange(sinks, device=device).expand(batch, kv_heads, sinks)
    last = torch.arange(tokens - window, tokens, device=device).expand(batch, kv_heads, window)
    return torch.cat([first, chosen, last], dim=-1)


def order(scores: Tensor, sinks: int, window: int, pooling: Pooling) -> Tensor:
    """Return all tokens, best first: the first K of them are those that `select` keeps of K.

    Sinks and window come first, in the order of their positions.

    Args:
        scores, sinks, window, pooling: see `select`.

    Returns:
        int64 `[batch, kv_heads, tokens]`, a permutation in each head.
    """
    tokens, device = scores.shape[-1], scores.device
    every = torch.arange(tokens, device=device).expand(scores.shape)
    if sinks + window >= tokens:
        return every
    own = scores[..., sinks : tokens - window]
    rank = joint_rank(pooling(own), own).flip(-1)  # a stable sort then puts later tokens first
    best = own.shape[-1] - 1 - rank.sort(dim=-1, descending=True, stable=True).indices
    return torch.cat([every[..., :sinks], every[..., tokens - window :], best + sinks], dim=-1)


def mark_best(rank: Tensor, count: int) -> Tensor:
    """Mark the `count` best of the last dimension: largest rank first, then the later place.

    `torch.topk` alone settles ties differently from run to run and device to device, so it only
    finds the threshold here.

    Args:
        rank: int64 `[..., places]`, as `joint_rank` makes it.
        count: at most `places`.

    Returns:
        bool `[..., places]`, True `count` times.
    """
    if count == 0:
        return torch.zeros_like(rank, dtype=torch.bool)
    threshold = rank.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above = rank > threshold
    tied = rank == threshold
    wanted = count - above.sum(-1, keepdim=True)
    later_ties = tied.sum(-1, keepdim=True) - tied.cumsum(-1)
    return above | (tied & (later_ties < wanted))


def marked_places(marks: Tensor, count: int) -> Tensor:
    """Return where bool `[..., places]` is True, `count` times in each row, without a wait for it.

    Returns:
        int64 `[..., count]`, ascending.
    """
    slots = torch.where(marks, marks.cumsum(-1) - 1, count)  # the last slot takes the rest
    places = torch.arange(marks.shape[-1], device=marks.device).expand_as(slots)
    result = places.new_empty((*marks.shape[:-1], count + 1))
    return result.scatter_(-1, slots, places)[..., :count]


def joint_rank(primary: Tensor, secondary: Tensor) -> Tensor:
    """Return one int64 per token that orders by `primary`, then by `secondary`."""
    return (_as_integer(primary) << 32) + (_as_integer(secondary) + 2**31)


def _as_integer(scores: Tensor) -> Tensor:
    """Map float32 to int64 in the int32 range such that order is preserved."""
    bits = (scores.float() + 0.0).view(torch.int32)  # adding 0.0 makes -0.0 equal to 0.0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
