"""One prompt, many compressions: processed once, each method chooses from the same states.

For comparing methods: the prompt's pass, which is most of the work, is shared, and all of them go
on generating as the rows of one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from .cache import CompressedCache
from .compression import GROWTH_ROWS, Compression
from .contest import Contest, mean_tokens
from .engine import cache_parameter
from .errors import PromptError
from .layer import take_tokens
from .method_options import MethodError
from .model_shape import layers_to_compress
from .ragged import RaggedStorage
from .rotary import key_frequencies, move_keys
from .scores import Score
from .storage import RowStorage
from .support import check_model, full_attention_layers


@dataclass(frozen=True)
class Branched:
    """A prompt that was processed once.

    Attributes:
        caches: one for each group of compressions; a row for each compression.
        logits: of the prompt's last token, `[vocabulary]`: the same for all, since the prompt
            itself is computed on its full keys.
    """

    caches: list[CompressedCache]
    logits: Tensor


def compress_many(
    model: PreTrainedModel, ids: Tensor, groups: Sequence[Sequence[Compression]]
) -> Branched:
    """Process a prompt once and return a cache for each group of compressions.

    Row r of a cache holds what compression r of its group keeps: the same tokens as alone. Rows of
    a layer are as long as the longest among them, so that what keeps much more than the others
    (the full cache) is better off in a group of its own.

    Args:
        model: from transformers.
        ids: the prompt, `[1, tokens]`.
        groups: none of them empty. Decode budgets and budgets measured on the prompt itself are
            refused.

    Raises:
        PromptError: it is no prompt of one row.
        MethodError: a compression cannot be one of many, or not of its group.
        PyramidKVError: a compression does not fit the model or the prompt.
    """
    check_model(model)
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0:
        raise PromptError(f"the prompt is {tuple(ids.shape)}; it must be one row [1, tokens]")
    layers = len(full_attention_layers(model.config))
    for group in groups:
        if len({competition(compression) for compression in group}) > 1:
            raise MethodError(
                "methods whose heads compete for the tokens of a layer, those whose heads compete "
                "over all layers, and others are stored differently; give them as groups of their "
                "own"
            )
    for compression in (member for group in groups for member in group):
        _check(compression)
        layers_to_compress(model.config, compression)
    tokens = ids.shape[1]
    branches = [_Branches(model, group, layers, tokens) for group in groups]

    def observe(
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        softcap: float | None,
    ) -> None:
        states = _States(queries, keys, values, scale, softcap)
        for branch in branches:
            branch.take(layer, states)

    cache = CompressedCache.for_observing(model, observe)  # each branch brings its own rows
    options = {"logits_to_keep": 1, cache_parameter(model): cache}
    with torch.inference_mode():
        logits = model(ids, use_cache=True, **options).logits[0, -1]
    cache.end_prompt()
    return Branched([branch.graft(copy.deepcopy(cache)) for branch in branches], logits)


def competition(compression: Compression) -> Literal["none", "layer", "model"]:
    """Say with which others a head competes for tokens; what is not alike is stored differently."""
    options = compression.method.options
    if not options.by_head:
        return "none"
    return "model" if options.allocation == "global" else "layer"


def _check(compression: Compression) -> None:
    if compression.decode_budget is not None or compression.measured:
        what = "a decode budget" if not compression.measured else "budgets measured on the prompt"
        raise MethodError(
            f"{compression.method.name} with {what} cannot be one of many compressions of a "
            "prompt; run it alone"
        )


@dataclass
class _States:
    """One layer's states of the prompt, and the scores that were made of them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    softcap: float | None
    _scores: dict[Score, Tensor] = field(default_factory=dict)

    def scores(self, score: Score) -> Tensor:
        """Return float32 `[1, kv_heads, N]`; made once for all methods with the same score."""
        if score not in self._scores:
            count = score.query_count(self.keys.shape[2])
            voters = self.queries[:, :, self.queries.shape[2] - count :]
            self._scores[score] = score(
                voters, self.keys, self.values, None, self.scale, self.softcap
            )
        return self._scores[score]


