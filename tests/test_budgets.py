"""Schedules: exact sums, bounds, monotone, for every allocation."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyramidkv.budgets import (
    BudgetError,
    Entropy,
    Explicit,
    OfficialPyramid,
    Power,
    Pyramid,
    Uniform,
    apportion,
    budget_from_ratio,
)

layer_counts = st.integers(1, 128)
prompts = st.one_of(st.integers(1, 300), st.integers(1, 200_000))
betas = st.one_of(st.integers(1, 50), st.floats(1, 50))


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Draw layers, budget, prompt length and protected tokens."""
    protected = draw(st.integers(0, 80))
    budget = draw(st.one_of(st.integers(1, 4000), st.integers(1, 300_000)))
    return draw(layer_counts), max(budget, protected), draw(prompts), protected


def check(schedule: list[int], layers: int, budget: int, prompt: int, protected: int) -> None:
    assert len(schedule) == layers
    assert sum(schedule) == layers * min(budget, prompt)
    assert all(min(protected, prompt) <= kept <= prompt for kept in schedule)
    assert all(type(kept) is int for kept in schedule)
    assert schedule == sorted(schedule, reverse=True)


@given(cases(), betas)
def test_pyramid_is_exact_bounded_and_monotone(case, beta):
    check(Pyramid(beta).schedule(*case), *case)


@given(cases())
def test_uniform_is_exact_and_equal(case):
    schedule = Uniform().schedule(*case)
    check(schedule, *case)
    assert len(set(schedule)) == 1


@given(cases(), st.floats(0.05, 8))
def test_power_is_exact_bounded_and_monotone(case, gamma):
    check(Power(gamma).schedule(*case), *case)


@given(cases(), st.floats(0.05, 8), st.integers(0, 2000), st.integers(0, 2000))
def test_power_with_given_ends_is_exact(case, gamma, above, spread):
    layers, budget, prompt, protected = case
    c_min = protected + above
    power = Power(gamma, c_max=c_min + spread + 1, c_min=c_min)
    check(power.schedule(layers, budget, prompt, protected), layers, budget, prompt, protected)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), prompts, st.data())
def test_an_explicit_list_keeps_its_total_where_the_prompt_allows(budgets, prompt, data):
    protected = data.draw(st.integers(0, min(budgets)))
    schedule = Explicit(tuple(budgets)).schedule(len(budgets), 0, prompt, protected)
    assert sum(schedule) == min(sum(budgets), len(budgets) * prompt)
    assert all(min(protected, prompt) <= kept <= prompt for kept in schedule)
    if max(budgets) <= prompt:
        assert schedule == budgets


effective = st.one_of(st.floats(1, 100_000), st.floats(1e-300, 1e300))


@given(cases(), st.data(), st.floats(0.01, 100), st.floats(0, 1))
def test_entropy_is_exact_bounded_and_in_the_order_measured(case, data, temperature, floor):
    layers, budget, prompt, protected = case
    measured = data.draw(st.lists(effective, min_size=layers, max_size=layers))
    schedule = Entropy(tuple(measured), temperature, floor).schedule(*case)
    assert sum(schedule) == layers * min(budget, prompt)
    assert all(min(protected, prompt) <= kept <= prompt for kept in schedule)
    in_order = [schedule[i] for i in sorted(range(layers), key=lambda i: (-measured[i], i))]
    assert all(a >= b - 1 for a, b in pairwise(in_order))  # 1: rounding, for equal shares


