"""Moved keys equal keys computed at the new positions, for every type of rotary embedding."""

from __future__ import annotations

import pytest
import torch
from test_equality import assert_same
from tiny import CONFIGS, tiny_model

import pyramidkv
from pyramidkv.compression import make_compression
from pyramidkv.method_options import MethodError
from pyramidkv.rotary import key_frequencies, move_keys

ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
}


def rope_model(kind: str):
    parameters = {**ROPES[kind], "rope_theta": 500.0}
    return tiny_model("llama", "sdpa", rope_parameters=parameters, max_position_embeddings=1024)


def rotated(model, raw, positions):
    cos, sin = model.model.rotary_emb(raw, positions[None])
    first, second = raw.chunk(2, dim=-1)
    return raw * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


@pytest.mark.parametrize("kind", ROPES)
def test_moved_keys_equal_keys_computed_at_the_new_positions(kind):
    model = rope_model(kind)
    raw = torch.randn(1, 2, 50, 8)
    old = torch.randperm(900)[:50]
    new = torch.randperm(900)[:50]
    by = (new - old).expand(1, 2, 50)
    moved = move_keys(rotated(model, raw, old), by, key_frequencies(model))
    torch.testing.assert_close(moved, rotated(model, raw, new), atol=2e-4, rtol=1e-4)


def test_dimensions_beyond_the_rotary_ones_are_not_turned():
    keys = torch.randn(1, 1, 4, 12)
    moved = move_keys(keys, torch.full((1, 1, 4), 7), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert torch.equal(moved[..., 8:], keys[..., 8:])
    assert not torch.allclose(moved[..., :8], keys[..., :8])
    torch.testing.assert_close(moved.norm(dim=-1), keys.norm(dim=-1))


@pytest.mark.parametrize("kind", ROPES)
def test_renumbered_generation_equals_the_reference_for_every_rope(kind):
    assert_same(rope_model(kind), make_compression("streamingllm-renumbered", 20), (60, 25))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_renumbering_works_for_every_architecture(architecture):
    compression = make_compression("streamingllm-renumbered", 20)
    assert_same(tiny_model(architecture, "eager"), compression, (60, 25), (1, 1, 5, 1))


def test_the_two_modes_differ_only_in_the_sinks_keys():
    model = tiny_model("llama", "sdpa")
    ids = torch.randint(3, 190, (1, 60))
    caches = []
    for name in ("streamingllm", "streamingllm-renumbered"):
        caches.append(pyramidkv.CompressedCache(model, name, 20))
        with torch.no_grad():
            model(ids, past_key_values=caches[-1])
    for plain, renumbered in zip(*(cache.compressed_layers for cache in caches), strict=True):
        assert torch.equal(plain.kept_positions(), renumbered.kept_positions())
        assert torch.equal(plain.values, renumbered.values)
        torch.testing.assert_close(plain.keys[:, :, 4:], renumbered.keys[:, :, 4:])
        assert not torch.allclose(plain.keys[:, :, :4], renumbered.keys[:, :, :4], atol=1e-2)


@pytest.mark.parametrize("kind", [*ROPES, "dynamic", "longrope"])
def test_compressed_generation_equals_the_reference_for_every_rope(kind):
    """Past the original context too, where dynamic and longrope change their frequencies."""
    make = rope_model if kind in ROPES else changing_rope_model
    compression = make_compression("pyramidkv", 20, window_size=6, kernel_size=5)
    # a dynamic embedding remembers the longest text it has seen, so each run has its own model
    assert_same(make(kind), compression, (60, 25), reference_model=make(kind))


def changing_rope_model(kind: str):
    parameters = {"rope_type": kind, "factor": 2.0, "rope_theta": 500.0}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        parameters |= {**factors, "original_max_position_embeddings": 40}
    return tiny_model("llama", "sdpa", rope_parameters=parameters, max_position_embeddings=40)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_embeddings_that_change_with_the_length_are_refused(kind):
    model = changing_rope_model(kind)
    with pytest.raises(MethodError, match=f"type '{kind}'"):
        pyramidkv.CompressedCache(model, "streamingllm-renumbered", 20)
    with (
        pytest.raises(MethodError, match=f"type '{kind}'"),
        pyramidkv.compress(model, "streamingllm-renumbered", 20),
    ):
        pass
    assert model.config._attn_implementation == "sdpa"
