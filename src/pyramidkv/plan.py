"""What the layers of one cache share: the method, the prompt's schedules, the pass under way."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .errors import CacheStateError, PromptError
from .memory import FreedMemory
from .methods import Compression
from .scores import Score
from .selection import Pooling


@dataclass
class PromptPlan:
    """What the layers of one cache have in common: the method, and each row's schedule."""

    compression: Compression
    layer_count: int
    on_layer: Callable[[int, int], None] | None = None
    score: Score | None = None
    pooling: Pooling | None = None
    lengths: list[int] = field(default_factory=list)  # prompt tokens of each row, without padding
    schedules: list[list[int]] = field(default_factory=list)  # per row
    prompt_ended: bool = False
    layers_begun: int = 0  # of the present forward pass
    layers_done: int = 0
    seen_mask: weakref.ref[Tensor] | None = None
    all_valid: bool = True
    seen_valid: Tensor | None = None
    freed: FreedMemory = field(default_factory=FreedMemory)
    frequencies: Tensor | None = None  # of the rotary embedding; None: positions stay

    def __post_init__(self) -> None:
        method = self.compression.method
        if method.make_score is not None:
            self.score = method.make_score(method.options)
            self.pooling = method.options.make_pooling()

    def reset(self) -> None:
        """Forget the prompt."""
        self.lengths, self.schedules = [], []
        self.prompt_ended = False
        self.layers_begun = self.layers_done = 0
        self.seen_mask = self.seen_valid = None

    def begin(self, layer: int) -> None:
        """Note that a layer takes part in a forward pass; each does so in turn, or none.

        Raises:
            CacheStateError: a pass was interrupted, so that layers are out of step.
        """
        if layer == 0 and self.layers_begun == self.layers_done == self.layer_count:
            self.layers_begun = self.layers_done = 0
        if not self.layers_begun == self.layers_done == layer:
            raise CacheStateError(
                "the last forward pass on this compressed cache was interrupted, or its attention "
                "did not go through pyramidkv; start again from an empty cache (cache.reset())"
            )
        self.layers_begun += 1

    def go_on(self, count: int) -> None:
        """Note that `count` tokens follow the prompt.

        Raises:
            CacheStateError: they might be the rest of the prompt.
        """
        if self.prompt_ended:
            return
        if count > 1:
            raise CacheStateError(
                "the prompt was compressed after its first forward pass, and more tokens follow "
                "before one was generated; give the prompt in one piece (no prefill_chunk_size), "
                "or call cache.end_prompt() if these tokens are to be added to the compressed "
                "prompt"
            )
        self.prompt_ended = True
        self.freed.hand_back()

    def prepare(self, batch: int, tokens: int, valid: Tensor | None) -> None:
        """Make each row's schedule from its own prompt length; once per prompt."""
        if self.lengths:
            return
        if valid is None:
            lengths = [tokens] * batch
        else:
            counts = valid.sum(-1, keepdim=True)
            lengths = counts.flatten().tolist()
            if min(lengths) == 0:
                raise PromptError("a row of the batch is all padding; every row needs a prompt")
            padded_left = torch.arange(tokens, device=valid.device) >= tokens - counts
            if not torch.equal(padded_left, valid):
                raise PromptError(
                    "the batch has padding after or between real tokens; pad on the left "
                    "(tokenizer.padding_side = 'left')"
                )
        schedule = self.compression.schedule
        known = {length: schedule(self.layer_count, length) for length in set(lengths)}
        self.schedules = [known[length] for length in lengths]
        self.lengths = lengths

    def padding(
        self, mask: Tensor, count: int, read: Callable[[Tensor | None], Tensor | None]
    ) -> Tensor | None:
        """Return which of a pass's `count` tokens are real, or None if all are.

        Every layer of a forward pass gets the same mask, so it is read once.
        """
        if self.seen_mask is None or self.seen_mask() is not mask:
            valid = read(mask)
            assert valid is not None
            self.seen_mask, self.seen_valid = weakref.ref(mask), valid[:, -count:]
            self.all_valid = bool(self.seen_valid.all())
        return None if self.all_valid else self.seen_valid
