"""Attention on CPUs: a prompt that ends is compressed, and what follows sees what was kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from . import running
from .blocks import CompressedSpec
from .checks import check_config, check_hook, settings_of
from .compaction import TransposedKeys, pair_slots
from .metrics import counting_seconds
from .settings import KEY, ServingError, ServingSettings

check_hook(CPUAttentionMetadataBuilder, "build", "common_prefix_len", "common_attn_metadata")
check_hook(
    CPUAttentionBackendImpl,
    "forward",
    *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
)

LAYOUTS = ("vec", "vec16")
"""Of vLLM's CPU caches: those whose keys lie as `TransposedKeys` has them."""


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


@dataclass
class CompressedMetadata(CPUAttentionMetadata):
    """What vLLM's kernels need, and the prompts to compress after this step's attention."""

    settings: ServingSettings | None = None
    ending: list[EndingPrompt] = field(default_factory=list)


class CompressedCPUBuilder(CPUAttentionMetadataBuilder):
    """Shows requests past their prompt the blocks that are left."""

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any):
        super().__init__(kv_cache_spec, *args, **kwargs)
        if isinstance(self.vllm_config.additional_config, dict) and (
            KEY in self.vllm_config.additional_config
        ):
            check_config(self.vllm_config, settings_of(self.vllm_config))
        if isinstance(kv_cache_spec, CompressedSpec) and self.isa not in LAYOUTS:
            raise ServingError(
                f"vLLM packs its CPU cache as {self.isa!r} here, which cannot be compressed yet; "
                "use float32 or float16 (--dtype), whose layout is not packed"
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common, spec = common_attn_metadata, self.kv_cache_spec
        if not isinstance(spec, CompressedSpec):
            return super().build(common_prefix_len, common, fast_build)
        batch, rows = running.runner_of(self.vllm_config).input_batch, common.num_reqs
        prompts = batch.num_prompt_tokens_cpu_tensor[:rows].tolist()
        computed = batch.num_computed_tokens_cpu_tensor[:rows].tolist()
        ends = common.query_start_loc_cpu[1 : rows + 1].tolist()
        starts = common.query_start_loc_cpu[:rows].tolist()
        past, ending = [0] * rows, []
        for row, (prompt, before) in enumerate(zip(prompts, computed, strict=True)):
            skipped = spec.settings.skipped_blocks(spec.group, prompt, self.block_size)
            if skipped == 0:
                continue
            after = before + ends[row] - starts[row]
            if before >= prompt:
                past[row] = skipped
            elif after >= prompt:
                if after > prompt or ends[row] - starts[row] < spec.settings.window:
                    raise ServingError(
                        "a step does not end with its prompt or has only a part of its window; "
                        "start vLLM with the scheduler of pyramidkv (--scheduler-cls)"
                    )
                ending.append(EndingPrompt(row, ends[row], prompt, skipped))
        if any(past):
            common = _without_heads(common, past, self.block_size)
        metadata = super().build(common_prefix_len, common, fast_build)
        own = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata)}
        return CompressedMetadata(**own, settings=spec.settings, ending=ending)


def _without_heads(
    common: CommonAttentionMetadata, skipped: list[int], block_size: int
) -> CommonAttentionMetadata:
    """Return the same batch, each row without its first `skipped` blocks."""
    table = common.block_table_tensor
    shift = torch.tensor(skipped, device=table.device)
    columns = torch.arange(table.shape[1], device=table.device) + shift[:, None]
    shifted = table.gather(1, columns.clamp_(max=table.shape[1] - 1))
    lengths = common.seq_lens - (shift * block_size).to(common.seq_lens.dtype)
    return dataclasses.replace(common, block_table_tensor=shifted, seq_lens=lengths)


class CompressedCPUImpl(CPUAttentionBackendImpl):
    """Compresses, after the attention, the prompts that are complete."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        result: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if isinstance(attn_metadata, CompressedMetadata):
            for prompt in attn_metadata.ending:
                with counting_seconds():
                    self._compress(query, kv_cache, attn_metadata, prompt)
        return result

    def _compress(
        self, query: Tensor, kv_cache: Tensor, metadata: CompressedMetadata, prompt: EndingPrompt
    ) -> None:
        settings = metadata.settings
        assert settings is not None
        method = settings.compression.method
        score = method.build_score()
        assert score is not None
        blocks, heads, size, _ = kv_cache.shape
        cache = TransposedKeys(*kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2))
        own = metadata.block_table[prompt.row, : -(-prompt.tokens // size)].long()
        keys = values = cache.gather_keys(own, prompt.tokens)
        if method.options.value_norm:  # the only thing that reads them
            values = cache.gather_values(own, prompt.tokens)
        voters = query[prompt.end - score.query_count(prompt.tokens) : prompt.end]
        queries = voters.view(len(voters), self.num_heads, self.head_size).transpose(0, 1)[None]
        softcap = self.logits_soft_cap or None
        scores = score(queries, keys, values, None, self.scale, softcap)
        freed = prompt.skipped * size
        kept = method.options.select(scores, prompt.tokens - freed)
        heads_of, source, target = pair_slots(kept[0], prompt.tokens, freed)
        cache.move(heads_of, own, source, target)


class CompressedCPUBackend(CPUAttentionBackend):
    """vLLM's CPU attention with compressed prompts; without our specification, its own."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CompressedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CompressedCPUBuilder
