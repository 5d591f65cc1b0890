"""A slow reference: keeps every token and masks the evicted ones, per layer, row and head.

It shares no code with the package but the schedule (tested on its own): scores by the direct
formula on the full softmax, pooling and choice by Python loops, attention by one masked softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from pyramidkv.compression import Compression
from pyramidkv.method_options import Options
from pyramidkv.support import full_attention_layers


@dataclass
class Reference:
    """Runs a model over a dense cache with the tokens that a method evicts masked out.

    Columns are those of the batch, padding included. `alive[layer]` says which are still there.
    """

    model: PreTrainedModel
    compression: Compression
    alive: dict[int, Tensor] = field(default_factory=dict)  # layer -> bool [batch, kv_heads, N]
    queries: dict[int, Tensor] = field(default_factory=dict)  # layer -> [batch, heads, N, head_dim]
    sums: dict[int, Tensor] = field(default_factory=dict)  # layer -> [batch, kv_heads, group, N]
    mask: Tensor | None = None  # of all columns so far, those of this pass included
    prompt: Tensor | None = None  # real tokens of each row's prompt, the question left out
    orders: dict[tuple[int, int, int], tuple] = field(default_factory=dict)  # of all heads so far
    event: str = ""  # what happens after this pass: "piece", "last piece", "decoding" or nothing
    question: int = 0
    width: int = 0  # of the prompt's columns

    def decode(
        self,
        ids: Tensor,
        mask: Tensor,
        steps: list[Tensor],
        pieces: Sequence[int] = (),
        question: int = 0,
    ) -> list[Tensor]:
        """Return the last logits of the prompt's last piece and of every step.

        Steps are `[batch, n]` ids, or pairs of ids and mask. The last `question` columns of the
        prompt vote and are then forgotten.
        """
        implementation = self.model.config._attn_implementation
        AttentionInterface.register("pyramidkv_test_reference", self._attention)
        AttentionMaskInterface.register(
            "pyramidkv_test_reference", ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        )
        self.model.set_attn_implementation("pyramidkv_test_reference")
        self.prompt, self.question = mask.sum(-1) - question, question
        self.width = ids.shape[1] - question
        sizes = list(pieces) or [ids.shape[1]]
        prompt = list(zip(ids.split(sizes, 1), mask.split(sizes, 1), strict=True))
        waiting = 0
        try:
            cache = DynamicCache(config=self.model.config)
            logits = []
            self.mask = mask[:, :0]
            for index, step in enumerate([*prompt, *steps]):
                new, new_mask = step if isinstance(step, tuple) else (step, torch.ones_like(step))
                self.event = ""
                if index < len(prompt):
                    self.event = "last piece" if index == len(prompt) - 1 else "piece"
                elif self.compression.decode_budget is not None:
                    waiting += new.shape[1]
                    layers = len(full_attention_layers(self.model.config))
                    most = max(sum(self.compression.schedule(layers, int(n))) for n in self.prompt)
                    above = most > layers * self.compression.decode_budget
                    at_once = above and index == len(prompt)
                    if waiting >= self.compression.decode_interval or at_once:
                        self.event, waiting = "decoding", 0
                if self.event == "last piece" and question:
                    for layer in cache.layers:
                        if layer.is_sliding:
                            layer.activate_past_recording()
                self.mask = torch.cat([self.mask, new_mask], dim=1)
                positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
                with torch.no_grad():
                    out = self.model(
                        input_ids=new,
                        attention_mask=self.mask,
                        position_ids=positions,
                        past_key_values=cache,
                        use_cache=True,
                    )
                if index >= len(prompt) - 1:
                    logits.append(out.logits[:, -1])
                if self.event == "last piece" and question:
                    cache.crop(-question)
                    for layer in cache.layers:
                        layer.record_past = False
                    self.mask = self.mask[:, :-question]
                    for states in (self.alive, self.sums):
                        for layer in states:
                            states[layer] = states[layer][..., :-question]
                    for layer in self.queries:
                        self.queries[layer] = self.queries[layer][:, :, :-question]
            return logits
        finally:
            self.model.set_attn_implementation(implementation)

    def _attention(self, module, query, key, value, attention_mask, scaling, **kwargs):
        batch, heads, count, _ = query.shape
        kv_heads, stored = key.shape[1:3]
        group = heads // kv_heads
        layer, full = module.layer_idx, full_attention_layers(module.config)
        softcap = kwargs.get("softcap")
        if layer not in full:
            weights = _weights(query, key, attention_mask[:, :, :, :stored], scaling, softcap)
            return _output(weights, value), None
        real = self.mask.bool()[:, None].expand(-1, kv_heads, -1)
        if layer in self.alive:
            past = self.alive[layer]
            alive = torch.cat([past, real[..., past.shape[-1] :]], dim=-1)
            query_all = torch.cat([self.queries[layer], query], dim=2)
            sums = torch.nn.functional.pad(self.sums[layer], (0, count))
        else:
            alive, query_all = real.clone(), query
            sums = query.new_zeros((batch, kv_heads, group, stored))
        if self.compression.method.renumber and layer in self.alive:
            key = self._renumbered(key, self.alive[layer])
        blocked = torch.finfo(query.dtype).min
        hidden = torch.zeros_like(alive, dtype=query.dtype).masked_fill(~alive, blocked)
        seen = (attention_mask[:, :, :, :stored] + hidden[:, :, None]).clamp(min=blocked)
        weights = _weights(query, key, seen, scaling, softcap)
        voting = self.mask[:, -count:].to(weights.dtype)
        sums = sums + (weights * voting[:, None, None, :, None]).sum(-2)
        self.alive[layer], self.queries[layer], self.sums[layer] = alive, query_all, sums
        if self.event:
            for row in range(batch):
                given = layer, full, row
                options = self.compression.method.options
                if options.allocation == "global":
                    self._evict_globally(*given, key, value, scaling, softcap)
                    continue
                if options.head_floor is not None and options.head_budgets is None:
                    self._evict_by_head(*given, key, value, scaling, softcap)
                    continue
                for head in range(kv_heads):
                    self._evict(*given, head, key, value, scaling, softcap)
        return _output(weights, value), None

    def _evict(self, layer, full, row, head, key, value, scaling, softcap) -> None:
        keepable, votes, budget = self._votes(layer, full, row, head, key, scaling, softcap)
        positions = choose(
            self.compression.method.name,
            self.compression.method.options,
            votes[:, : len(keepable)],
            value[row, head, keepable],
            budget,
        )
        self._keep(layer, row, head, keepable[positions])

    def _keep(self, layer, row, head, columns) -> None:
        alive = torch.zeros_like(self.alive[layer][row, head])
        alive[columns] = True
        self.alive[layer][row, head] = alive

    def _evict_by_head(self, layer, full, row, key, value, scaling, softcap) -> None:
        """Let the heads of a layer compete: each keeps its floor, the rest goes to the best."""
        options = self.compression.method.options
        first, window = options.sink_tokens, options.window_size
        orders, kept, columns, budget = [], [], None, 0
        for head in range(key.shape[1]):
            columns, votes, budget = self._votes(layer, full, row, head, key, scaling, softcap)
            votes = votes[:, : len(columns)]
            ranked = ranking(options, votes, value[row, head, columns])
            orders.append([(*rank, -head) for rank in ranked])
        length, heads = len(columns), key.shape[1]
        spare = heads * (budget - first - window)
        floor = int(options.head_floor * spare / heads + 1e-9)
        last = length - window
        for order in orders:
            best = range(length) if budget >= length else [place for *_, place, _ in order[:floor]]
            kept.append({*best, *range(first), *range(last, length)})
        if budget < length:
            rest = sorted((entry for order in orders for entry in order[floor:]), reverse=True)
            for *_, place, head in rest[: spare - heads * floor]:
                kept[-head].add(place)
        for head in range(heads):
            self._keep(layer, row, head, columns[sorted(kept[head])])

    def _evict_globally(self, layer, full, row, key, value, scaling, softcap) -> None:
        """Let the heads of all layers compete, once the last of them has its votes."""
        options, heads, layers = self.compression.method.options, key.shape[1], len(full)
        for head in range(heads):
            columns, votes, _ = self._votes(layer, full, row, head, key, scaling, softcap)
            ranked = ranking(options, votes[:, : len(columns)], value[row, head, columns])
            self.orders[row, full.index(layer), head] = columns, ranked
        if layer != full[-1]:
            return
        length = len(self.orders[row, 0, 0][0])
        budget = min(self.compression.budget_for(int(self.prompt[row])), length)
        spare = layers * heads * (budget - options.protected)
        floor = int(options.head_floor * spare / (layers * heads) + 1e-9)
        certain = {*range(options.sink_tokens), *range(length - options.window_size, length)}
        kept = {}
        rest = []
        for index, head in ((i, h) for i in range(layers) for h in range(heads)):
            ranked = self.orders[row, index, head][1]
            kept[index, head] = certain | {place for *_, place in ranked[:floor]}
            rest += [(*rank, -index, -head) for rank in ranked[floor:]]
            if budget >= length:
                kept[index, head] = set(range(length))
        if budget < length:
            best = sorted(rest, reverse=True)[: spare - layers * heads * floor]
            for *_, place, index, head in best:
                kept[-index, -head].add(place)
        for (index, head), places in kept.items():
            columns = self.orders[row, index, head][0]
            self._keep(full[index], row, head, columns[sorted(places)])

    def _votes(self, layer, full, row, head, key, scaling, softcap):
        """Return the columns that may stay, votes `[group, columns]`, and how many stay."""
        alive = self.alive[layer][row, head]
        columns = alive.nonzero()[:, 0]
        real = self.mask[row].nonzero()[:, 0]
        keepable = columns
        if self.event == "last piece" and self.question:
            keepable = columns[: len(columns) - self.question]
        index, seen = full.index(layer), len(real)
        table = self.compression.method.options.head_budgets
        if table is not None:
            share = table[index][head]
        elif self.compression.follows_prompt:
            share = len(keepable)
        elif self.event == "decoding":
            share = self.compression.decode_schedule(len(full), seen)[index]
        else:
            share = self.compression.schedule(len(full), int(self.prompt[row]))[index]
        budget = min(share, len(keepable))
        options = self.compression.method.options
        group = self.queries[layer].shape[1] // key.shape[1]
        if self.compression.method.name == "h2o":
            return keepable, self.sums[layer][row, head][:, columns], budget
        voters = real[len(real) - min(options.window_size, len(real)) :]
        heads = slice(head * group, (head + 1) * group)
        logits = self.queries[layer][row, heads][:, voters] @ key[row, head, columns].T * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        future = columns[None, :] > voters[:, None]
        weights = logits.masked_fill(future, float("-inf")).softmax(-1)
        if options.window_reduce == "max" and len(voters):
            return keepable, weights.amax(1), budget
        return keepable, weights.mean(1), budget

    def _renumbered(self, key: Tensor, kept: Tensor) -> Tensor:
        """Turn the kept prompt keys back to position 0 and on to their new positions."""
        key = key.clone()
        for row in range(key.shape[0]):
            length = int(self.prompt[row])
            for head in range(key.shape[1]):
                columns = kept[row, head, : self.width].nonzero()[:, 0]
                old = columns - (self.width - length)
                new = torch.arange(length - len(columns), length)
                raw = self._rotate(key[row, head, columns], old, -1)
                key[row, head, columns] = self._rotate(raw, new, 1)
        return key

    def _rotate(self, states: Tensor, positions: Tensor, sign: int) -> Tensor:
        decoder = self.model.get_decoder()
        rotary = decoder.pos_emb if hasattr(decoder, "pos_emb") else decoder.rotary_emb
        kinds = ["full_attention"] if isinstance(rotary.rope_type, dict) else []
        cos, sin = (t[0] for t in rotary(states[None], positions[None], *kinds))
        size = cos.pow(2) + sin.pow(2)  # YaRN scales both; turning back must not scale twice
        cos, sin = cos / size.sqrt(), sign * sin / size.sqrt()
        turned, rest = states[:, : cos.shape[-1]], states[:, cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)


def _weights(query, key, mask, scaling, softcap) -> Tensor:
    """Attention weights `[batch, kv_heads, group, queries, keys]`; mask over heads or KV heads."""
    batch, heads, count, _ = query.shape
    kv_heads = key.shape[1]
    grouped = query.view(batch, kv_heads, heads // kv_heads, count, -1)
    logits = torch.einsum("bhgqd,bhkd->bhgqk", grouped, key) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (logits + mask[:, :, None]).softmax(-1)


def _output(weights: Tensor, value: Tensor) -> Tensor:
    output = torch.einsum("bhgqk,bhkd->bqhgd", weights, value)
    return output.flatten(2, 3)


def choose(name: str, options: Options, votes: Tensor, values: Tensor, budget: int) -> list[int]:
    """Choose the tokens one KV head keeps, from the votes of its query heads `[group, N]`."""
    length = votes.shape[-1]
    if name == "full" or budget >= length:
        return list(range(length))
    first, last = options.sink_tokens, length - options.window_size
    if name.startswith("streamingllm"):
        order = list(range(last - 1, first - 1, -1))
    else:
        order = [place for *_, place in ranking(options, votes, values)]
    chosen = order[: budget - options.sink_tokens - options.window_size]
    return sorted([*range(first), *chosen, *range(last, length)])


def ranking(options: Options, votes: Tensor, values: Tensor) -> list[tuple[float, float, int]]:
    """Return what may go of one KV head, best first: pooled score, own score, position."""
    combined = votes.amax(0) if options.group_reduce == "max" else votes.mean(0)
    if options.value_norm:
        combined = combined * values.norm(dim=-1)
    scores = combined.tolist()
    first, last = options.sink_tokens, len(scores) - options.window_size
    half = options.kernel_size // 2

    def pooled(i: int) -> float:
        near = scores[max(first, i - half) : min(last, i + half + 1)]
        return max(near) if options.pooling == "max" else sum(near) / len(near)

    return sorted(((pooled(i), scores[i], i) for i in range(first, last)), reverse=True)
