"""Schedule profiles: what was written is read, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import pyramidkv
from pyramidkv.compression import Compression, make_compression
from pyramidkv.method_options import MethodError
from pyramidkv.schedule_profile import ProfileError, ScheduleProfile

SHAPE = {
    "model_type": "llama",
    "layers": 4,
    "hidden_size": 48,
    "query_heads": 6,
    "kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 200,
}


def profile(effective=(80.0, 40.0, 20.0, 20.0), shape=SHAPE, model="tiny") -> ScheduleProfile:
    measured = {"length": 2048, "samples": [["a.txt", 0]], "queries": "window"}
    return ScheduleProfile.of(model, shape, list(effective), [5.0] * len(effective), measured)


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "p.json"
    profile().write(path)
    assert ScheduleProfile.read(path) == profile()
    stored = json.loads(path.read_text())
    assert stored["effective_tokens"] == [80, 40, 20, 20]
    assert stored["suggested_shares"] == [1.9, 1.0, 0.55, 0.55]  # 0.1 + 0.9 * 4 * e / sum(e)
    assert stored["model"] == {"name": "tiny", "shape": SHAPE}


def test_a_profile_makes_the_schedule_of_any_method_that_has_budgets(tmp_path):
    for name in ("snapkv", "pyramidkv", "h2o", "streamingllm"):
        compression = make_compression(name, 110, profile=profile(), share_floor=0.0)
        assert compression.method.options.allocation == "entropy"
        schedule = compression.schedule(4, 5000)
        assert sum(schedule) == 440
        protected = compression.method.options.protected
        spare = [kept - protected for kept in schedule]
        assert spare[0] == 2 * spare[1] == 4 * spare[2] == 4 * spare[3]


def test_a_compression_with_a_profile_survives_its_own_parameters():
    compression = make_compression("snapkv", 64, profile=profile(), share_temperature=2.0)
    stored = json.loads(json.dumps(compression.parameters()))
    assert Compression.from_parameters(stored) == compression


def test_a_profile_of_another_model_is_refused_and_told_apart():
    for key, words in (
        ("model_type", "architecture is llama, but this model's is qwen2"),
        ("layers", "number of layers is 4, but this model's is 9"),
        ("vocab_size", "vocabulary size is 200, but this model's is 9"),
    ):
        other = {**SHAPE, key: "qwen2" if key == "model_type" else 9}
        with pytest.raises(ProfileError, match=words):
            profile().check(other)
    profile().check(SHAPE)


def test_the_engine_refuses_a_profile_of_another_model():
    from tiny import tiny_model

    model = tiny_model("llama", "sdpa", num_hidden_layers=3)
    for use in (
        lambda: pyramidkv.CompressedCache(model, "snapkv", 64, profile=profile()),
        lambda: pyramidkv.compress(model, "snapkv", 64, profile=profile()).__enter__(),
    ):
        with pytest.raises(ProfileError, match="number of layers is 4, but this model's is 3"):
            use()
    assert model.config._attn_implementation == "sdpa"


def test_the_engine_keeps_what_the_profile_says():
    import torch
    from tiny import prompt_ids, tiny_model

    from pyramidkv.model_shape import shape_fingerprint

    model = tiny_model("llama", "sdpa")
    own = profile(shape=shape_fingerprint(model.config.to_dict()))
    cache = pyramidkv.CompressedCache(model, "snapkv", 46, profile=own, share_floor=0.0)
    with torch.no_grad():
        model(prompt_ids(200)[0], past_key_values=cache)
    assert cache.kept_lengths() == [[56], [46], [41], [41]]


GOOD = profile().as_dict()


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({}, "give a file that pyramidkv profile wrote"),
        ({**GOOD, "format": "other"}, "give a file"),
        ({**GOOD, "version": 2}, "has version 2, but this pyramidkv reads 1"),
        ({**GOOD, "effective_tokens": []}, "no list 'effective_tokens'"),
        ({**GOOD, "effective_tokens": [1, 2, 3, "4"]}, "entry '4'"),
        ({**GOOD, "effective_tokens": [1, 2, 3, True]}, "entry True"),
        ({**GOOD, "effective_tokens": [1, 2, 3, float("nan")]}, "entry nan"),
        ({**GOOD, "effective_tokens": [1, 2, 3, 10**400]}, r"entry 1000.*\.\.\., which is no"),
        ({**GOOD, "effective_tokens": [1, 2, 3, 0]}, "do not belong together"),
        ({**GOOD, "effective_tokens": [1, 2, 3]}, "do not belong together"),
        ({**GOOD, "entropy_bits": [1, 2, 3, -1]}, "do not belong together"),
        ({k: v for k, v in GOOD.items() if k != "entropy_bits"}, "no list 'entropy_bits'"),
        ({k: v for k, v in GOOD.items() if k != "model"}, "what was measured"),
        ({**GOOD, "measured": {"length": {}}}, "no list of plain values"),
        ({**GOOD, "model": {"name": "x", "shape": 3}}, "of which model"),
        ({**GOOD, "model": {"name": "x", "shape": {"layers": [1]}}}, "of which model"),
    ],
)
def test_what_is_no_profile_is_refused_in_a_sentence(tmp_path, stored, words):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(stored))
    with pytest.raises(ProfileError, match=words) as caught:
        ScheduleProfile.read(path)
    assert str(caught.value).startswith(f"{str(path)!r} is no schedule profile: ")
    assert "\n" not in str(caught.value)


def test_files_that_are_no_json_are_refused(tmp_path):
    path = tmp_path / "p.json"
    for content, words in (
        (b"", "is not JSON in UTF-8"),
        (b"\xff\xfe", "is not JSON in UTF-8"),
        (b"{", "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b"null", "holds a JSON NoneType, not an object"),
        (b"[]", "holds a JSON list, not an object"),
    ):
        path.write_bytes(content)
        with pytest.raises(ProfileError, match=f"{words}.*; give a file that pyramidkv profile"):
            ScheduleProfile.read(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="is no plain file"):
        ScheduleProfile.read(tmp_path / "pipe")
    with pytest.raises(ProfileError, match="cannot read"):
        ScheduleProfile.read(tmp_path / "absent.json")
    with pytest.raises(ProfileError, match="is no plain file"):
        ScheduleProfile.read(tmp_path)
    with pytest.raises(ProfileError, match="cannot write"):
        profile().write(tmp_path / "no" / "folder.json")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": {"a": 1}}, "is a schedule profile, as ScheduleProfile.read gives it"),
        ({"profile": GOOD}, "as ScheduleProfile.read gives it"),
        ({"profile": profile(), "allocation": "pyramid"}, "a schedule profile means nothing to"),
        ({"share_floor": 0.5}, "share_floor means nothing to 'pyramid' budgets"),
        ({"allocation": "entropy", "share_floor": 1.5}, "from 0 to 1"),
        ({"allocation": "entropy", "share_temperature": 0}, "positive finite"),
        ({"allocation": "entropy", "share_temperature": "warm"}, "it is a number"),
        ({"allocation": "entropy", "beta": 3}, "beta means nothing to 'entropy' budgets"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(MethodError, match=words):
        make_compression("pyramidkv", 64, **options)


def test_profiles_need_no_torch():
    code = "import sys, pyramidkv.schedule_profile; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_that_are_no_text_are_written_and_read(tmp_path):
    odd = ScheduleProfile.of("m\udcff", SHAPE, [2.0], [1.0], {"samples": [["a\udcff.txt", 0]]})
    odd.write(tmp_path / "p.json")
    assert ScheduleProfile.read(tmp_path / "p.json") == odd
