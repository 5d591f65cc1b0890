"""A slow reference: keeps every token and masks the evicted ones, per layer, row and head.

It shares no code with the package but the schedule (tested on its own): scores by the direct
formula on the full softmax, pooling and choice by Python loops, attention by one masked softmax.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from pyramidkv.methods import Compression, Options
from pyramidkv.support import full_attention_layers


@dataclass
class Reference:
    """Runs a model over a dense cache with the tokens that a method evicts masked out."""

    model: PreTrainedModel
    compression: Compression
    kept: dict[int, Tensor] = field(default_factory=dict)  # layer -> bool [batch, kv_heads, N]
    positions: Tensor | None = None  # of the prompt, -1 for padding

    def decode(self, ids: Tensor, mask: Tensor, steps: list[Tensor]) -> list[Tensor]:
        """Return the last logits of the prompt and of every step; steps are `[batch, n]` ids."""
        implementation = self.model.config._attn_implementation
        AttentionInterface.register("pyramidkv_test_reference", self._attention)
        AttentionMaskInterface.register(
            "pyramidkv_test_reference", ALL_MASK_ATTENTION_FUNCTIONS["eager"]
        )
        self.model.set_attn_implementation("pyramidkv_test_reference")
        try:
            cache = DynamicCache(config=self.model.config)
            logits = []
            self.positions = torch.where(mask > 0, mask.cumsum(-1) - 1, -1)
            for new in [ids, *steps]:
                seen = cache.get_seq_length()
                if seen:
                    mask = torch.cat([mask, torch.ones_like(new)], dim=1)
                positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
                with torch.no_grad():
                    out = self.model(
                        input_ids=new,
                        attention_mask=mask,
                        position_ids=positions,
                        past_key_values=cache,
                        use_cache=True,
                    )
                logits.append(out.logits[:, -1])
            return logits
        finally:
            self.model.set_attn_implementation(implementation)

    def _attention(self, module, query, key, value, attention_mask, scaling, **kwargs):
        batch, heads, count, _ = query.shape
        kv_heads, stored = key.shape[1:3]
        group = heads // kv_heads
        if self.compression.method.renumber and module.layer_idx in self.kept:
            key = self._renumbered(key, self.kept[module.layer_idx])
        grouped = query.view(batch, kv_heads, group, count, -1)
        logits = torch.einsum("bhgqd,bhkd->bhgqk", grouped, key) * scaling
        softcap = kwargs.get("softcap")
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + attention_mask[:, :, None, :, :stored]
        layer = module.layer_idx
        full = full_attention_layers(module.config)
        if layer in full and layer in self.kept:
            kept = self.kept[layer]
            kept = torch.nn.functional.pad(kept, (0, stored - kept.shape[-1]), value=True)
            logits = logits.masked_fill(~kept[:, :, None, None], torch.finfo(logits.dtype).min)
        weights = logits.softmax(-1)
        if layer in full and layer not in self.kept:
            valid = attention_mask[:, 0, -1, :stored] == 0
            self.kept[layer] = self._choose(weights, value, valid, full.index(layer), len(full))
        output = torch.einsum("bhgqk,bhkd->bqhgd", weights, value)
        return output.reshape(batch, count, heads, -1), None

    def _renumbered(self, key: Tensor, kept: Tensor) -> Tensor:
        """Turn the kept prompt keys back to position 0 and on to their new positions."""
        key = key.clone()
        tokens = kept.shape[-1]
        for row in range(key.shape[0]):
            length = int((self.positions[row] >= 0).sum())
            for head in range(key.shape[1]):
                columns = kept[row, head].nonzero()[:, 0]
                old = columns - (tokens - length)
                new = torch.arange(length - len(columns), length)
                raw = self._rotate(key[row, head, columns], old, -1)
                key[row, head, columns] = self._rotate(raw, new, 1)
        return key

    def _rotate(self, states: Tensor, positions: Tensor, sign: int) -> Tensor:
        rotary = self.model.get_decoder().rotary_emb
        kinds = ["full_attention"] if isinstance(rotary.rope_type, dict) else []
        cos, sin = (t[0] for t in rotary(states[None], positions[None], *kinds))
        size = cos.pow(2) + sin.pow(2)  # YaRN scales both; turning back must not scale twice
        cos, sin = cos / size.sqrt(), sign * sin / size.sqrt()
        turned, rest = states[:, : cos.shape[-1]], states[:, cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1)

    def _choose(self, weights, values, valid, index, layers) -> Tensor:
        batch, kv_heads, _, tokens = weights.shape[0], weights.shape[1], 0, weights.shape[-1]
        kept = torch.zeros((batch, kv_heads, tokens), dtype=torch.bool)
        for row in range(batch):
            length = int(valid[row].sum())
            budget = self.compression.schedule(layers, length)[index]
            for head in range(kv_heads):
                attention = weights[row, head, :, -length:, -length:]
                positions = choose(
                    self.compression.method.name,
                    self.compression.method.options,
                    attention,
                    values[row, head, -length:],
                    budget,
                )
                kept[row, head, tokens - length + torch.tensor(positions)] = True
        return kept


def choose(
    name: str, options: Options, attention: Tensor, values: Tensor, budget: int
) -> list[int]:
    """Choose the tokens one KV head keeps from its full attention `[group, N, N]`."""
    length = attention.shape[-1]
    if name == "full" or budget >= length:
        return list(range(length))
    reduce = {"mean": lambda t: t.mean(0), "max": lambda t: t.amax(0)}
    if name.startswith("streamingllm"):
        scores = [float(i) for i in range(length)]
    else:
        if name == "h2o":
            per_head = attention.sum(1)
        else:
            window = min(options.window_size, length)
            per_head = torch.stack([reduce[options.window_reduce](a[-window:]) for a in attention])
        combined = reduce[options.group_reduce](per_head)
        if options.value_norm:
            combined = combined * values.norm(dim=-1)
        scores = combined.tolist()
    first, last = options.sink_tokens, length - options.window_size
    half = options.kernel_size // 2

    def pooled(i: int) -> float:
        near = scores[max(first, i - half) : min(last, i + half + 1)]
        return max(near) if options.pooling == "max" else sum(near) / len(near)

    order = sorted(range(first, last), key=lambda i: (pooled(i), scores[i], i), reverse=True)
    chosen = order[: budget - options.sink_tokens - options.window_size]
    return sorted([*range(first), *chosen, *range(last, length)])
