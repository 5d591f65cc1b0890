"""Attention over dense and ragged caches against one masked softmax in float32."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import prompt_ids, tiny_model

import pyramidkv
from pyramidkv import attention, decode_attention
from pyramidkv.decode_attention import attend, attend_ragged, attend_reference
from pyramidkv.head_selection import HeadSelection, select_adaptive
from pyramidkv.ragged import RaggedStorage
from pyramidkv.ragged_tiles import RaggedTiles
from pyramidkv.selection import Pooling

LENGTHS = [0, 1, 2, 5, 31, 64, 100, 700]


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    if result.dtype == torch.float32:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    else:
        error = (result.float() - expected.float()).norm()
        assert error <= 2e-2 * expected.float().norm()


def random_states(draw: st.DrawFn, *shape: int, dtype: torch.dtype, spread: float = 1):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return (torch.randn(shape, generator=generator) * spread).to(dtype)


@st.composite
def settings_of_a_model(draw: st.DrawFn):
    """Batch, KV heads, group, new tokens, head size, dtype, spread of the queries, softcap."""
    return (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 8)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([64, 80, 128, 256])),
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        draw(st.sampled_from([0.1, 1, 5])),
        draw(st.sampled_from([None, 2.0, 50.0])),
    )


def ragged(lengths: list[list[int]], size: int, dtype: torch.dtype, draw: st.DrawFn):
    """Return a storage whose heads have these lengths, and nothing in its tail."""
    batch, heads, columns = len(lengths), len(lengths[0]), max(max(row) for row in lengths)
    keys, values = (random_states(draw, batch, heads, columns, size, dtype=dtype) for _ in range(2))
    rows = [
        HeadSelection(
            torch.cat([torch.randperm(columns)[:n].sort().values for n in row])[None],
            torch.tensor([row]),
        )
        for row in lengths
    ]
    return RaggedStorage.gather(keys, values, rows, [columns] * batch)


@settings(deadline=None, max_examples=60)
@given(settings_of_a_model(), st.data())
def test_a_dense_cache_equals_the_reference(model, data):
    batch, kv_heads, group, new, size, dtype, spread, softcap = model
    rows = new + data.draw(st.sampled_from(LENGTHS))
    storage = [
        random_states(data.draw, batch, kv_heads, rows + 7, size, dtype=dtype)[:, :, :rows]
        for _ in range(2)
    ]
    queries = random_states(
        data.draw, batch, kv_heads * group, new, size, dtype=dtype, spread=spread
    )
    visible = None
    match data.draw(st.sampled_from(["all", "by row", "by head"])):
        case "by row":
            visible = random_states(data.draw, batch, rows, dtype=dtype) > 0
        case "by head":
            visible = random_states(data.draw, batch, kv_heads, rows, dtype=dtype) > 0
    arguments = (queries, *storage, size**-0.5, softcap, visible)
    close(attend(*arguments), attend_reference(*arguments))


@settings(deadline=None, max_examples=60)
@given(settings_of_a_model(), st.data())
def test_a_ragged_cache_equals_the_reference_on_its_dense_form(model, data):
    batch, kv_heads, group, new, size, dtype, spread, softcap = model
    row = st.lists(st.sampled_from(LENGTHS), min_size=kv_heads, max_size=kv_heads)
    lengths = data.draw(st.lists(row, min_size=batch, max_size=batch))
    storage = ragged(lengths, size, dtype, data.draw)
    earlier = data.draw(st.sampled_from([0, 0, 1, 70]))
    for count in filter(None, (earlier, new)):
        states = (
            random_states(data.draw, batch, kv_heads, count, size, dtype=dtype) for _ in range(2)
        )
        storage.append(*states)
        if data.draw(st.booleans()):
            real = st.lists(st.integers(0, count), min_size=batch, max_size=batch)
            storage.mark_padding(count, data.draw(real))
    queries = random_states(
        data.draw, batch, kv_heads * group, new, size, dtype=dtype, spread=spread
    )
    result = attend_ragged(queries, storage, size**-0.5, softcap)
    keys, values, visible = storage.dense()
    close(result, attend_reference(queries, keys, values, size**-0.5, softcap, visible))


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 63, 64, 65, 200, 1000, 4096]), min_size=1, max_size=20)
)
def test_each_row_of_a_segment_is_in_one_tile_or_window_of_it(lengths):
    bounds = [0, *accumulate(lengths)]
    assume(bounds[-1])
    tiles = RaggedTiles.over(bounds, torch.device("cpu"))
    flat = torch.arange(bounds[-1])[:, None]
    _, of_tiles, of_windows = tiles.owners.split(tiles.sizes)
    shown = torch.cat(
        [
            (tiles.shared == 0).expand(-1, 1, tiles.rows),
            (tiles.hidden == 0)[:, 0],
        ]
    )
    places = torch.cat([tiles.tiles_of(flat), tiles.windows_of(flat)])[..., 0]
    owners = torch.cat([of_tiles, of_windows])
    for segment, (start, end) in enumerate(pairwise(bounds)):
        own = owners == segment
        assert places[own][shown[own]].sort().values.tolist() == list(range(start, end))
    assert tiles.owners[: len(lengths)].tolist() == list(range(len(lengths)))
    assert len(of_windows) <= 2 * len(lengths)


def test_a_ragged_cache_is_read_in_as_many_calls_however_many_heads_it_has(monkeypatch):
    calls = []
    attend_once = decode_attention._attend
    monkeypatch.setattr(
        decode_attention, "_attend", lambda *given: (calls.append(given[1]), attend_once(*given))[1]
    )
    draw = _seeded()
    for heads in (5, 8):
        calls.clear()
        storage = ragged([[700] * heads], 64, torch.float32, draw)
        storage.append(*(torch.randn(1, heads, 1, 64) for _ in range(2)))
        attend_ragged(torch.randn(1, heads, 1, 64), storage, 0.2)
        assert len(calls) == 3  # the tail, the whole tiles, and what they leave
        assert calls[1].untyped_storage().data_ptr() == storage.keys.untyped_storage().data_ptr()
        assert calls[2].numel() <= storage.keys.numel() / 2


@pytest.mark.parametrize("threads", [8, 13])
@pytest.mark.parametrize("rows", [16, 17, 51])
def test_few_heads_of_a_dense_cache_are_split_over_threads(monkeypatch, threads, rows):
    monkeypatch.setattr(decode_attention, "SPLIT_ROWS", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    taken = []
    whole = decode_attention._attend
    monkeypatch.setattr(
        decode_attention, "_attend", lambda *given: (taken.append(given[1]), whole(*given))[1]
    )
    room = torch.randn(2, 2, 2, 80, 64)  # heads do not lie one behind the other
    keys, values = room[:, :, :, :rows]
    queries = torch.randn(2, 6, 1, 64)
    result = attend(queries, keys, values, 0.2)
    close(result, attend_reference(queries, keys, values, 0.2))
    pieces = min(threads // 4, rows // 4)
    assert taken[0].shape == (pieces, 2, rows // pieces, 64)
    assert taken[0].data_ptr() == keys.data_ptr()  # a view


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_few_keys_at_once_make_no_difference(monkeypatch, softcap):
    monkeypatch.setattr(decode_attention, "workspace_bytes", lambda device: 4 * 2 * 64 * 7)
    monkeypatch.setattr(decode_attention, "has_kernel", lambda *states: False)
    keys, values, queries = (
        torch.randn(1, 2, 50, 64),
        torch.randn(1, 2, 50, 64),
        torch.randn(1, 4, 3, 64),
    )
    visible = torch.ones(1, 50, dtype=torch.bool)
    visible[:, :20] = False  # some blocks have nothing to see
    arguments = (queries, keys, values, 0.125, softcap, visible)
    close(attend(*arguments), attend_reference(*arguments))


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_logits_beyond_what_float32_can_exponentiate_are_merged(softcap):
    storage = ragged([[40, 2]], 64, torch.float32, _seeded())
    storage.append(*(torch.randn(1, 2, 1, 64) for _ in range(2)))
    queries = 200 * torch.randn(1, 4, 1, 64)
    keys, values, visible = storage.dense()
    result = attend_ragged(queries, storage, 1.0, softcap)
    assert result.isfinite().all()
    close(result, attend_reference(queries, keys, values, 1.0, softcap, visible))


def test_logits_of_a_bfloat16_cache_are_not_rounded_to_it():
    """Logits near 20 would be rounded to eighths, and weights by several percent."""
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = (
        torch.randn(1, 1, n, 128, generator=generator).bfloat16() for n in (4000, 4000, 8)
    )
    result = attend(queries.transpose(1, 2), keys, values, 0.5)
    expected = attend_reference(queries.transpose(1, 2).float(), keys.float(), values.float(), 0.5)
    rounded = ((queries[0, 0] * 0.5) @ keys[0, 0].T).float().softmax(-1) @ values[0, 0].float()
    error = (result.float() - expected).norm() / expected.norm()
    rounded_error = (rounded[None, :, None] - expected).norm() / expected.norm()
    assert error < 5e-3
    assert rounded_error > 1e-2


def test_a_query_that_sees_nothing_gets_zeros():
    storage = ragged([[0, 0]], 64, torch.float32, _seeded())
    storage.append(*(torch.randn(1, 2, 2, 64) for _ in range(2)))
    storage.mark_padding(2, [1])
    result = attend_ragged(torch.randn(1, 2, 2, 64), storage, 1.0)
    assert not result[:, :, 0].any()
    torch.testing.assert_close(result[0, :, 1], storage.tail.values[0, :, 1])


def test_a_query_that_sees_nothing_of_the_tail_sees_the_prompt():
    storage = ragged([[5, 0]], 64, torch.float32, _seeded())
    storage.append(*(torch.randn(1, 2, 2, 64) for _ in range(2)))
    storage.mark_padding(2, [0])
    queries = torch.randn(1, 2, 2, 64)
    result = attend_ragged(queries, storage, 0.1)
    expected = (queries[0, 0] @ storage.keys.T * 0.1).softmax(-1) @ storage.values
    torch.testing.assert_close(result[0, 0], expected)
    assert not result[0, 1].any()


def test_what_heads_compete_for_is_what_is_attended_to():
    """Left-padded rows, chosen, stored and read, against a mask on the states as they came."""
    torch.manual_seed(1)
    lengths, columns, new = [40, 25], 40, 2
    keys, values = torch.randn(2, 2, 3, columns + new, 64)
    selections, visible = [], torch.zeros(2, 3, columns + new, dtype=torch.bool)
    visible[:, :, columns:] = True
    for row, length in enumerate(lengths):
        scores = torch.rand(1, 3, length) ** torch.tensor([1, 2, 8])[:, None]
        chosen = select_adaptive(scores, length, 1, 2, Pooling("max", 3), 0.2)
        selections.append(chosen)
        visible[row, chosen.heads[0], chosen.indices[0] + columns - length] = True
    assert selections[0].counts.min() < selections[0].counts.max()
    prompt = slice(0, columns)
    storage = RaggedStorage.gather(keys[:, :, prompt], values[:, :, prompt], selections, lengths)
    storage.append(keys[:, :, columns:], values[:, :, columns:])
    queries = torch.randn(2, 12, new, 64)
    expected = attend_reference(queries, keys, values, 0.125, None, visible)
    close(attend_ragged(queries, storage, 0.125), expected)


def test_more_queries_than_rows_that_follow_are_refused():
    storage = ragged([[4]], 64, torch.float32, _seeded())
    storage.append(*(torch.randn(1, 1, 1, 64) for _ in range(2)))
    with pytest.raises(ValueError, match="2 queries were given, but only 1 rows follow"):
        attend_ragged(torch.randn(1, 1, 2, 64), storage, 1.0)


def _seeded():
    """Return something that draws the same seed each time, for tests without hypothesis."""
    torch.manual_seed(0)
    return lambda strategy: 7


@pytest.mark.parametrize(("implementation", "of_step"), [("sdpa", 0), ("eager", 4)])
def test_few_new_tokens_are_attended_to_here_with_sdpa(monkeypatch, implementation, of_step):
    model = tiny_model("llama", implementation)
    asked = []
    base = attention._base_function
    monkeypatch.setattr(attention, "_base_function", lambda *of: (asked.append(of), base(*of))[1])
    cache = pyramidkv.CompressedCache(model, "pyramidkv", 20, window_size=6, kernel_size=5)
    for tokens, calls in ((60, 4), (1, of_step), (8, of_step), (9, 4), (1, of_step)):
        asked.clear()
        with torch.no_grad():
            model(prompt_ids(tokens)[0], past_key_values=cache)
        assert len(asked) == calls
