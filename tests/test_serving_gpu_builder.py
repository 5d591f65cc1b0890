"""vLLM's FlashAttention classes with ours, on a CPU: what the kernels are given, and when."""

from __future__ import annotations

from types import SimpleNamespace

import flash_reference
import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm", reason="needs vLLM (make test-vllm)")

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from pyramidkv.method_options import Options
from pyramidkv.vllm import gpu, gpu_worker, grouped, running, scheduling
from pyramidkv.vllm.blocks import CompressedSpec
from pyramidkv.vllm.settings import KEY, WORKERS, ServingError, read_settings

SIZE, HEADS, DIM, BLOCKS, LONGEST = 16, 2, 8, 64, 256
GIVEN = {"budget": 48, "window_size": 4, "groups": 2, "method": "snapkv"}
SETTINGS = read_settings(GIVEN, 4)


class Config(SimpleNamespace):
    """As much of vLLM's configuration as the classes look at; it can be weakly referenced."""


@pytest.fixture
def config(monkeypatch):
    """FlashAttention 3 with its functions written out, and full CUDA graphs."""
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda *_, **__: 3)
    for name, function in (
        ("flash_attn_varlen_func", flash_reference.attend),
        ("reshape_and_cache_flash", flash_reference.store),
        ("get_scheduler_metadata", flash_reference.plan_ahead),
    ):
        monkeypatch.setattr(flash_attn, name, function, raising=False)
    monkeypatch.setattr(flash_attn, "get_num_attention_heads_from_layers", lambda *_: 2 * HEADS)
    monkeypatch.setattr(flash_attn, "get_dcp_world_size_and_rank", lambda *_: (1, 0))
    monkeypatch.setattr(flash_attn, "_get_sliding_window_configs", lambda *_: {(-1, -1)})
    graphs = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True),
        max_cudagraph_capture_size=8,
    )
    return Config(
        model_config=SimpleNamespace(
            rswa_window=None,
            is_mm_prefix_lm=False,
            max_model_len=LONGEST,
            get_total_num_hidden_layers=lambda: 4,
            hf_text_config=SimpleNamespace(),
        ),
        parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1, worker_cls=WORKERS["cuda"]),
        cache_config=SimpleNamespace(block_size=SIZE, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        compilation_config=graphs,
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32),
        kernel_config=SimpleNamespace(enable_jit_warmup=False),
        speculative_config=None,
        additional_config={KEY: GIVEN},
    )


def make_builder(config, group=0, block_size=SIZE):
    spec = FullAttentionSpec(
        block_size=SIZE, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float16
    )
    spec = CompressedSpec.of(spec, SETTINGS, group).copy_with_new_block_size(block_size)
    return gpu.CompressedGPUBuilder(spec, ["model.0.attn", "model.1.attn"], config, "cpu")


def batch(config, prompts, computed, new, padding=0, block_size=SIZE):
    """A batch of Model Runner V1, whose runner is noted; each request has its own blocks."""
    count = len(prompts) + padding
    numbers = torch.tensor([*prompts, *[0] * padding])
    runner = Config(
        input_batch=SimpleNamespace(num_prompt_tokens_cpu_tensor=numbers, num_reqs=len(prompts))
    )
    config.runner = runner  # keeps it alive
    running.remember(config, runner)
    starts = torch.tensor(np.cumsum([0, *new, *[0] * padding]), dtype=torch.int32)
    lengths = torch.tensor(
        [a + b for a, b in zip(computed, new, strict=True)] + [0] * padding
    ).int()
    table = torch.arange(count * LONGEST // block_size).view(count, -1) % BLOCKS
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=count,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(new),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table.int(),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.tensor([a < b for a, b in zip(computed, prompts, strict=True)]),
    )


def test_the_hooks_are_there_and_ours():
    """Importing checks their parameters (`check_hook`)."""
    assert AttentionBackendEnum.CUSTOM.get_class() is gpu.CompressedGPUBackend
    backend = gpu.CompressedGPUBackend
    assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    assert backend.get_impl_cls() is gpu.CompressedGPUImpl
    assert not backend.forward_includes_kv_cache_update  # so that keys are stored before `forward`
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert not builder.supports_update_block_table
    for worker in (gpu_worker.CompressedGPUWorker,):
        assert worker.get_kv_cache_spec is grouped.GroupedWorker.get_kv_cache_spec
    ahead = scheduling.CompressedAsyncScheduler
    assert ahead._reserve_prefill_lookahead is (
        scheduling.CompressedScheduler._reserve_prefill_lookahead
    )
    after = [c for c in ahead.__mro__ if "_update_after_schedule" in vars(c)]
    assert after[:2] == [scheduling.CompressedScheduler, scheduling.AsyncScheduler]


