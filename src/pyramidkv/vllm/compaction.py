"""Moving what a prompt keeps out of the blocks that are to be freed, in place.

Of a group's prompt the first blocks are freed. What is kept of them goes to the slots of evicted
tokens behind them, each KV head by itself, so that the last blocks hold exactly the kept tokens.
Their order changes, which attention does not see: positions are in the keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class BlockedCache(Protocol):
    """Keys and values of one layer in blocks, as an engine stores them."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    def gather_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the keys `[1, kv_heads, tokens, head_dim]` of a sequence's first tokens."""
        ...

    def gather_values(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return their values, of the same shape."""
        ...

    def move(self, heads: Tensor, blocks: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots over others: of head `heads[i]`, from position `source[i]` to `target[i]`.

        Positions are those of the sequence whose blocks are given; none is in both.
        """
        ...


def pair_slots(kept: Tensor, tokens: int, freed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which slots go where so that the last `tokens - freed` hold what is kept.

    Args:
        kept: int64 `[kv_heads, tokens - freed]`, positions that stay, each once.
        tokens: of the sequence.
        freed: slots at its head that are given up.

    Returns:
        heads, sources, targets: int64, one entry for each slot that is moved.
    """
    stays = torch.zeros((kept.shape[0], tokens), dtype=torch.bool, device=kept.device)
    stays.scatter_(1, kept, True)
    heads, source = stays[:, :freed].nonzero(as_tuple=True)
    _, target = (~stays[:, freed:]).nonzero(as_tuple=True)  # as many in each head
    return heads, source, target + freed


@dataclass(frozen=True)
class TransposedKeys:
    """vLLM's CPU layouts `vec` and `vec16`: keys of a block and head are `[head_dim, block]`.

    Attributes:
        keys, values: views `[blocks, kv_heads, block, head_dim]` of the memory, as vLLM has them.
    """

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def _columns(self) -> Tensor:
        blocks, heads, size, head_dim = self.keys.shape
        stride = self.keys.stride()
        return self.keys.as_strided(
            (blocks, heads, head_dim, size),
            (stride[0], stride[1], size, 1),
            self.keys.storage_offset(),
        )

    def gather_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        # As columns, which is how they lie and how logits are computed: whole runs, copied once.
        columns = self._columns.permute(1, 2, 0, 3).index_select(2, blocks).flatten(2)
        return columns[None, :, :, :tokens].transpose(2, 3)

    def gather_values(self, blocks: Tensor, tokens: int) -> Tensor:
        return self.values[blocks].transpose(0, 1).flatten(1, 2)[None, :, :tokens]

    def move(self, heads: Tensor, blocks: Tensor, source: Tensor, target: Tensor) -> None:
        size, columns = self.block_size, self._columns
        old, new = blocks[source // size], blocks[target // size]
        columns[new, heads, :, target % size] = columns[old, heads, :, source % size]
        self.values[new, heads, target % size] = self.values[old, heads, source % size]


@dataclass(frozen=True)
class Rows:
    """One row per block, slot and head, as FlashAttention has them.

    Attributes:
        keys, values: `[blocks, block, kv_heads, head_dim]`.
    """

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    def gather_keys(self, blocks: Tensor, tokens: int) -> Tensor:
        return self.keys[blocks].flatten(0, 1)[:tokens].transpose(0, 1)[None]

    def gather_values(self, blocks: Tensor, tokens: int) -> Tensor:
        return self.values[blocks].flatten(0, 1)[:tokens].transpose(0, 1)[None]

    def move(self, heads: Tensor, blocks: Tensor, source: Tensor, target: Tensor) -> None:
        size = self.block_size
        old, new = blocks[source // size], blocks[target // size]
        for cache in (self.keys, self.values):
            cache[new, target % size, heads] = cache[old, source % size, heads]
