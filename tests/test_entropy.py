"""Attention statistics equal naive ones on the full softmax, whatever the blocks."""

from __future__ import annotations

import math

import pytest
import torch

from pyramidkv import scores
from pyramidkv.entropy import EPSILON, effective_context, measure_attention

KV_HEADS, GROUP, TOKENS, DIM = 2, 3, 50, 8
SCALE = 0.7


@pytest.fixture
def states():
    torch.manual_seed(1)
    return torch.randn(KV_HEADS * GROUP, TOKENS, DIM), torch.randn(KV_HEADS, TOKENS, DIM)


@pytest.fixture(params=[2**24, 700], ids=["one block", "many blocks"])
def _workspace(request, monkeypatch):
    monkeypatch.setattr(scores, "WORKSPACE_BYTES", request.param)


def naive(queries, keys, softcap, sinks, recent):
    """The definitions, in loops over heads and queries in Python floats."""
    head_count, count = queries.shape[:2]
    entropy, sink_mass, recent_mass = [], [], []
    received = torch.zeros(head_count, TOKENS, dtype=torch.float64)
    for head in range(head_count):
        h = s = r = 0.0
        for i in range(count):
            at = TOKENS - count + i
            logits = [
                SCALE * float(queries[head, i].double() @ keys[head // GROUP, k].double())
                for k in range(at + 1)
            ]
            if softcap is not None:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            top = max(logits)
            powers = [math.exp(x - top) for x in logits]
            weights = [p / sum(powers) for p in powers]
            h -= sum(w * math.log2(w + EPSILON) for w in weights)
            s += sum(weights[:sinks])
            r += sum(weights[max(sinks, at - recent + 1) : at + 1])
            received[head, : at + 1] += torch.tensor(weights, dtype=torch.float64)
        entropy.append(h / count)
        sink_mass.append(s / count)
        recent_mass.append(r / count)
    return entropy, sink_mass, recent_mass, (received / count).view(KV_HEADS, GROUP, TOKENS)


@pytest.mark.usefixtures("_workspace")
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("voting", [1, 7, TOKENS], ids=["one query", "a window", "all queries"])
def test_statistics_equal_the_definitions(states, voting, softcap):
    queries, keys = states
    queries = queries[:, TOKENS - voting :]
    measured = measure_attention(queries, keys, SCALE, softcap, sinks=3, recent=7)
    entropy, sink_mass, recent_mass, received = naive(queries, keys, softcap, 3, 7)
    for actual, expected in (
        (measured.entropy, entropy),
        (measured.sink_mass, sink_mass),
        (measured.recent_mass, recent_mass),
    ):
        torch.testing.assert_close(
            actual, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0
        )
    torch.testing.assert_close(measured.received, received, atol=1e-6, rtol=0)
    assert effective_context(queries, keys, SCALE, softcap) == pytest.approx(
        sum(2**h for h in entropy) / len(entropy), rel=1e-5
    )


def test_even_attention_spreads_over_all_and_peaked_over_one():
    keys = torch.zeros(1, 64, 4)
    even = measure_attention(torch.ones(2, 1, 4), keys, 1.0)
    assert even.entropy.tolist() == pytest.approx([6, 6])
    assert even.effective_tokens.tolist() == pytest.approx([64, 64])
    keys[0, 5] = 100.0
    peaked = measure_attention(torch.ones(2, 1, 4), keys, 1.0)
    assert peaked.entropy.tolist() == pytest.approx([0, 0], abs=1e-6)
    assert peaked.effective_tokens.tolist() == pytest.approx([1, 1])


def test_nothing_counts_as_sink_or_recent_if_none_is_asked_for(states):
    measured = measure_attention(*states, SCALE)
    assert measured.sink_mass.tolist() == measured.recent_mass.tolist() == [0.0] * 6


def test_half_precision_states_are_measured_in_full(states):
    queries, keys = (s.bfloat16() for s in states)
    half = measure_attention(queries, keys, SCALE)
    full = measure_attention(queries.float(), keys.float(), SCALE)
    assert torch.equal(half.entropy, full.entropy)
