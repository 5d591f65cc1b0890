"""Selection with counts that differ from KV head to KV head: totals exact, all on the device.

How much is kept in all follows from the arguments, so that sizes are known on the host; how much
each head keeps is known to the device alone, and nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import floor as floor_of

import torch
from torch import Tensor

from .selection import Pooling, joint_rank, mark_best, marked_places, order

_LAST_OWNER = 2**32 - 1
"""Of `GlobalSelection`: a tie is `position << 32`, plus this less the head's number, which goes on
from layer to layer."""


@dataclass(frozen=True)
class HeadSelection:
    """The tokens that stay, of each KV head its own number.

    Attributes:
        indices: int64 `[batch, total]`, head after head, ascending within a head.
        counts: int64 `[batch, kv_heads]`, how many of them each head has.
    """

    indices: Tensor
    counts: Tensor

    @property
    def total(self) -> int:
        """Tokens that stay in each row of the batch, all heads together."""
        return self.indices.shape[1]

    @property
    def heads(self) -> Tensor:
        """Return which head each index is of, int64 `[batch, total]`."""
        ends = self.counts.cumsum(-1)
        every = torch.arange(self.total, device=ends.device).expand(len(ends), -1)
        return torch.searchsorted(ends, every.contiguous(), right=True)


def select_adaptive(
    scores: Tensor, total: int, sinks: int, window: int, pooling: Pooling, floor: float
) -> HeadSelection:
    """Let the heads of a layer compete for its tokens (AdaKV, arXiv 2407.11550, algorithm 1).

    Every head keeps sinks and window, and of the other tokens its own best, as many as `floor`
    says. The rest of the total goes to the best that are left of all heads together: by pooled
    score, then the token's own, then the later position, then the lower head. What a head keeps
    is the beginning of its `selection.order`.

    Args:
        scores: float32 `[batch, kv_heads, tokens]`, larger means keep; no padding among them.
        total: tokens to keep over all heads, sinks and windows included; what exceeds all tokens
            there are is not used.
        sinks, window, pooling: see `selection.select`.
        floor: what no head can lose to others, as a fraction of an equal share of the tokens
            beyond sinks and windows; 0 to 1, rounded down to whole tokens.

    Raises:
        ValueError: the total is below what sinks and windows take, or the floor no fraction.
    """
    batch, heads, tokens = scores.shape
    share = Shares.of(heads, tokens, total, sinks, window, floor)
    if share.contested == heads * (tokens - share.own):
        marks = torch.ones_like(scores, dtype=torch.bool)
    else:
        rank = _evictable_rank(scores, sinks, window, pooling)
        certain = mark_best(rank, share.own - sinks - window)
        # Tokens in the order of their position, the heads of each from the last to the first:
        # the later place is what a tie goes to.
        left = rank.masked_fill(certain, torch.iinfo(rank.dtype).min)
        places = left.flip(1).transpose(1, 2).flatten(1)
        best = mark_best(places, share.contested).view(batch, -1, heads).transpose(1, 2).flip(1)
        marks = torch.ones_like(scores, dtype=torch.bool)
        marks[..., sinks : tokens - window] = certain | best
    return _selection(marks, heads * share.own + share.contested)


def select_by_table(
    scores: Tensor, counts_per_head: Sequence[int], sinks: int, window: int, pooling: Pooling
) -> HeadSelection:
    """Keep of each head the number that a table says, or all tokens if there are fewer.

    Args:
        scores, sinks, window, pooling: see `selection.select`.
        counts_per_head: tokens each KV head keeps, sinks and window included.

    Raises:
        ValueError: the table has not one count per head, or one below what sinks and window take
            or below 1.
    """
    _, heads, tokens = scores.shape
    least = max(1, min(sinks + window, tokens))
    if len(counts_per_head) != heads:
        raise ValueError(
            f"the table has {len(counts_per_head)} counts, but there are {heads} KV heads; give "
            "one count per head"
        )
    if min(counts_per_head) < least:
        raise ValueError(
            f"a head is to keep {min(counts_per_head)} of {tokens} tokens, but {sinks} sinks and "
            f"a window of {window} are always kept; give every head at least {least}"
        )
    places = in_order(order(scores, sinks, window, pooling))
    marks = torch.stack([places[:, i] < count for i, count in enumerate(counts_per_head)], dim=1)
    return _selection(marks, sum(min(count, tokens) for count in counts_per_head))


def select_first(places: Tensor, counts: Tensor, total: int) -> HeadSelection:
    """Keep of each head the first tokens of its order.

    Args:
        places: int64 `[batch, kv_heads, tokens]`, as `in_order` makes it of `selection.order`.
        counts: int64 `[batch, kv_heads]`, at most `tokens` each.
        total: their sum, the same in every row of the batch; the caller answers for it.
    """
    return _selection(places < counts[..., None], total)


def in_order(best: Tensor) -> Tensor:
    """Return which place each token has in an order of tokens `[batch, kv_heads, tokens]`."""
    every = torch.arange(best.shape[-1], device=best.device).expand_as(best)
    return torch.empty_like(best).scatter_(-1, best, every)


@dataclass(frozen=True)
class Shares:
    """How some heads divide a total of tokens.

    Attributes:
        own: what each head keeps whatever the others need, sinks and window included.
        contested: what the best tokens of all heads get beyond that.
    """

    own: int
    contested: int

    @classmethod
    def of(
        cls, heads: int, tokens: int, total: int, sinks: int, window: int, floor: float
    ) -> Shares:
        """Return the shares of `heads` heads that have `tokens` tokens each.

        Args:
            total, sinks, window, floor: see `select_adaptive`.

        Raises:
            ValueError: the total is below what sinks and windows take, or the floor no fraction.
        """
        if not 0 <= floor <= 1:
            raise ValueError(
                f"the floor of the heads is {floor}; it is a fraction of an equal share, from "
                "0 to 1"
            )
        protected = min(sinks + window, tokens)
        if total < max(1, heads * protected):
            raise ValueError(
                f"cannot keep {total} of {heads} x {tokens} tokens: {sinks} sinks and a window of "
                f"{window} are always kept in each of {heads} heads, and at least 1 token"
            )
        kept = min(total, heads * tokens)
        spare = kept - heads * protected
        # The decimal that was written: 0.7 of 10 tokens are 7.
        own = protected + floor_of(Fraction(str(floor)) * spare / heads)
        return cls(own, kept - heads * own)


@dataclass(eq=False)
class GlobalSelection:
    """One prompt's total, for which all heads of all layers compete, while layers come in turn.

    The rule is that of `select_adaptive` with the heads of all layers side by side; a tie goes to
    the later position, then the lower layer, then the lower head. A token that is not among the
    best of the layers so far cannot be among the best of all layers, so it can go at once: the
    layers so far and the least that those to come will need never take more than the total, and
    what is held of the last layer on is what choosing from all layers at once would keep.

    Each head holds the beginning of its `selection.order`: the first `counts()` of it. How much
    a layer holds follows from the scores, so the host has to ask for it.

    Attributes:
        layers, kv_heads, tokens: how many there are; tokens of the prompt, at least 1.
        total: tokens to keep over all layers and heads, sinks and windows included.
        sinks, window, pooling, floor: see `select_adaptive`.
        seen: layers that have come.
    """

    layers: int
    kv_heads: int
    tokens: int
    total: int
    sinks: int
    window: int
    pooling: Pooling
    floor: float
    seen: int = field(default=0, init=False)
    _shares: Shares = field(init=False, repr=False)
    # Of the tokens that lead in the contest: rank, and what settles ties, int64 [leading].
    _ranks: Tensor | None = field(default=None, init=False, repr=False)
    _ties: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._shares = Shares.of(
            self.layers * self.kv_heads,
            self.tokens,
            self.total,
            self.sinks,
            self.window,
            self.floor,
        )

    def add(self, scores: Tensor) -> None:
        """Take the next layer's scores, float32 `[1, kv_heads, tokens]`.

        Raises:
            ValueError: they have another shape, or all layers have come.
        """
        if self.seen == self.layers or scores.shape != (1, self.kv_heads, self.tokens):
            raise ValueError(
                f"scores {list(scores.shape)} came as layer {self.seen}; the selection is for "
                f"{self.layers} layers of [1, {self.kv_heads}, {self.tokens}]"
            )
        ranks, ties = self._contenders(scores)
        if self._ranks is not None and self._ties is not None:
            ranks, ties = torch.cat([self._ranks, ranks]), torch.cat([self._ties, ties])
        if self._shares.contested < ranks.shape[0]:
            leading = _leading(ranks, ties, self._shares.contested)
            ranks, ties = ranks[leading], ties[leading]
        self._ranks, self._ties = ranks, ties
        self.seen += 1

    def counts(self) -> Tensor:
        """Return what each head of the layers so far holds, int64 `[seen, kv_heads]`."""
        assert self._ties is not None, "no layer has come yet"
        held = self._ties.new_full((self.seen * self.kv_heads,), self._shares.own)
        owners = _LAST_OWNER - (self._ties & _LAST_OWNER)
        return held.scatter_add_(0, owners, torch.ones_like(owners)).view(self.seen, self.kv_heads)

    @property
    def held(self) -> int:
        """Tokens that the layers so far hold together, known without asking the device."""
        free = self.seen * self.kv_heads * (self.tokens - self._shares.own)
        return self.seen * self.kv_heads * self._shares.own + min(free, self._shares.contested)

    def _contenders(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rank and tie of what a layer's heads do not keep anyway, `[any]` each."""
        sinks, own = self.sinks, self._shares.own
        count = self.tokens - own
        if count == 0 or self._shares.contested == 0:
            nothing = torch.empty(0, dtype=torch.int64, device=scores.device)
            return nothing, nothing
        rank = _evictable_rank(scores[0], sinks, self.window, self.pooling)
        others = marked_places(~mark_best(rank, own - sinks - self.window), count)
        head = torch.arange(self.kv_heads, device=scores.device)[:, None]
        owner = _LAST_OWNER - (self.seen * self.kv_heads + head)
        return rank.gather(-1, others).flatten(), ((others << 32) + owner).flatten()


def _leading(ranks: Tensor, ties: Tensor, count: int) -> Tensor:
    """Return where the `count` largest pairs of rank and tie are, in no particular order."""
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=ranks.device)
    threshold = ranks.topk(count, sorted=False).values.amin()
    settled = torch.where(ranks == threshold, ties, -1)
    settled.masked_fill_(ranks > threshold, torch.iinfo(settled.dtype).max)
    return settled.topk(count, sorted=False).indices


def _evictable_rank(scores: Tensor, sinks: int, window: int, pooling: Pooling) -> Tensor:
    """Return the rank of the tokens between sinks and window, `[..., tokens between]`."""
    own = scores[..., sinks : scores.shape[-1] - window]
    return joint_rank(pooling(own), own)


def _selection(marks: Tensor, total: int) -> HeadSelection:
    """Return the selection of the tokens marked in bool `[batch, kv_heads, tokens]`."""
    places = marked_places(marks.flatten(1), total)
    return HeadSelection(places % marks.shape[-1], marks.sum(-1))
