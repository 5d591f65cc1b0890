"""Scores equal the direct formula on the full softmax, in little memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pyramidkv import scores
from pyramidkv.scores import AccumulatedAttention, Recency, WindowAttention

BATCH, KV_HEADS, GROUP, TOKENS, DIM, WINDOW = 3, 2, 3, 40, 8, 7
SCALE = 0.6


@pytest.fixture
def states():
    torch.manual_seed(0)
    queries = torch.randn(BATCH, KV_HEADS * GROUP, TOKENS, DIM)
    keys = torch.randn(BATCH, KV_HEADS, TOKENS, DIM)
    values = torch.randn(BATCH, KV_HEADS, TOKENS, DIM)
    return queries, keys, values


@pytest.fixture(params=[2**24, 500], ids=["one block", "many blocks"])
def _workspace(request, monkeypatch):
    monkeypatch.setattr(scores, "WORKSPACE_BYTES", request.param)


def full_attention(queries, keys, valid=None, softcap=None):
    """The causal softmax over everything, `[batch, kv_heads, group, N, N]`, in float64."""
    grouped = queries.double().view(BATCH, KV_HEADS, GROUP, TOKENS, DIM)
    logits = torch.einsum("bhgqd,bhkd->bhgqk", grouped, keys.double()) * SCALE
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    if valid is not None:
        logits = logits.masked_fill(~valid[:, None, None, None], float("-inf"))
    return logits.softmax(-1).nan_to_num(0)


REDUCE = {"mean": lambda t, d: t.mean(d), "max": lambda t, d: t.amax(d)}


@pytest.mark.usefixtures("_workspace")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("value_norm", [False, True])
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
@pytest.mark.parametrize("window_reduce", ["mean", "max"])
def test_window_scores_equal_the_formula(states, window_reduce, group_reduce, value_norm, softcap):
    queries, keys, values = states
    attention = full_attention(queries, keys, softcap=softcap)[..., -WINDOW:, :]
    expected = REDUCE[group_reduce](REDUCE[window_reduce](attention, -2), 2)
    if value_norm:
        expected = expected * values.double().norm(dim=-1)
    score = WindowAttention(WINDOW, window_reduce, group_reduce, value_norm)
    assert score.query_count(TOKENS) == WINDOW
    actual = score(queries[:, :, -WINDOW:], keys, values, None, SCALE, softcap)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("_workspace")
@pytest.mark.parametrize("group_reduce", ["mean", "max"])
def test_h2o_scores_are_the_column_sums_of_the_causal_softmax(states, group_reduce):
    queries, keys, values = states
    expected = REDUCE[group_reduce](full_attention(queries, keys).sum(-2), 2)
    score = AccumulatedAttention(group_reduce)
    assert score.query_count(TOKENS) == TOKENS
    actual = score(queries, keys, values, None, SCALE)
    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)
    if group_reduce == "mean":
        assert actual.sum(-1).allclose(torch.tensor(float(TOKENS)))


@pytest.mark.usefixtures("_workspace")
@pytest.mark.parametrize(
    "score",
    [WindowAttention(WINDOW), WindowAttention(WINDOW, "max", "max", True), AccumulatedAttention()],
)
def test_a_padded_row_scores_as_it_does_alone(states, score):
    queries, keys, values = states
    lengths = [TOKENS, TOKENS - 11, WINDOW - 2]  # the last is shorter than the window
    valid = torch.arange(TOKENS) >= TOKENS - torch.tensor(lengths)[:, None]
    count = score.query_count(TOKENS)
    together = score(queries[:, :, TOKENS - count :], keys, values, valid, SCALE)
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        count = score.query_count(length)
        alone = score(
            queries[one, :, TOKENS - count :],
            keys[one, :, -length:],
            values[one, :, -length:],
            None,
            SCALE,
        )
        torch.testing.assert_close(together[one, :, -length:], alone, atol=1e-6, rtol=1e-5)
        assert (together[row, :, : TOKENS - length] == float("-inf")).all()


def test_window_queries_do_not_see_their_future(states):
    queries, keys, values = states
    score = WindowAttention(WINDOW)
    before = score(queries[:, :, -WINDOW:], keys, values, None, SCALE)
    changed = keys.clone()
    changed[:, :, -1] += 100.0  # only the last query sees the last token
    after = score(queries[:, :, -WINDOW:], changed, values, None, SCALE)
    share = 1 / WINDOW
    assert ((before - after)[..., :-WINDOW].abs() <= share).all()
    assert (after[..., -1] <= share + 1e-6).all()


def test_recency_is_the_position_and_padding_is_never_kept(states):
    _, keys, values = states
    valid = torch.arange(TOKENS).expand(BATCH, TOKENS) >= 5
    result = Recency()(keys[:, :, :0], keys, values, valid, SCALE)
    assert (result[:, :, :5] == float("-inf")).all()
    assert torch.equal(result[0, 0, 5:], torch.arange(5.0, TOKENS))


def test_half_precision_is_scored_in_float32(states):
    queries, keys, values = (t.bfloat16() for t in states)
    score = WindowAttention(WINDOW)
    half = score(queries[:, :, -WINDOW:], keys, values, None, SCALE)
    full = score(queries[:, :, -WINDOW:].float(), keys.float(), values.float(), None, SCALE)
    assert half.dtype == torch.float32
    assert torch.equal(half, full)


MEASURE = """
import torch
from pyramidkv.measure import PeakMemory
from pyramidkv.scores import AccumulatedAttention, WindowAttention
torch.set_num_threads(1)
tokens = {tokens}
keys = torch.randn(1, 8, tokens, 128).bfloat16()
queries = torch.randn(1, 32, {queries}, 128).bfloat16()
score = {score}
small = keys[:, :, :2048]
score(queries[:, :, -32:], small, small, None, 0.09)
peak = PeakMemory(torch.device("cpu"))
peak.start()
before = peak.bytes()
score(queries, keys, keys, None, 0.09)
print(peak.bytes() - before)
"""  # `before` is the resident size now: the peak has just been reset


@pytest.mark.parametrize(
    ("score", "tokens", "queries"),
    [
        ("WindowAttention(32)", 32_768, 32),
        ("WindowAttention(32, value_norm=True)", 32_768, 32),
        ("AccumulatedAttention()", 4096, 4096),
    ],
)
def test_scoring_stays_under_64_mib_beyond_its_inputs(score, tokens, queries):
    """8 KV heads at 32k tokens; a full matrix would be 4 GiB per head."""
    code = MEASURE.format(score=score, tokens=tokens, queries=queries)
    # so that freed blocks leave the process at once and only what is held is measured
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(run.stdout) < 64 * 2**20


def test_scores_take_states_with_gradients(states):
    score = WindowAttention(WINDOW, value_norm=True)
    queries, keys, values = states
    given = [queries[:, :, -WINDOW:], keys, values]
    expected = score(*given, None, SCALE)
    actual = score(*(one.requires_grad_() for one in given), None, SCALE)
    assert torch.equal(actual, expected)
