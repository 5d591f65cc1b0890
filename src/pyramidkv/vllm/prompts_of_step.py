"""One step of a batch: which requests are past their prompt, and which prompts end in it.

Plain lists and tensors, no vLLM: engines differ in how they know a batch and store a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compaction import BlockedCache, pair_slots
from .settings import ServingError, ServingSettings


@dataclass(frozen=True)
class EndingPrompt:
    """A prompt that is complete after this step.

    Attributes:
        row: of the batch.
        end: of its queries, in the batch's tokens.
        tokens: of the prompt.
        skipped: blocks that are freed.
    """

    row: int
    end: int
    tokens: int
    skipped: int


@dataclass(frozen=True)
class StepRows:
    """The rows of a step, for all groups of layers.

    Attributes:
        past: for each group, blocks at the head of each row that are not there any more.
        ending: for each group, the prompts to compress after its layers' attention.
    """

    past: tuple[list[int], ...]
    ending: tuple[list[EndingPrompt], ...]


def split_rows(
    prompts: Sequence[int],
    computed: Sequence[int],
    new: Sequence[int],
    skipped_of: Callable[[int], Sequence[int]],
    together: int = 0,
) -> StepRows:
    """Return what a step does to each row, in one pass.

    Args:
        prompts: tokens of each row's prompt; 0 where the row is no request.
        computed: tokens before this step. Of requests past their prompt, a bound from above.
        new: tokens in this step.
        skipped_of: from a prompt's tokens to the blocks that each group frees.
        together: last tokens of a prompt that must be in one step.

    Raises:
        ServingError: a step does not end with the prompt, or has too few of its last tokens.
    """
    groups = len(skipped_of(1))
    past = tuple([0] * len(prompts) for _ in range(groups))
    ending: tuple[list[EndingPrompt], ...] = tuple([] for _ in range(groups))
    end = 0
    for row, (prompt, before, count) in enumerate(zip(prompts, computed, new, strict=True)):
        end += count
        if prompt == 0 or before + count < prompt:
            continue
        skipped = skipped_of(prompt)
        if not any(skipped):
            continue
        if before >= prompt:
            for group, blocks in enumerate(skipped):
                past[group][row] = blocks
            continue
        if before + count > prompt or count < together:
            raise ServingError(
                "a step does not end with its prompt or has only a part of its window; "
                "start vLLM with the scheduler of pyramidkv (--scheduler-cls)"
            )
        for group, blocks in enumerate(skipped):
            if blocks:
                ending[group].append(EndingPrompt(row, end, prompt, blocks))
    return StepRows(past, ending)


class ShownTables:
    """Block tables without their skipped heads, and lengths to match, always at one address.

    A decoding step can be the replay of a CUDA graph, which reads what lay at these addresses when
    it was captured. So the buffers are made once and every step writes to them, also where nothing
    is skipped.
    """

    def __init__(self, rows: int) -> None:
        """Prepare for at most `rows` rows; memory is taken when the first table comes."""
        self._rows = rows
        self._table: Tensor | None = None
        self._lengths: Tensor | None = None

    def show(
        self,
        table: Tensor,
        lengths: Tensor,
        skipped: Tensor | None,
        block_size: int,
        columns: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return table and lengths as views of the buffers.

        Args:
            table: `[rows, blocks]` integers; lengths: `[rows]`.
            skipped: int64 `[rows]` on the table's device; None where nothing is.
            block_size: tokens of a block.
            columns: of the result that are read, at least; None for all.

        Raises:
            ServingError: more rows than there is room for, or another width than at first.
        """
        if self._table is None or self._lengths is None:
            self._table = table.new_zeros((self._rows, table.shape[1]))
            self._lengths = lengths.new_zeros(self._rows)
        rows, width = table.shape
        if rows > self._rows or width != self._table.shape[1]:
            raise ServingError(
                f"a block table of {rows} rows and {width} columns does not fit the "
                f"{self._rows} x {self._table.shape[1]} that pyramidkv prepared for CUDA graphs"
            )
        shift_tables(table, lengths, skipped, block_size, self._table, self._lengths, columns)
        return self._table[:rows], self._lengths[:rows]