def test_entropy_shares_are_proportional_above_the_floor_and_the_protected_tokens():
    # 4 layers, 100 above the protected on average, in proportion 8 : 4 : 2 : 2
    assert Entropy((800, 400, 200, 200), floor=0).schedule(4, 110, 5000, 10) == [210, 110, 60, 60]
    # a floor of 1/2: half of it in equal parts, half in proportion
    half = Entropy((800, 400, 200, 200), floor=0.5).schedule(4, 110, 5000, 10)
    assert half == [160, 110, 85, 85]
    # temperature 2: in proportion to the square roots
    roots = Entropy((1600, 400, 100, 100), 2, 0).schedule(4, 80, 5000, 0)
    assert roots == [160, 80, 40, 40]
    assert Entropy((5, 5, 5)).schedule(3, 64, 5000, 8) == [64, 64, 64]
    assert Entropy((1, 50, 3), floor=1).schedule(3, 64, 5000, 8) == [64, 64, 64]
    # what one layer cannot hold goes to the others in proportion
    assert Entropy((100, 2, 1), floor=0).schedule(3, 50, 60, 0) == [60, 60, 30]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((),), "one per layer"),
        (((1.0, 0.0),), "positive finite"),
        (((1.0, -2.0),), "positive finite"),
        (((1.0, float("nan")),), "positive finite"),
        (((1.0, float("inf")),), "positive finite"),
        (((1.0,), 0.0), "positive finite number"),
        (((1.0,), float("nan")), "positive finite number"),
        (((1.0,), 1.0, -0.1), "from 0 to 1"),
        (((1.0,), 1.0, 1.1), "from 0 to 1"),
    ],
)
def test_entropy_refuses_what_is_no_measurement(arguments, words):
    with pytest.raises(ValueError, match=words):
        Entropy(*arguments)


def test_entropy_of_another_number_of_layers_is_refused():
    with pytest.raises(BudgetError, match="entropies of 3 layers were given, but 4 layers"):
        Entropy((1, 2, 3)).schedule(4, 100, 1000, 0)


@given(st.data(), st.integers(1, 40), st.integers(0, 30))
def test_apportion_heeds_each_ceiling(data, count, floor):
    weights = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    rooms = data.draw(st.lists(st.integers(0, 60), min_size=count, max_size=count))
    ceilings = [floor + room for room in rooms]
    total = data.draw(st.integers(count * floor, sum(ceilings)))
    result = apportion([Fraction(w) for w in weights], total, floor, ceilings)
    assert sum(result) == total
    assert all(floor <= x <= most for x, most in zip(result, ceilings, strict=True))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 30), st.integers(0, 60)
)
def test_apportion_gives_each_its_share_within_one_token(weights, floor, room):
    ceiling = floor + room
    total = len(weights) * floor + len(weights) * room // 2
    result = apportion([Fraction(w) for w in weights], total, floor, ceiling)
    assert sum(result) == total
    assert all(floor <= x <= ceiling for x in result)
    open_ones = [i for i, x in enumerate(result) if x < ceiling and weights[i]]
    for i in open_ones:
        for j in open_ones:
            share = Fraction((result[i] - floor) * weights[j], weights[i])
            assert abs(share - (result[j] - floor)) <= 1 + Fraction(weights[j], weights[i])


def test_pyramid_is_the_papers_arithmetic_sequence():
    # 5 layers, 100 tokens above the window: top 100/20, bottom 200 - 100/20, even steps between.
    assert Pyramid(20).schedule(5, 108, 10_000, 8) == [203, 156, 108, 60, 13]
    steps = [203 - 156, 156 - 108, 108 - 60, 60 - 13]
    assert max(steps) - min(steps) <= 1


def test_pyramid_of_a_long_prompt_is_strictly_decreasing():
    schedule = Pyramid(20).schedule(32, 512, 4096, 36)
    assert sum(schedule) == 16_384
    assert all(a > b for a, b in pairwise(schedule))
    assert (schedule[0], schedule[-1]) == (964, 60)


def test_beta_one_is_uniform():
    assert Pyramid(1).schedule(32, 128, 5000, 36) == [128] * 32


def test_a_share_larger_than_the_prompt_goes_to_the_other_layers():
    schedule = Pyramid(20).schedule(32, 128, 200, 36)
    assert sum(schedule) == 32 * 128
    assert schedule[:4] == [200] * 4
    assert schedule[-1] == 41
    assert schedule[4] > Pyramid(20).schedule(32, 128, 5000, 36)[4]


