"""Attention on GPUs: FlashAttention; what ends is compressed, what follows sees what was kept.

Written against vLLM 0.32 and its two model runners; it has not run on a GPU yet.

Decoding steps may be replays of CUDA graphs: no Python of ours runs in them, so the builder, which
always runs, writes the tables of what is left to buffers that stay where they are. Steps in which
a prompt ends run FlashAttention from Python, because the builder claims graphs for uniform batches
only and the scheduler gives such a step more tokens than a uniform one has per request. Should a
step be replayed all the same, the next one finds out and refuses to go on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from .blocks import CompressedSpec
from .checks import check_hook, settings_of
from .compaction import Rows
from .prompts_of_step import (
    CHOSEN_TOGETHER_BYTES,
    Compaction,
    EndingPrompt,
    ShownTables,
    score_prompt,
)
from .settings import ServingError
from .steps import extended, steps_of

check_hook(
    FlashAttentionMetadataBuilder,
    "__init__",
    *("kv_cache_spec", "layer_names", "vllm_config", "device"),
)
check_hook(
    FlashAttentionMetadataBuilder,
    "build",
    "common_prefix_len",
    "common_attn_metadata",
    "fast_build",
)
check_hook(FlashAttentionMetadataBuilder, "build_for_cudagraph_capture", "common_attn_metadata")
check_hook(
    FlashAttentionImpl,
    "forward",
    *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
)
check_hook(
    FlashAttentionImpl, "do_kv_cache_update", "layer", "key", "value", "kv_cache", "slot_mapping"
)


@dataclass
class CompressedMetadata(FlashAttentionMetadata):
    """What vLLM's kernels need, and the prompts to compress after this step's attention."""

    compaction: Compaction | None = None


class CompressedGPUBuilder(FlashAttentionMetadataBuilder):
    """Shows requests past their prompt the blocks that are left."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    """Also with FlashAttention 3, which could replay batches in which prompts end."""
    supports_update_block_table: bool = False
    """Another group's table is another shift."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if isinstance(kv_cache_spec, CompressedSpec):
            self._steps = steps_of(vllm_config, kv_cache_spec.settings, kv_cache_spec.block_size)
            self._shown = ShownTables(vllm_config.scheduler_config.max_num_seqs)
            self._compaction: Compaction | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        common, spec = common_attn_metadata, self.kv_cache_spec
        if not isinstance(spec, CompressedSpec):
            return super().build(common_prefix_len, common, fast_build)
        if common_prefix_len:
            raise ServingError("pyramidkv cannot serve with cascade attention; disable it")
        rows, past = self._steps.rows(common)
        return self._build_shown(
            common,
            rows.past[spec.group],
            None if past is None else past[spec.group],
            rows.ending[spec.group],
            fast_build,
        )

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        """Build for a batch without requests: a graph reads the same buffers as every step."""
        if not isinstance(self.kv_cache_spec, CompressedSpec):
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self._build_shown(common_attn_metadata, [], None, [], False)

    def _build_shown(
        self,
        common: CommonAttentionMetadata,
        past: list[int],
        past_on_device: Tensor | None,
        ending: list[EndingPrompt],
        fast_build: bool,
    ) -> CompressedMetadata:
        if self._compaction is not None and self._compaction.unfinished:
            raise ServingError(
                f"{self._compaction.unfinished} layers did not compress a prompt, because its last "
                "step was replayed as a CUDA graph; give --enforce-eager"
            )
        longest, size = common.max_seq_len, self.block_size
        if past_on_device is not None:
            bounds = common.seq_lens_cpu_upper_bound[: len(past)].tolist()
            longest = max(a - b * size for a, b in zip(bounds, past, strict=True))
        table, lengths = self._shown.show(
            common.block_table_tensor[: common.num_reqs],
            common.seq_lens[: common.num_reqs],
            past_on_device,
            size,
            -(-longest // size),
        )
        shown = dataclasses.replace(
            common,
            block_table_tensor=table,
            seq_lens=lengths,
            max_seq_len=longest,
            _num_computed_tokens_cache=None,
        )
        metadata = super().build(0, shown, fast_build)
        self._compaction = (
            Compaction(ending, self.kv_cache_spec.settings, len(self.layer_names))
            if ending
            else None
        )
        return extended(metadata, CompressedMetadata, compaction=self._compaction)


class CompressedGPUImpl(FlashAttentionImpl):
    """Compresses, after the attention, the prompts that are complete."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._config = get_current_vllm_config_or_none()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        result: Tensor = super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )
        if attn_metadata is None:
            self._rehearse(query, key)
        elif isinstance(attn_metadata, CompressedMetadata) and attn_metadata.compaction is not None:
            cache = Rows(*kv_cache.transpose(1, 2).split(self.head_size, dim=-1))
            table, softcap = attn_metadata.block_table, self.logits_soft_cap or None
            attn_metadata.compaction.layer(cache, table, query, self.scale, softcap)
        return result

    def _rehearse(self, query: Tensor, key: Tensor) -> None:
        """Choose from the longest prompt once, while vLLM measures what a step needs."""
        config, self._config = self._config, None
        if config is None:
            return
        settings = settings_of(config)
        tokens = config.model_config.max_model_len
        count = min(settings.kept(tokens, config.cache_config.block_size))
        if count < tokens:
            keys, values = key.new_zeros((2, 1, self.num_kv_heads, tokens, self.head_size))
            queries = query.new_zeros((min(settings.window, tokens), *query.shape[1:]))
            softcap = self.logits_soft_cap or None
            scores = score_prompt(keys, values, queries, settings, self.scale, softcap)
            together = -(-CHOSEN_TOGETHER_BYTES // scores.nbytes)
            settings.compression.method.options.select(scores.repeat(together, 1, 1), count)


class CompressedGPUBackend(FlashAttentionBackend):
    """FlashAttention with compressed prompts; without our specification, as it is."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return CompressedGPUImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return CompressedGPUBuilder
