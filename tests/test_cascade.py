"""Schedules made while layers are measured: exact in the end, within the total all the while."""

from __future__ import annotations

import itertools
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from pyramidkv.budgets import Entropy
from pyramidkv.cascade import Cascade


def run(measured, budget, prompt, protected, temperature=1.0, floor=0.1):
    """Return what was held after each layer."""
    shares = partial(Entropy, temperature=temperature, floor=floor)
    cascade = Cascade(len(measured), max(budget, protected), prompt, protected, shares)
    steps = []
    for effective in measured:
        cascade.add(effective)
        steps.append(list(cascade.held))
    return steps


measurements = st.lists(st.floats(1, 100_000), min_size=1, max_size=40)


@given(
    measurements,
    st.integers(1, 3000),
    st.integers(1, 5000),
    st.integers(0, 60),
    st.floats(0.2, 10),
    st.floats(0, 1),
)
def test_the_total_is_exact_and_never_exceeded(
    measured, budget, prompt, protected, temperature, floor
):
    steps = run(measured, budget, prompt, protected, temperature, floor)
    total = len(measured) * min(max(budget, protected), prompt)
    assert sum(steps[-1]) == total
    for count, held in enumerate(steps, start=1):
        assert len(held) == count
        assert sum(held) <= total + count
        assert all(min(protected, prompt) <= kept <= prompt for kept in held)
    for before, after in itertools.pairwise(steps):
        assert all(b <= a for a, b in zip(before, after, strict=False))  # nothing comes back


@given(measurements, st.integers(1, 300), st.integers(0, 60), st.floats(0.2, 10), st.floats(0, 1))
def test_if_no_layer_keeps_all_it_is_the_schedule_made_at_once(
    measured, budget, protected, temperature, floor
):
    prompt = len(measured) * max(budget, protected) + 1
    held = run(measured, budget, prompt, protected, temperature, floor)[-1]
    at_once = Entropy(tuple(measured), temperature, floor)
    assert held == at_once.schedule(len(measured), max(budget, protected), prompt, protected)


def test_a_late_giant_never_brings_tokens_back():
    # Without bounds by layer the third would be given more again once the fourth is known.
    steps = run([1.0, 0.9, 0.01, 1000.0], 60, 100, 0)
    assert all(
        b <= a
        for before, after in itertools.pairwise(steps)
        for a, b in zip(before, after, strict=False)
    )
    assert sum(steps[-1]) == 240