class _Branches:
    """What a group of compressions keeps of each layer."""

    def __init__(
        self, model: PreTrainedModel, group: Sequence[Compression], layers: int, tokens: int
    ):
        self._group = group
        self._scores = [compression.method.build_score() for compression in group]
        self._layers, self._tokens = layers, tokens
        self._schedules: list[list[float]] = [
            [] if compression.follows_prompt else [*compression.schedule(layers, tokens)]
            for compression in group
        ]
        self._frequencies = [
            key_frequencies(model) if compression.method.renumber else None for compression in group
        ]
        self._competition = competition(group[0]) if group else "none"
        self._contest: Contest | None = None
        self._parts: list[tuple[RowStorage, Tensor] | RaggedStorage] = []

    def take(self, layer: int, states: _States) -> None:
        """Keep of a layer what each compression of the group chooses."""
        if self._competition == "none":
            counts = [int(schedule[layer]) for schedule in self._schedules]
            self._parts.append(self._take(counts, states))
        else:
            self._parts.append(self._take_by_head(layer, states))

    def _take_by_head(self, layer: int, states: _States) -> RaggedStorage:
        heads, batch = states.keys.shape[1], len(self._group)
        keys, values = (each.expand(batch, -1, -1, -1) for each in (states.keys, states.values))
        scores = [states.scores(score) for score in self._scores if score is not None]
        options = [compression.method.options for compression in self._group]
        lengths = [self._tokens] * batch
        if self._competition == "model":
            if self._contest is None:
                budgets = [each.possible_budget(self._tokens) for each in self._group]
                self._contest = Contest(options, self._layers, heads, lengths, budgets)
            storage = self._contest.take(keys, values, scores, lengths)
            if self._contest.complete:
                self._schedules, self._contest = self._contest.means(), None
            return storage
        selections = []
        for each, own, schedule in zip(options, scores, self._schedules, strict=True):
            budget = 0 if each.head_budgets is not None else int(schedule[layer])
            selections.append(each.select_heads(own, layer, budget))
            if each.head_budgets is not None:
                schedule.append(mean_tokens(selections[-1].total, heads))
        return RaggedStorage.gather(keys, values, selections, lengths)

    def _take(self, counts: list[int], states: _States) -> tuple[RowStorage, Tensor]:
        rows, batch = max(counts), len(self._group)
        with torch.inference_mode(False), torch.no_grad():
            storage = RowStorage(
                states.keys.expand(batch, -1, -1, -1),
                states.values.expand(batch, -1, -1, -1),
                rows,
                rows + GROWTH_ROWS,
            )
            positions = []
            for row, (compression, count) in enumerate(zip(self._group, counts, strict=True)):
                indices = _choose(compression, self._scores[row], count, states)
                keys = take_tokens(states.keys, indices)
                frequencies = self._frequencies[row]
                if frequencies is not None:
                    end = states.keys.shape[2]
                    last = torch.arange(end - count, end, device=keys.device)
                    keys = move_keys(keys, last - indices, frequencies)
                storage.put(slice(row, row + 1), rows, keys, take_tokens(states.values, indices))
                positions.append(functional.pad(indices.int(), (rows - count, 0)))
            storage.settle(counts)
            return storage, torch.cat(positions)

    def graft(self, cache: CompressedCache) -> CompressedCache:
        """Give a cache of the prompt's other states the rows of this group."""
        cache.adopt(self._schedules, self._parts)
        return cache


def _choose(compression: Compression, score: Score | None, count: int, states: _States) -> Tensor:
    """Return what a compression keeps of a layer, int64 `[1, kv_heads, count]`, ascending."""
    keys = states.keys
    if score is None or count == keys.shape[2]:
        return torch.arange(count, device=keys.device).expand(*keys.shape[:2], -1)
    return compression.method.options.select(states.scores(score), count)
