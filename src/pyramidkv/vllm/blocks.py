"""The cache blocks of a group of layers: which are freed, shared, and never shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from .checks import check_hook
from .settings import ServingSettings


@dataclass(frozen=True, kw_only=True)
class CompressedSpec(FullAttentionSpec):
    """Full attention whose prompts are compressed.

    Attributes:
        settings: the plugin's.
        group: the group of layers this is, which sets its budget.
    """

    settings: ServingSettings
    group: int

    @classmethod
    def of(cls, spec: FullAttentionSpec, settings: ServingSettings, group: int) -> CompressedSpec:
        """Return the same layer's specification, with compression."""
        own = {field.name: getattr(spec, field.name) for field in fields(FullAttentionSpec)}
        return cls(**own, settings=settings, group=group)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("layers of different budgets cannot be in one group")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(spec == self for spec in kv_cache_specs.values())


class CompressedManager(FullAttentionManager):
    """Frees the head of a prompt's blocks once the prompt is complete."""

    kv_cache_spec: CompressedSpec

    def _skipped(self, prompt: int) -> int:
        spec = self.kv_cache_spec
        return spec.settings.skipped_blocks(spec.group, prompt, self.block_size)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        if num_prompt_tokens is not None and processed_computed_tokens >= num_prompt_tokens:
            self._remove_blocks_in_range(request_id, 0, self._skipped(num_prompt_tokens))

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Offer blocks to later requests, but none that are written to when the prompt is done."""
        skipped = self._skipped(request.num_prompt_tokens)
        if skipped:
            num_tokens = min(num_tokens, skipped * self.block_size)
        super().cache_blocks(
            request, num_tokens, retention_interval, replay_boundaries=replay_boundaries
        )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Look blocks up as for full attention, but only those that will not be written to."""
        assert isinstance(kv_cache_spec, CompressedSpec)
        hashed = len(block_hashes) * block_pool.hash_block_size
        most = kv_cache_spec.settings.largest_hit(
            kv_cache_spec.group, hashed, kv_cache_spec.block_size
        )
        if most is not None:
            max_length = min(max_length, most)
        found: tuple[tuple[list[KVCacheBlock], ...], int] = super().find_longest_cache_hit(
            block_hashes,
            max_length,
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            *args,
            **kwargs,
        )
        return found


def register() -> None:
    """Make vLLM know the specification; more than once does nothing."""
    kept = ("request_id", "processed_computed_tokens", "num_prompt_tokens")
    check_hook(FullAttentionManager, "remove_skipped_blocks", *kept)
    check_hook(FullAttentionManager, "_remove_blocks_in_range", "request_id", "first_block")
    cached = ("request", "num_tokens", "retention_interval", "replay_boundaries")
    check_hook(FullAttentionManager, "cache_blocks", *cached)
    looked_up = ("block_hashes", "max_length", "kv_cache_group_ids", "block_pool", "kv_cache_spec")
    check_hook(FullAttentionManager, "find_longest_cache_hit", *looked_up)
    check_hook(FullAttentionSpec, "merge", "specs")
    check_hook(FullAttentionSpec, "is_uniform_with_collection", "kv_cache_specs")
    registered = ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec")
    check_hook(KVCacheSpecRegistry, "register", *registered)
    check_hook(KVCacheSpecRegistry, "_ensure_registered")
    # The built-in ones register themselves only while the table is empty.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(CompressedSpec, CompressedManager, CompressedSpec)


register()  # wherever a specification is unpickled, its manager must be known
