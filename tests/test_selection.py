"""Selection: exact counts, sinks and window inside, ties always the same way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import choose
from torch.nn import functional

from pyramidkv.method_options import Options
from pyramidkv.selection import Pooling, order, select


@st.composite
def cases(draw: st.DrawFn):
    tokens = draw(st.integers(1, 40))
    sinks, window = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    budget = draw(st.integers(max(1, min(sinks + window, tokens)), 45))
    pooling = Pooling(draw(st.sampled_from(["max", "avg"])), draw(st.sampled_from([1, 3, 5, 11])))
    # few distinct values, so that ties are common
    values = st.integers(0, draw(st.sampled_from([0, 2, 1000]))).map(float)
    rows = draw(st.lists(values, min_size=2 * tokens, max_size=2 * tokens))
    return torch.tensor(rows).view(1, 2, tokens), budget, sinks, window, pooling


@given(cases())
def test_selection_is_the_same_as_sorting_by_hand(case):
    scores, budget, sinks, window, pooling = case
    tokens = scores.shape[-1]
    chosen = select(scores, budget, sinks, window, pooling)
    assert chosen.shape == (1, 2, min(budget, tokens))
    assert chosen.dtype == torch.int64
    options = Options(
        window_size=window,
        sink_tokens=sinks,
        pooling=pooling.kind,
        kernel_size=pooling.kernel_size,
    )
    for head in range(2):
        if budget >= tokens:
            expected = list(range(tokens))
        else:
            row = scores[0, head]
            expected = choose("h2o", options, row[None].double(), row[:, None], budget)
        assert chosen[0, head].tolist() == expected


@given(cases())
def test_sinks_and_window_always_stay_and_no_index_comes_twice(case):
    scores, budget, sinks, window, pooling = case
    tokens = scores.shape[-1]
    for row in select(scores, budget, sinks, window, pooling)[0].tolist():
        assert row == sorted(set(row))
        assert set(range(min(sinks, tokens))) <= set(row)
        assert set(range(max(0, tokens - window), tokens)) <= set(row)


@given(cases())
def test_the_first_of_the_order_are_those_that_are_selected(case):
    scores, _, sinks, window, pooling = case
    tokens = scores.shape[-1]
    best = order(scores, sinks, window, pooling)
    assert best.sort(dim=-1).values.tolist() == [[list(range(tokens))] * 2]
    for budget in range(max(1, min(sinks + window, tokens)), tokens + 1):
        chosen = select(scores, budget, sinks, window, pooling)
        assert torch.equal(best[..., :budget].sort(dim=-1).values, chosen)


def test_constant_scores_keep_sinks_window_and_the_latest_tokens():
    chosen = select(torch.zeros(1, 1, 20), 8, 2, 3, Pooling("max", 5))
    assert chosen.flatten().tolist() == [0, 1, 14, 15, 16, 17, 18, 19]


def test_window_zero_protects_nothing():
    scores = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0]]])
    assert select(scores, 2, 0, 0, Pooling()).flatten().tolist() == [0, 1]


def test_a_pooled_peak_keeps_its_centre_when_its_flanks_do_not_fit():
    scores = torch.zeros(1, 1, 30)
    scores[..., 10] = 1.0
    assert 10 in select(scores, 2, 0, 0, Pooling("max", 7)).flatten().tolist()


def test_a_sinks_large_score_does_not_spread_to_its_neighbours():
    scores = torch.zeros(1, 1, 40)
    scores[..., 0] = 100.0
    scores[..., 25] = 1.0
    assert select(scores, 7, 1, 1, Pooling("max", 5)).flatten().tolist() == [
        0,
        *range(23, 28),
        39,
    ]


def test_negative_and_infinite_scores_are_ordered():
    scores = torch.tensor([[[-1.0, float("-inf"), -0.0, 0.0, -2.0, float("inf")]]])
    assert select(scores, 3, 0, 0, Pooling()).flatten().tolist() == [2, 3, 5]


@pytest.mark.parametrize("kernel", [1, 3, 7, 31])
def test_average_pooling_counts_only_real_neighbours(kernel):
    scores = torch.rand(2, 3, 20)
    pooled = Pooling("avg", kernel)(scores)
    ones = functional.avg_pool1d(torch.ones_like(scores), kernel, 1, kernel // 2)
    zero_padded = functional.avg_pool1d(scores, kernel, 1, kernel // 2)
    torch.testing.assert_close(pooled, zero_padded / ones)


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="always kept"):
        select(torch.zeros(1, 1, 20), 4, 2, 3, Pooling())
    with pytest.raises(ValueError, match="odd number"):
        Pooling("max", 4)
    with pytest.raises(ValueError, match="'max' or 'avg'"):
        Pooling("median", 3)