@pytest.mark.parametrize("layers", [1, 2, 32, 80])
@pytest.mark.parametrize("allocation", [Uniform(), Pyramid(20), Power(2.0)])
def test_short_prompts_never_empty_a_layer(layers, allocation):
    for prompt in range(1, 201):
        for budget in (1, 2, prompt // 2 or 1, prompt, prompt + 5):
            schedule = allocation.schedule(layers, budget, prompt)
            assert sum(schedule) == layers * min(budget, prompt)
            assert max(schedule) <= prompt


def test_a_tight_budget_keeps_the_pyramid_by_its_floor():
    """No silent fall-back to uniform: the floor holds, the rest is still a pyramid."""
    schedule = Pyramid(20).schedule(32, 40, 4096, 36)
    assert sum(schedule) == 32 * 40
    assert schedule[0] == 44
    assert schedule[-1] == 36


@pytest.mark.parametrize(
    ("layers", "capacity", "window", "prompt", "first", "last", "total"),
    [
        (32, 64, 8, 500, 118, 25, 2288),
        (32, 64, 8, 8000, 118, 25, 2288),
        (32, 128, 8, 1000, 242, 25, 4272),
        (32, 128, 32, 4000, 220, 65, 4560),
        (32, 512, 8, 500, 500, 500, 16_000),
        (32, 512, 8, 1000, 512, 512, 16_384),
        (32, 512, 8, 4000, 991, 61, 16_832),
        (32, 2048, 8, 4000, 2048, 2048, 65_536),
        (32, 2048, 8, 8000, 3986, 111, 65_552),
        (80, 128, 8, 2000, 242, 84, 13_040),
        (80, 64, 8, 2000, 118, 39, 6280),
    ],
)
def test_official_budgets_bug_for_bug(layers, capacity, window, prompt, first, last, total):
    schedule = OfficialPyramid().schedule(layers, capacity, prompt, window)
    assert (schedule[0], schedule[-1], sum(schedule)) == (first, last, total)


def test_a_budget_below_sinks_and_window_names_the_smallest_possible():
    for allocation in (Uniform(), Pyramid(), Power(), OfficialPyramid()):
        with pytest.raises(BudgetError, match="smallest possible budget is 36"):
            allocation.schedule(32, 35, 1000, 36)
    with pytest.raises(BudgetError, match="smallest possible budget is 1"):
        Uniform().schedule(32, 0, 1000)


def test_a_list_of_the_wrong_length_is_refused():
    with pytest.raises(BudgetError, match="3 entries, but the model has 4"):
        Explicit((10, 10, 10)).schedule(4, 0, 100)
    with pytest.raises(ValueError, match="at least 1"):
        Explicit((10, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pyramid(0.5),
        lambda: Pyramid(float("nan")),
        lambda: Pyramid(float("inf")),
        lambda: Power(0),
        lambda: Power(float("nan")),
        lambda: Power(1.0, c_max=5, c_min=6),
        lambda: OfficialPyramid(0),
    ],
)
def test_impossible_parameters_are_refused(make):
    with pytest.raises(ValueError, match=r"must|take"):
        make()


def test_ratios_are_read_as_written():
    assert budget_from_ratio(0.9, 1000) == 100
    assert budget_from_ratio(0.7, 10) == 3
    assert budget_from_ratio(0.0, 77) == 77
    assert budget_from_ratio(0.999, 5) == 1


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 200_000))
def test_a_ratio_removes_its_fraction_within_half_a_token(ratio, prompt):
    budget = budget_from_ratio(ratio, prompt)
    assert 1 <= budget <= prompt
    assert budget == 1 or abs(budget - (1 - Fraction(str(ratio))) * prompt) <= Fraction(1, 2)


@pytest.mark.parametrize("ratio", [1, 1.5, -0.1, float("nan")])
def test_ratios_outside_zero_to_one_are_refused(ratio):
    with pytest.raises(ValueError, match="at least 0 and below 1"):
        budget_from_ratio(ratio, 100)