def test_a_worker_on_another_platform_names_the_one_that_fits(monkeypatch):
    with pytest.raises(ServingError, match=f"runs on cpu here; give --worker-cls {WORKERS['cpu']}"):
        gpu_worker.CompressedGPUWorker(None)
    platform = SimpleNamespace(is_cpu=bool, is_cuda=lambda: True, device_name="cuda")
    monkeypatch.setattr(grouped, "current_platform", platform)
    grouped.check_device("cuda")
    with pytest.raises(ServingError, match="start with pyramidkv serve --device cuda"):
        grouped.check_device("cpu")
    platform.is_cuda = bool
    with pytest.raises(ServingError, match="serves on CPUs and, to be tried, on GPUs of NVIDIA"):
        grouped.check_device("cuda")


def test_attention_that_depends_on_where_tokens_lie_is_refused():
    impl = gpu.CompressedGPUImpl.__new__(gpu.CompressedGPUImpl)
    impl.alibi_slopes = impl.sinks = None
    grouped.check_attention({"a": impl}, "CompressedGPUImpl")
    with pytest.raises(ServingError, match="vLLM uses CompressedGPUImpl as its attention"):
        grouped.check_attention({"a": impl}, "CompressedCPUImpl")
    for name, message in (("alibi_slopes", "ALiBi"), ("sinks", "learned attention sinks")):
        setattr(impl, name, torch.ones(4))
        with pytest.raises(ServingError, match=message):
            grouped.check_attention({"a": impl}, "CompressedGPUImpl")
        setattr(impl, name, None)


def test_rows_past_their_prompt_are_shown_without_what_was_freed(config):
    builder = make_builder(config)
    told = batch(config, [100, 100, 40, 100], [130, 50, 60, 95], [1, 10, 1, 5], padding=1)
    metadata = builder.build(0, told)
    freed = SETTINGS.skipped_blocks(0, 100, SIZE)
    assert freed == 3
    assert metadata.seq_lens.tolist() == [131 - freed * SIZE, 60, 61, 100, 0]
    assert metadata.max_seq_len == 100
    assert torch.equal(metadata.block_table[0, :6], told.block_table_tensor[0, freed : freed + 6])
    assert torch.equal(metadata.block_table[1:, :7], told.block_table_tensor[1:, :7])
    ending = metadata.compaction.ending
    assert [(p.row, p.end, p.tokens, p.skipped) for p in ending] == [(3, 17, 100, freed)]
    assert metadata.slot_mapping is told.slot_mapping
    assert told.seq_lens.tolist() == [131, 60, 61, 100, 0]


def test_kernels_with_smaller_blocks_see_as_many_tokens(config):
    config.cache_config.block_size = 2 * SIZE
    told = batch(config, [100], [130], [1])
    metadata = make_builder(config).build(0, told)
    freed = 2 * SETTINGS.skipped_blocks(0, 100, 2 * SIZE)
    assert freed == 2
    assert metadata.seq_lens.tolist() == [131 - freed * SIZE]
    config.cache_config.block_size = SIZE + 8
    with pytest.raises(ServingError, match="blocks of 24 tokens do not consist of the kernel's"):
        make_builder(config)


def test_what_was_captured_reads_the_later_step(config):
    """As the replay of a CUDA graph does: Python of the later step is not seen, its buffers are."""
    builder = make_builder(config)
    captured = builder.build_for_cudagraph_capture(batch(config, [0] * 3, [0] * 3, [1] * 3))
    torch.manual_seed(0)
    cache = torch.randn((BLOCKS, SIZE, HEADS, DIM)), torch.randn((BLOCKS, SIZE, HEADS, DIM))
    for computed in ([130, 20], [131, 21], [200, 22]):
        told = batch(config, [100, 40], computed, [1, 1], padding=1)
        metadata = builder.build(0, told)
        assert metadata.block_table.data_ptr() == captured.block_table.data_ptr()
        assert metadata.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
        assert metadata.block_table.stride() == captured.block_table.stride()
        queries = torch.randn((2, 2 * HEADS, DIM))
        got, wanted = torch.zeros((2, *queries.shape))
        replayed = flash_reference.attend(
            *(queries, *cache, got, told.query_start_loc),
            *(captured.seq_lens, LONGEST, captured.block_table, 0.3),
        )
        freed = SETTINGS.skipped_blocks(0, 100, SIZE)
        table = told.block_table_tensor.clone()
        table[0] = table[0].roll(-freed)
        lengths = told.seq_lens - torch.tensor([freed * SIZE, 0, 0]).int()
        flash_reference.attend(
            *(queries, *cache, wanted, told.query_start_loc),
            *(lengths, LONGEST, table, 0.3),
        )
        assert torch.equal(replayed, wanted)