def shift_tables(
    table: Tensor,
    lengths: Tensor,
    skipped: Tensor | None,
    block_size: int,
    out_table: Tensor,
    out_lengths: Tensor,
    columns: int | None = None,
) -> None:
    """Write each row without its first `skipped` blocks, and its length less their tokens.

    Nothing waits for the device. The arguments are those of `ShownTables.show`; `out_table` and
    `out_lengths` have as many rows or more, and rows without a request get length 0.
    """
    rows, width = table.shape
    used = width if columns is None else min(columns, width)
    shown, shortened = out_table[:rows, :used], out_lengths[:rows]
    if skipped is None:
        shown.copy_(table[:, :used])
        shortened.copy_(lengths)
    else:
        places = torch.arange(used, device=table.device) + skipped[:, None]
        shown.copy_(table.gather(1, places.clamp_(max=width - 1)))
        shortened.copy_(lengths - skipped * block_size)
    out_lengths[rows:].zero_()


CHOSEN_TOGETHER_BYTES = 4 * 2**20
"""Of scores: layers of a group choose together up to about as much. Below it, the many small
operations of a choice cost more than their arithmetic."""


class Compaction:
    """What the layers of a group do for the prompts that end in a step, once for each layer.

    A layer scores right after its attention. Several layers then choose at once and move what
    they keep; the last of the group sees to it that all have.

    Attributes:
        ending: the prompts.
        unfinished: layers that have yet to come.
    """

    def __init__(
        self, ending: Sequence[EndingPrompt], settings: ServingSettings, layers: int
    ) -> None:
        """Prepare for the layers of a group, at least one prompt of which ends."""
        self.unfinished = layers
        self.ending, self._settings = ending, settings
        self._scored: list[tuple[BlockedCache, list[Tensor]]] = []
        self._held = 0

    def layer(
        self,
        cache: BlockedCache,
        table: Tensor,
        queries: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        """Do a layer's part, after its attention.

        Args:
            cache: the layer's.
            table: block table of the step, one for all layers.
            queries: `[tokens, query_heads, head_dim]` of the step.
            scale, softcap: of the layer's attention.
        """
        scores = []
        for prompt in self.ending:
            blocks = _blocks_of(prompt, table, cache.block_size)
            keys = values = cache.gather_keys(blocks, prompt.tokens)
            if self._settings.compression.method.options.value_norm:  # what alone reads values
                values = cache.gather_values(blocks, prompt.tokens)
            own = queries[: prompt.end]
            scores.append(score_prompt(keys, values, own, self._settings, scale, softcap))
        self._scored.append((cache, scores))
        self._held += sum(one.nbytes for one in scores)
        self.unfinished -= 1
        if not self.unfinished or self._held >= CHOSEN_TOGETHER_BYTES:
            self._move(table)

    def _move(self, table: Tensor) -> None:
        caches = [cache for cache, _ in self._scored]
        for i, prompt in enumerate(self.ending):
            scores = torch.cat([scores[i] for _, scores in self._scored])
            size = caches[0].block_size
            compact_prompt(caches, _blocks_of(prompt, table, size), scores, prompt, self._settings)
        self._scored, self._held = [], 0


def _blocks_of(prompt: EndingPrompt, table: Tensor, block_size: int) -> Tensor:
    return table[prompt.row, : -(-prompt.tokens // block_size)].long()


def compact_prompt(
    caches: Sequence[BlockedCache],
    blocks: Tensor,
    scores: Tensor,
    prompt: EndingPrompt,
    settings: ServingSettings,
) -> None:
    """Move what layers keep of a prompt behind the blocks that it frees.

    Args:
        caches: of layers of one group.
        blocks: int64, those of the prompt.
        scores: `[layers, kv_heads, tokens]`.
        prompt: how many blocks it frees.
        settings: the method.
    """
    freed = prompt.skipped * caches[0].block_size
    layers, kv_heads, tokens = scores.shape
    kept = settings.compression.method.options.select(scores, tokens - freed)
    rows, source, target = pair_slots(kept.flatten(0, 1), tokens, freed)
    ends = torch.arange(1, layers, device=rows.device) * kv_heads
    bounds = [0, *torch.searchsorted(rows, ends).tolist(), len(rows)]
    for layer, cache in enumerate(caches):
        of_layer = slice(bounds[layer], bounds[layer + 1])
        heads = rows[of_layer] - layer * kv_heads
        cache.move(heads, blocks, source[of_layer], target[of_layer])


def score_prompt(
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    settings: ServingSettings,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the scores of a prompt's tokens in one layer: float32 `[1, kv_heads, tokens]`.

    Args:
        keys, values: `[1, kv_heads, tokens, head_dim]`.
        queries: `[n, query_heads, head_dim]`, whose last are the prompt's last.
        settings: the method; scale, softcap: of the layer's attention.
    """
    score = settings.compression.method.build_score()
    assert score is not None
    voters = queries[len(queries) - score.query_count(keys.shape[2]) :]
    return score(voters.transpose(0, 1)[None], keys, values, None, scale, softcap)
