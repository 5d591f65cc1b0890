"""Counts per head: totals exact, floors kept, ties always the same way, no device waited for."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyramidkv.head_selection import (
    GlobalSelection,
    HeadSelection,
    in_order,
    select_adaptive,
    select_by_table,
    select_first,
)
from pyramidkv.selection import Pooling, order, select

EXTREMES = [-math.inf, -1.0, -0.0, 0.0, 1e-45, 2e-45, 1.0, 3.4e38, math.inf]


@st.composite
def scored(draw: st.DrawFn, layers: int = 1):
    """Scores `[layers, batch, kv_heads, tokens]` and how to choose from them."""
    tokens, heads, batch = (
        draw(st.integers(1, 24)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
    )
    sinks, window = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    kind = draw(st.sampled_from(["few", "many", "extreme"]))
    if kind == "extreme":  # an average of infinities is no number
        values, pooling = st.sampled_from(EXTREMES), Pooling("max", draw(st.sampled_from([1, 5])))
    else:
        values = st.integers(0, 2 if kind == "few" else 1000).map(float)
        name, size = draw(st.sampled_from(["max", "avg"])), draw(st.sampled_from([1, 3, 7]))
        pooling = Pooling(name, size)
    count = layers * batch * heads * tokens
    drawn = draw(st.lists(values, min_size=count, max_size=count))
    scores = torch.tensor(drawn).view(layers, batch, heads, tokens)
    floor = draw(st.sampled_from([0, 0.2, 0.5, 0.7, 1]))
    least = max(1, layers * heads * min(sinks + window, tokens))
    total = draw(st.integers(least, layers * heads * tokens + 3))
    return scores, total, sinks, window, pooling, floor


def chosen_by_hand(scores, total, sinks, window, pooling, floor) -> list[list[int]]:
    """Choose by sorting, from scores `[heads, tokens]`: the positions each head keeps."""
    heads, tokens = scores.shape
    if sinks + window >= tokens:
        return [list(range(tokens))] * heads
    spare = min(total, heads * tokens) - heads * (sinks + window)
    own = scores[:, sinks : tokens - window]
    pooled = pooling(own[None])[0].tolist()
    places = [
        (pooled[head][i], own[head, i].item(), i + sinks, -head)
        for head in range(heads)
        for i in range(tokens - sinks - window)
    ]
    kept: set[tuple[int, int]] = set()
    for head in range(heads):
        certain = math.floor(Fraction(str(floor)) * spare / heads)
        mine = sorted((place for place in places if place[3] == -head), reverse=True)
        kept |= {(head, place[2]) for place in mine[:certain]}
    for _, _, position, head in sorted(places, reverse=True):
        if len(kept) < spare:
            kept.add((-head, position))
    always = [*range(sinks), *range(tokens - window, tokens)]
    return [sorted([*always, *(p for h, p in kept if h == head)]) for head in range(heads)]


def by_head(selection: HeadSelection, row: int = 0) -> list[list[int]]:
    counts = selection.counts[row].tolist()
    return [part.tolist() for part in selection.indices[row].split(counts)]


@given(scored())
def test_adaptive_counts_are_those_of_sorting_all_heads_by_hand(case):
    scores, total, *rest = case
    batch, heads, tokens = scores[0].shape
    chosen = select_adaptive(scores[0], total, *rest)
    assert chosen.indices.dtype == chosen.counts.dtype == torch.int64
    assert chosen.indices.shape == (batch, chosen.total)
    assert chosen.total == min(total, heads * tokens)
    assert chosen.counts.sum(-1).tolist() == [chosen.total] * batch
    for row in range(batch):
        assert by_head(chosen, row) == chosen_by_hand(scores[0, row], total, *rest)


@given(scored())
def test_each_head_keeps_the_beginning_of_its_order_and_at_least_its_floor(case):
    scores, total, sinks, window, pooling, floor = case
    chosen = select_adaptive(scores[0], total, sinks, window, pooling, floor)
    batch, heads, tokens = scores[0].shape
    best = order(scores[0], sinks, window, pooling)
    protected = min(sinks + window, tokens)
    share = (min(total, heads * tokens) / heads - protected) * floor
    for row in range(batch):
        for head, kept in enumerate(by_head(chosen, row)):
            assert kept == sorted(best[row, head, : len(kept)].tolist())
            assert len(kept) >= protected + math.floor(share + 1e-9)
    again = select_first(in_order(best), chosen.counts, chosen.total)
    assert torch.equal(again.indices, chosen.indices)
    assert torch.equal(again.counts, chosen.counts)


@given(scored(), st.integers(1, 30))
def test_a_full_floor_gives_each_head_what_selection_gives_it(case, budget):
    scores, _, sinks, window, pooling, _ = case
    batch, heads, tokens = scores[0].shape
    budget = max(budget, min(sinks + window, tokens))
    chosen = select_adaptive(scores[0], heads * budget, sinks, window, pooling, 1)
    expected = select(scores[0], budget, sinks, window, pooling)
    assert torch.equal(chosen.indices, expected.reshape(batch, -1))
    assert chosen.counts.tolist() == [[expected.shape[-1]] * heads] * batch


@given(scored())
def test_rows_of_a_batch_do_not_see_each_other(case):
    scores, *rest = case
    together = select_adaptive(scores[0], *rest)
    for row in range(scores.shape[1]):
        alone = select_adaptive(scores[0, row : row + 1], *rest)
        assert torch.equal(together.indices[row], alone.indices[0])
        assert torch.equal(together.counts[row], alone.counts[0])


@given(scored(), st.data())
def test_a_table_gives_each_head_what_selection_gives_it(case, data):
    scores, _, sinks, window, pooling, _ = case
    batch, heads, tokens = scores[0].shape
    least = max(1, min(sinks + window, tokens))
    table = data.draw(st.lists(st.integers(least, 30), min_size=heads, max_size=heads))
    chosen = select_by_table(scores[0], table, sinks, window, pooling)
    assert chosen.total == sum(min(count, tokens) for count in table)
    for row in range(batch):
        expected = [
            select(scores[0, row : row + 1, i : i + 1], count, sinks, window, pooling)[
                0, 0
            ].tolist()
            for i, count in enumerate(table)
        ]
        assert by_head(chosen, row) == expected
        assert chosen.counts[row].tolist() == [len(kept) for kept in expected]


@given(scored())
def test_each_index_names_its_head(case):
    chosen = select_adaptive(case[0][0], *case[1:])
    for row, counts in enumerate(chosen.counts.tolist()):
        expected = [head for head, count in enumerate(counts) for _ in range(count)]
        assert chosen.heads[row].tolist() == expected


@given(st.data())
def test_choosing_layer_by_layer_equals_choosing_at_once(data):
    layers = data.draw(st.integers(1, 4))
    scores, total, *rest = data.draw(scored(layers))
    scores = scores[:, :1]
    _, _, heads, tokens = scores.shape
    selection = GlobalSelection(layers, heads, tokens, total, *rest)
    kept = min(total, layers * heads * tokens)
    spare = kept / layers / heads - min(sum(rest[:2]), tokens)
    least = min(sum(rest[:2]), tokens) + math.floor(rest[3] * spare + 1e-9)
    held = torch.zeros(0, heads, dtype=torch.int64)
    for layer in range(layers):
        selection.add(scores[layer])
        counts = selection.counts()
        assert counts.shape == (layer + 1, heads)
        assert selection.held == counts.sum()
        assert selection.held + (layers - layer - 1) * heads * least <= kept
        assert counts.min() >= least
        assert bool((counts[:layer] <= held).all())  # what is gone is never asked for again
        held = counts
    expected = chosen_by_hand(scores.reshape(layers * heads, tokens), total, *rest)
    assert selection.held == kept
    assert held.flatten().tolist() == [len(head) for head in expected]
    best = order(scores[:, 0], *rest[:3])
    for layer in range(layers):
        mine = select_first(
            in_order(best[layer : layer + 1]), held[layer : layer + 1], int(held[layer].sum())
        )
        assert by_head(mine) == expected[layer * heads : (layer + 1) * heads]


@given(scored())
def test_one_layer_alone_shares_as_its_heads_do(case):
    scores, total, *rest = case
    _, _, heads, tokens = scores.shape
    selection = GlobalSelection(1, heads, tokens, total, *rest)
    selection.add(scores[0, :1])
    assert torch.equal(selection.counts(), select_adaptive(scores[0, :1], total, *rest).counts)


def test_a_head_that_is_better_takes_what_is_beyond_the_floors():
    scores = torch.zeros(1, 2, 100)
    scores[0, 1] = 1.0
    chosen = select_adaptive(scores, 40, 2, 3, Pooling(), 0.2)  # 15 each beyond sinks and window
    assert chosen.counts.tolist() == [[5 + 3, 5 + 27]]


def test_equal_scores_keep_the_latest_tokens_and_then_the_lower_head():
    chosen = select_adaptive(torch.zeros(1, 3, 10), 8, 0, 0, Pooling(), 0)
    assert by_head(chosen) == [[7, 8, 9], [7, 8, 9], [8, 9]]


def test_floors_are_read_as_the_decimals_that_were_written():
    scores = torch.zeros(1, 2, 100)
    scores[0, 1] = 1.0
    chosen = select_adaptive(scores, 20, 0, 0, Pooling(), 0.7)
    assert chosen.counts.tolist() == [[7, 13]]


def test_sizes_follow_from_the_arguments_alone():
    """On the meta device there are no numbers: whatever needed one on the host would fail."""
    scores = torch.empty(2, 4, 50, device="meta")
    adaptive = select_adaptive(scores, 80, 2, 4, Pooling("max", 5), 0.2)
    table = select_by_table(scores, [10, 20, 30, 60], 2, 4, Pooling("max", 5))
    for chosen, total in ((adaptive, 80), (table, 110)):
        assert chosen.indices.shape == chosen.heads.shape == (2, total)
        assert chosen.counts.shape == (2, 4)
    selection = GlobalSelection(3, 4, 50, 300, 2, 4, Pooling("max", 5), 0.2)
    for layer in range(3):
        selection.add(scores[:1])
        assert selection.counts().shape == (layer + 1, 4)


def test_impossible_requests_are_refused():
    scores = torch.zeros(1, 2, 20)
    with pytest.raises(ValueError, match="cannot keep 9 of 2 x 20 tokens: 2 sinks and a window of"):
        select_adaptive(scores, 9, 2, 3, Pooling(), 0.2)
    with pytest.raises(ValueError, match="at least 1 token"):
        select_adaptive(scores, 0, 0, 0, Pooling(), 0.2)
    with pytest.raises(ValueError, match="floor of the heads is 1.5"):
        select_adaptive(scores, 20, 2, 3, Pooling(), 1.5)
    with pytest.raises(ValueError, match="3 counts, but there are 2 KV heads"):
        select_by_table(scores, [5, 6, 7], 2, 3, Pooling())
    with pytest.raises(ValueError, match="give every head at least 5"):
        select_by_table(scores, [5, 4], 2, 3, Pooling())
    selection = GlobalSelection(1, 2, 20, 20, 2, 3, Pooling(), 0.2)
    with pytest.raises(ValueError, match=r"\[1, 2, 19\] came as layer 0"):
        selection.add(scores[..., :19])
    selection.add(scores)
    with pytest.raises(ValueError, match="came as layer 1; the selection is for 1 layers"):
        selection.add(scores)