def test_the_kernels_plan_is_made_for_what_is_shown(config, monkeypatch):
    planned = []

    def plan(**given):
        planned.append((given["cache_seqlens"].tolist(), given["max_seqlen_k"]))
        return flash_reference.plan_ahead(**given)

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", plan)
    builder = make_builder(config)
    first = builder.build(0, batch(config, [100, 100], [130, 140], [1, 1]))
    second = builder.build(0, batch(config, [100, 100], [131, 141], [1, 1]))
    assert planned == [([83, 93], 93), ([84, 94], 94)]
    assert first.scheduler_metadata.data_ptr() == second.scheduler_metadata.data_ptr()


def test_a_step_is_looked_at_once_for_all_groups(config, monkeypatch):
    looked, rows_of = [], running.rows_of

    def counting(*given):
        looked.append(given)
        return rows_of(*given)

    monkeypatch.setattr(running, "rows_of", counting)
    builders = [make_builder(config, group) for group in range(2)]
    for step in range(3):
        told = batch(config, [100, 100], [130 + step, 90], [1, 10 if step == 0 else 0])
        for builder in builders:
            builder.build(0, told)
            builder._compaction = None
    assert len(looked) == 3


def forward(impl, metadata, cache, tokens):
    query = torch.randn((tokens, 2 * HEADS, DIM))
    key, value = torch.randn((2, tokens, HEADS, DIM))
    scale = torch.ones(1)
    layer = SimpleNamespace(_q_scale=scale, _k_scale=scale, _v_scale=scale)
    return impl.forward(layer, query, key, value, cache, metadata, torch.empty_like(query))


def make_impl(config):
    impl = gpu.CompressedGPUImpl(2 * HEADS, DIM, 0.3, HEADS, None, None, "auto")
    impl._config = config
    return impl


def test_prompts_that_end_are_compressed_by_every_layer_or_the_next_step_refuses(config):
    builder, impl = make_builder(config), make_impl(config)
    cache = torch.randn((BLOCKS, HEADS, SIZE, 2 * DIM))
    metadata = builder.build(0, batch(config, [100], [90], [10]))
    before = cache.clone()
    forward(impl, metadata, cache, 10)
    assert torch.equal(cache, before)
    forward(impl, metadata, cache, 10)  # the second of two layers, which choose together
    assert not torch.equal(cache, before)
    told = batch(config, [100], [100], [1])
    builder.build(0, told)
    builder.build(0, batch(config, [100], [90], [10]))
    for again in (builder.build_for_cudagraph_capture, lambda told: builder.build(0, told)):
        with pytest.raises(ServingError, match="2 layers did not compress a prompt, because its"):
            again(told)


def test_what_a_long_prompt_takes_is_tried_while_memory_is_measured(config, monkeypatch):
    scored, chosen = [], []
    score, select = gpu.score_prompt, Options.select

    def noting(keys, values, queries, *rest):
        scored.append((tuple(keys.shape), tuple(values.shape), tuple(queries.shape)))
        return score(keys, values, queries, *rest)

    def choosing(options, scores, count):
        chosen.append((scores.nbytes, tuple(scores.shape[1:]), count))
        return select(options, scores, count)

    monkeypatch.setattr(gpu, "score_prompt", noting)
    monkeypatch.setattr(Options, "select", choosing)
    impl = make_impl(config)
    for _ in range(3):
        assert forward(impl, None, torch.empty(0), 10).eq(0).all()
    shape = (1, HEADS, LONGEST, DIM)
    assert scored == [(shape, shape, (4, 2 * HEADS, DIM))]
    ((held, of_layer, count),) = chosen
    assert (of_layer, count) == ((HEADS, LONGEST), SETTINGS.kept(LONGEST, SIZE)[0])
    together, one = gpu.CHOSEN_TOGETHER_BYTES, 4 * HEADS * LONGEST
    assert together <= held < together + one
