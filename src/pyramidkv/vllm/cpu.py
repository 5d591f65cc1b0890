"""Attention on CPUs: a prompt that ends is compressed, and what follows sees what was kept."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
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

from .blocks import CompressedSpec
from .checks import check_config, check_hook, settings_of
from .compaction import TransposedKeys
from .metrics import counting_seconds
from .prompts_of_step import Compaction, shift_tables
from .settings import KEY, ServingError
from .steps import extended, steps_of

check_hook(CPUAttentionMetadataBuilder, "build", "common_prefix_len", "common_attn_metadata")
check_hook(
    CPUAttentionBackendImpl,
    "forward",
    *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
)

LAYOUTS = ("vec", "vec16")
"""Of vLLM's CPU caches: those whose keys lie as `TransposedKeys` has them."""


@dataclass
class CompressedMetadata(CPUAttentionMetadata):
    """What vLLM's kernels need, and the prompts to compress after this step's attention."""

    compaction: Compaction | None = None


class CompressedCPUBuilder(CPUAttentionMetadataBuilder):
    """Shows requests past their prompt the blocks that are left."""

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any):
        super().__init__(kv_cache_spec, *args, **kwargs)
        self._compaction: Compaction | None = None
        given = self.vllm_config.additional_config
        if isinstance(kv_cache_spec, CompressedSpec):  # of our worker, which has checked the rest
            if self.isa not in LAYOUTS:
                raise ServingError(
                    f"vLLM packs its CPU cache as {self.isa!r} here, which cannot be compressed "
                    "yet; use float32 or float16 (--dtype), whose layout is not packed"
                )
            self._steps = steps_of(self.vllm_config, kv_cache_spec.settings, self.block_size)
        elif isinstance(given, dict) and KEY in given:
            check_config(self.vllm_config, settings_of(self.vllm_config))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        common, spec = common_attn_metadata, self.kv_cache_spec
        if not isinstance(spec, CompressedSpec):
            return super().build(common_prefix_len, common, fast_build)
        if self._compaction is not None and self._compaction.unfinished:
            raise ServingError(
                f"{self._compaction.unfinished} layers did not compress a prompt in its last step"
            )
        rows, past = self._steps.rows(common)
        if past is not None:
            table, lengths = map(torch.empty_like, (common.block_table_tensor, common.seq_lens))
            shift_tables(
                common.block_table_tensor,
                common.seq_lens,
                past[spec.group],
                self.block_size,
                table,
                lengths,
            )
            common = dataclasses.replace(common, block_table_tensor=table, seq_lens=lengths)
        metadata = super().build(common_prefix_len, common, fast_build)
        ending = rows.ending[spec.group]
        self._compaction = (
            Compaction(ending, spec.settings, len(self.layer_names)) if ending else None
        )
        return extended(metadata, CompressedMetadata, compaction=self._compaction)


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
        if isinstance(attn_metadata, CompressedMetadata) and attn_metadata.compaction is not None:
            with counting_seconds():
                self._compress(query, kv_cache, attn_metadata, attn_metadata.compaction)
        return result

    def _compress(
        self,
        query: Tensor,
        kv_cache: Tensor,
        metadata: CPUAttentionMetadata,
        compaction: Compaction,
    ) -> None:
        blocks, heads, size, _ = kv_cache.shape
        cache = TransposedKeys(*kv_cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2))
        queries = query.view(len(query), self.num_heads, self.head_size)
        softcap = self.logits_soft_cap or None
        compaction.layer(cache, metadata.block_table, queries, self.scale, softcap)


class CompressedCPUBackend(CPUAttentionBackend):
    """vLLM's CPU attention with compressed prompts; without our specification, its own."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return CompressedCPUImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return CompressedCPUBuilder
