"""Plans against the truth: what the engine really holds, and figures computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_schedule_profile import profile
from tiny import CONFIGS, HYBRIDS, prompt_ids, tiny_model

import pyramidkv
from pyramidkv.budgets import BudgetError
from pyramidkv.compression import make_compression
from pyramidkv.deployment import Deployment, PlanError
from pyramidkv.method_options import MethodError
from pyramidkv.model_shape import shape_of
from pyramidkv.model_source import find_model, preset_names
from pyramidkv.planning import plan_memory
from pyramidkv.schedule_profile import ProfileError

SMALL = {"window_size": 6, "kernel_size": 5}
METHODS = {
    "pyramidkv": make_compression("pyramidkv", 30, **SMALL),
    "snapkv by ratio": make_compression("snapkv", compression_ratio=0.7, **SMALL),
    "official": make_compression("pyramidkv-official", 30),
    "list": make_compression("h2o", layer_budgets=[60, 40, 40, 36], window_size=6),
}


def preset(name, context, *compressions, **deployment):
    return plan_memory(find_model(name).shape, Deployment(context, **deployment), compressions)


def planned(model, context, *compressions, **deployment):
    shape = shape_of(model.config.to_dict(), "tiny")
    dtype = str(model.dtype).removeprefix("torch.")
    return plan_memory(shape, Deployment(context, dtype=dtype, **deployment), compressions)


def run(model, method, length, batch=1, chunk=None, **options):
    """Process a prompt; return the cache, and the most bytes for keys and values meanwhile."""
    ids, mask = prompt_ids(*[length] * batch)
    cache = pyramidkv.CompressedCache(model, method, **options)
    cache.expect_prompt(mask)
    moments = []
    update = cache.update

    def observed(keys, values, layer_idx, *args, **kwargs):
        stored = [_bytes(layer) for layer in cache.layers]
        taken = update(keys, values, layer_idx, *args, **kwargs)
        whole = sum(states.nbytes for states in taken)
        moments.append((layer_idx, sum(stored) - stored[layer_idx] + whole))
        return taken

    cache.update = observed
    peak = 0
    for start in range(0, length, chunk or length):
        with torch.no_grad():
            model(
                ids[:, start : start + (chunk or length)],
                attention_mask=mask[:, : start + (chunk or length)],
                past_key_values=cache,
            )
        peak = max(peak, *(held + _bytes(cache.layers[index]) for index, held in moments))
        moments.clear()
    return cache, peak


def _bytes(layer) -> int:
    """Return what is allocated for a layer's keys and values, room to grow included."""
    storage = getattr(layer, "_storage", None)
    tensors = getattr(layer, "keys", None), getattr(layer, "values", None)
    if storage is not None:
        tensors = storage._tensors
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", CONFIGS)
def test_planned_bytes_are_those_the_engine_holds(architecture, dtype):
    model = tiny_model(architecture, "eager").to(dtype)
    layers = len(pyramidkv.CompressedCache(model, "full").compressed_layers)
    for name, compression in METHODS.items():
        if name == "list" and layers != 4:
            continue
        record = planned(model, 150, compression, batch=2)
        full, plan = record["full"], record["plans"][0]
        cache, _ = run(model, compression.method, 150, 2, **compression.amounts)
        assert plan["kv_bytes_batch"] == 2 * plan["kv_bytes_request"] == cache.kv_bytes
        assert plan["schedule"] == [kept[0] for kept in cache.kept_lengths()]
        assert sum(plan["schedule"]) == plan["schedule_total"]
        dense, _ = run(model, "full", 150, 2)
        assert full["kv_bytes_batch"] == 2 * full["kv_bytes_request"] == dense.kv_bytes


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_planned_states_are_those_the_engine_holds(architecture):
    model = tiny_model(architecture, "eager")
    record = planned(model, 150, METHODS["pyramidkv"])
    cache, _ = run(model, METHODS["pyramidkv"].method, 150, budget=30)
    beside = cache.allocated_bytes - sum(la.allocated_bytes for la in cache.compressed_layers)
    assert record["plans"][0]["state_bytes_request"] == beside > 0


@pytest.mark.parametrize("architecture", CONFIGS)
def test_planned_weights_are_those_of_the_loaded_model(architecture):
    model = tiny_model(architecture, "eager")
    loaded = sum(p.numel() * p.element_size() for p in model.parameters())
    assert planned(model, 10)["weights"]["bytes"] == loaded


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3_text", "qwen3_next"])
def test_the_planned_peak_is_what_the_engine_comes_to(architecture):
    model = tiny_model(architecture, "eager")
    compression = METHODS["pyramidkv"]
    plan = planned(model, 150, compression)["plans"][0]
    _, peak = run(model, compression.method, 150, budget=30)
    assert plan["peak_bytes_together"] == peak
    _, of_batch = run(model, compression.method, 150, 3, budget=30)
    batch = planned(model, 150, compression, batch=3)["plans"][0]
    assert batch["peak_bytes_together"] == of_batch == 3 * peak


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_the_planned_peak_in_pieces_is_what_the_engine_comes_to(architecture):
    model = tiny_model(architecture, "eager")
    compression = METHODS["pyramidkv"]
    plan = planned(model, 320, compression, prefill_chunk=80)["plans"][0]
    _, peak = run(model, compression.method, 320, chunk=80, budget=30)
    assert plan["peak_bytes_together"] == peak
    whole = planned(model, 320, compression)["plans"][0]["peak_bytes_together"]
    assert peak < whole


def test_sliding_layers_let_go_of_what_they_dropped_at_once():
    model = tiny_model("gemma3_text", "sdpa")
    cache, _ = run(model, "full", 300)
    for layer in cache.layers:
        if layer.is_sliding:
            assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes


def test_sizes_computed_by_hand():
    seventy = preset("llama-3-70b", 65_536)
    assert seventy["full"]["kv_bytes_request"] == 21_474_836_480  # 21.5 GB, 20 GiB
    assert seventy["kv_bytes_per_token"] == 2 * 2 * 80 * 8 * 128
    eight = preset("llama-3-8b", 8_192, make_compression("pyramidkv", 512), batch=3)
    assert eight["full"]["kv_bytes_request"] == 2**30
    assert eight["plans"][0]["kv_bytes_request"] == 2**26
    assert eight["plans"][0]["kv_bytes_batch"] == 3 * 2**26
    assert eight["weights"] == {
        "parameters": 8_030_261_248,
        "bytes": 16_060_522_496,
        "dtype": "bfloat16",
        "counted_from": "configuration",
        "bytes_per_parameter": 2.0,
        "notes": (),
    }
    assert preset("gemma-2b", 1_000)["full"]["kv_bytes_request"] == 18_432 * 1_000  # multi-query
    latent = preset("deepseek-v3", 1_000)
    assert latent["full"]["kv_bytes_request"] == 70_272 * 1_000
    assert latent["full"]["schedule"] == []
    assert any("MLA" in note and "not compressed" in note for note in latent["notes"])


def test_eight_bits_halve_the_cache_and_the_weights():
    half = preset("llama-3-8b", 8_192, dtype="fp8", kv_dtype="fp8")
    assert half["full"]["kv_bytes_request"] == 2**29
    assert half["weights"]["bytes"] == 8_030_261_248
    # quantised weights leave the cache in 16 bit
    assert preset("llama-3-8b", 8_192, dtype="int4")["full"]["kv_bytes_request"] == 2**30
    assert preset("llama-3-8b", 8_192, dtype="int4")["weights"]["bytes"] == 8_030_261_248 // 2


def test_the_official_total_is_the_true_one():
    budget = [make_compression(name, 128) for name in ("pyramidkv", "pyramidkv-official")]
    exact, official = preset("llama-3-70b", 8_000, *budget)["plans"]
    assert exact["schedule_total"] == exact["allowed_total"] == 80 * 128
    assert official["schedule_total"] == 13_040
    assert official["allowed_total"] == 80 * 128
    assert official["kv_bytes_request"] == 13_040 * 4096


def test_requests_that_fit():
    compression = make_compression("snapkv", 512)
    token = 131_072
    # one by one: one prompt uncompressed (1 GiB), beside others of 64 MiB
    room = 100 * 2**30
    record = preset("llama-3-8b", 8_192, compression, kv_memory=room)
    assert record["full"]["requests_one_by_one"] == record["full"]["requests_together"] == 100
    plan = record["plans"][0]
    assert plan["requests_one_by_one"] == 1 + (room - 2**30) // 2**26 == 1 + 99 * 16
    # together: each has a layer's full keys and values, and what is kept with room for 64 more
    peak = 576 * token + 2**30 // 32
    assert plan["peak_bytes_together"] == peak
    assert plan["requests_together"] == room // peak
    # one byte less than a single request needs
    none = preset("llama-3-8b", 8_192, compression, kv_memory=2**30 - 1)
    assert none["plans"][0]["requests_one_by_one"] == none["full"]["requests_one_by_one"] == 0
    assert "1 requests do not fit with full and snapkv 512" in none["notes"]
    assert (
        preset("llama-3-8b", 8_192, compression, kv_memory=2**30)["plans"][0]["requests_one_by_one"]
        == 1
    )
    # of a GPU, 90% may be used, and the weights take their part
    gpu = preset("llama-3-8b", 8_192, gpu_memory=80 * 10**9)
    assert gpu["kv_room_per_gpu"] == 72 * 10**9 - 16_060_522_496
    assert gpu["full"]["requests_one_by_one"] == (72 * 10**9 - 16_060_522_496) // 2**30


def test_a_request_that_outgrows_its_own_peak_needs_that_much():
    token = 131_072
    room = 1_000 * token
    for plan in (
        preset("llama-3-8b", 1_000, kv_memory=room)["full"],
        preset("llama-3-8b", 500, max_new_tokens=500, kv_memory=room)["full"],
    ):
        assert plan["requests_one_by_one"] == plan["requests_together"] == 1
    longer = preset("llama-3-8b", 500, max_new_tokens=501, kv_memory=room)["full"]
    assert longer["requests_one_by_one"] == longer["requests_together"] == 0
    compressed = make_compression("snapkv", 100)
    grown = preset("llama-3-8b", 500, compressed, max_new_tokens=900, kv_memory=room)["plans"][0]
    assert grown["kv_bytes_request_at_end"] == 1_000 * token
    assert grown["requests_one_by_one"] == 1
    assert grown["requests_together"] == 0  # transformers' room to grow comes on top


def test_prompts_one_by_one_take_one_uncompressed_prompt_beside_the_others():
    compression = make_compression("snapkv", 512)
    plan = preset("llama-3-8b", 8_192, compression, batch=5)["plans"][0]
    assert plan["peak_bytes_one_by_one"] == 2**30 + 4 * 2**26
    full = preset("llama-3-8b", 8_192, batch=5)["full"]
    assert full["peak_bytes_one_by_one"] == full["peak_bytes_together"] == 5 * 2**30


def test_generated_tokens_are_counted():
    compression = make_compression("snapkv", 512)
    record = preset("llama-3-8b", 8_192, compression, max_new_tokens=100)
    token = 131_072
    assert record["full"]["kv_bytes_request_at_end"] == 8_292 * token
    assert record["plans"][0]["kv_bytes_request_at_end"] == 612 * token
    bounded = make_compression("snapkv", decode_budget=512, decode_interval=16)
    record = preset("llama-3-8b", 8_192, bounded, max_new_tokens=100)
    assert record["plans"][0]["kv_bytes_request_at_end"] == 528 * token
    # the first step reads least: no later one is faster
    assert record["plans"][0]["decode_kv_bytes"] == 512 * token
    assert record["full"]["decode_kv_bytes"] == 8_192 * token


def test_gpus_share_heads_and_repeat_them_if_they_are_more():
    for gpus, copies in ((2, 1), (8, 1), (16, 2), (32, 4)):
        record = preset("llama-3-8b", 8_192, tensor_parallel=gpus)
        assert record["full"]["bytes_batch_per_gpu"] == 2**30 * copies // gpus
        said = any(f"stored {copies} times" in note for note in record["notes"])
        assert said == (copies > 1)
    for gpus in (3, 64):
        with pytest.raises(PlanError, match="32 query heads and 8 KV heads"):
            preset("llama-3-8b", 8_192, tensor_parallel=gpus)
    # one latent vector serves all heads, so that every GPU needs it
    latent = preset("deepseek-v3", 1_000, tensor_parallel=8)
    assert latent["full"]["bytes_batch_per_gpu"] == 70_272 * 1_000
    assert latent["full"]["decode_kv_bytes"] == 8 * 70_272 * 1_000


def test_the_bound_on_decoding_is_bandwidth_over_what_a_step_reads():
    record = preset("llama-3-8b", 8_192, batch=4, bandwidth=10**12)
    embedding = 128_256 * 4_096
    weights = 2 * (8_030_261_248 - embedding + 4_096)
    assert record["full"]["decode_weight_bytes"] == weights
    assert record["full"]["decode_kv_bytes"] == 4 * 2**30
    expected = 4 * 10**12 / (weights + 4 * 2**30)
    assert record["full"]["tokens_per_second_at_most"] == pytest.approx(expected)
    shared = preset("llama-3-8b", 8_192, batch=4, bandwidth=10**12, tensor_parallel=2)
    assert shared["full"]["tokens_per_second_at_most"] == pytest.approx(2 * expected)


def test_of_experts_a_step_reads_those_that_the_batch_reaches():
    shape = find_model("mixtral-8x7b").shape
    one = preset("mixtral-8x7b", 1_000, batch=1)["full"]["decode_weight_bytes"]
    many = preset("mixtral-8x7b", 1_000, batch=1_000)["full"]["decode_weight_bytes"]
    dense = shape.parameters - shape.expert_parameters - shape.embedding_parameters + 4_096
    assert one == 2 * (dense + shape.expert_parameters // 4)
    assert many == pytest.approx(2 * (dense + shape.expert_parameters), rel=1e-9)
    two = preset("mixtral-8x7b", 1_000, batch=2)["full"]["decode_weight_bytes"]
    assert two == pytest.approx(2 * (dense + shape.expert_parameters * 7 / 16), abs=2)


@given(
    name=st.sampled_from(preset_names()),
    context=st.integers(40, 200_000),
    budget=st.integers(36, 4_000),
    batch=st.integers(1, 100),
)
def test_every_preset_is_planned_within_its_bounds(name, context, budget, batch):
    shape = find_model(name).shape
    compressions = [make_compression("pyramidkv", budget)] if shape.compressible else []
    record = plan_memory(shape, Deployment(context, batch, kv_memory=10**13), compressions)
    json.dumps(record)
    full = record["full"]
    for plan in record["plans"]:
        assert plan["schedule_total"] == len(shape.compressible) * min(budget, context)
        assert plan["kv_bytes_request"] <= full["kv_bytes_request"]
        if 4 * budget <= context:
            assert plan["requests_together"] > full["requests_together"]
        assert plan["requests_one_by_one"] >= full["requests_one_by_one"]


def test_stored_weights_count_unless_another_type_is_asked_for():
    shape = find_model("llama-3-8b").shape
    stored = plan_memory(shape, Deployment(100), [], weight_bytes=5_000_000_000)
    assert stored["weights"]["bytes"] == 5_000_000_000
    assert stored["weights"]["counted_from"] == "stored weights"
    read = stored["full"]["decode_weight_bytes"] / 5_000_000_000
    assert read == pytest.approx(shape.decode_parameters / shape.parameters)
    other = plan_memory(shape, Deployment(100, dtype="fp8"), [], weight_bytes=5_000_000_000)
    assert other["weights"]["bytes"] == 8_030_261_248


def test_what_cannot_be_the_bytes_of_the_weights_is_refused():
    shape = find_model("llama-3-8b").shape
    for stored in (0, 1_000, 10**12):
        with pytest.raises(PlanError, match="for each of its 8,030,261,248 parameters"):
            plan_memory(shape, Deployment(100), [], weight_bytes=stored)
        assert plan_memory(shape, Deployment(100, dtype="fp8"), [], weight_bytes=stored)


def test_quantised_weights_are_counted_if_their_bits_are_known():
    config = find_model("llama-3-8b").config
    quantized = {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    shape = shape_of(quantized, "small")
    counted = plan_memory(shape, Deployment(100), [])
    assert counted["weights"]["bytes"] == 8_030_261_248 // 2
    assert any("quantised (awq): 4 bits each" in note for note in counted["weights"]["notes"])
    stored = plan_memory(shape, Deployment(100), [], weight_bytes=5_700_000_000)
    assert (stored["weights"]["bytes"], stored["weights"]["dtype"]) == (5_700_000_000, None)
    assert counted["deployment"]["kv_dtype"] == stored["deployment"]["kv_dtype"] == "bfloat16"
    asked = plan_memory(shape, Deployment(100, dtype="float16"), [])
    assert asked["weights"]["bytes"] == 8_030_261_248 * 2
    unknown = shape_of({**config, "quantization_config": {"quant_method": "quanto"}}, "small")
    with pytest.raises(PlanError, match=r"small are quantised \(quanto\).* give the folder"):
        plan_memory(unknown, Deployment(100), [])
    assert preset("deepseek-v3", 100)["weights"]["bytes"] == 671_026_404_352


def test_the_speed_of_all_that_fit_is_that_of_so_large_a_batch():
    compression = make_compression("snapkv", 512)
    given = {"kv_memory": 10 * 2**30, "bandwidth": 10**12}
    record = preset("llama-3-8b", 8_192, compression, **given)
    for plan in (record["full"], record["plans"][0]):
        fit = plan["requests_one_by_one"]
        alike = preset("llama-3-8b", 8_192, compression, batch=fit, **given)
        same = alike["full"] if plan is record["full"] else alike["plans"][0]
        assert plan["tokens_per_second_of_all_that_fit"] == same["tokens_per_second_at_most"]
    none = preset("llama-3-8b", 8_192, kv_memory=2**20, bandwidth=10**12)["full"]
    assert none["tokens_per_second_of_all_that_fit"] is None


def test_of_a_model_of_text_and_images_only_the_text_model_is_read_while_decoding():
    text = {**find_model("gemma-3-4b").config, "model_type": "gemma3_text"}
    shape = shape_of({"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}, "both")
    record = plan_memory(shape, Deployment(100), [], weight_bytes=8_600_158_944)
    assert record["weights"]["bytes"] == 8_600_158_944
    assert record["full"]["decode_weight_bytes"] == 2 * shape.decode_parameters < 8_000_000_000


def test_a_model_whose_layers_all_slide_is_planned_but_not_compressed():
    config = {**find_model("mistral-7b").config, "sliding_window": 4_096}
    shape = shape_of(config, "sliding")
    record = plan_memory(shape, Deployment(10_000), [])
    assert record["full"]["kv_bytes_request"] == 4_095 * 131_072
    with pytest.raises(PlanError, match="no layer that could be compressed: sliding windows"):
        plan_memory(shape, Deployment(10_000), [make_compression("snapkv", 128)])


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("llama-3-8b", {"context": 0}, "context is 0; it must be a whole number from 1"),
        ("llama-3-8b", {"context": -5}, "context is -5"),
        ("llama-3-8b", {"context": 10**9}, "to 100,000,000"),
        ("llama-3-8b", {"context": 1.5}, "whole number"),
        ("llama-3-8b", {"batch": 0}, "batch is 0"),
        ("llama-3-8b", {"max_new_tokens": -1}, "from 0"),
        ("llama-3-8b", {"tensor_parallel": 0}, "tensor_parallel is 0"),
        ("llama-3-8b", {"gpu_memory": 0}, "gpu_memory is 0"),
        ("llama-3-8b", {"bandwidth": 0}, "bandwidth is 0"),
        ("llama-3-8b", {"utilization": 0.0}, "above 0 and at most 1"),
        ("llama-3-8b", {"utilization": 1.1}, "above 0 and at most 1"),
        ("llama-3-8b", {"dtype": "int3"}, "choose one of float32, bfloat16"),
        (
            "llama-3-8b",
            {"kv_dtype": "int4"},
            "choose one of float32, bfloat16, float16, fp8",
        ),
        ("llama-3-8b", {"gpu_memory": 10**11, "kv_memory": 10**9}, "both given"),
        ("llama-3-70b", {"gpu_memory": 80 * 10**9}, "give --tensor-parallel 2 or more"),
        ("qwen2.5-7b", {"gpu_memory": 8 * 10**9}, "give --tensor-parallel 4 or more"),
        ("qwen2.5-7b", {"gpu_memory": 10**8}, "each GPU\\); give larger GPUs or a smaller"),
    ],
)
def test_absurd_sizes_are_refused_in_a_sentence(name, arguments, words):
    with pytest.raises(PlanError, match=words):
        preset(name, **{"context": 1_000, **arguments})


def test_what_does_not_fit_the_model_is_refused():
    with pytest.raises(PlanError, match="MLA"):
        preset("deepseek-v3", 1_000, make_compression("snapkv", 128))
    with pytest.raises(BudgetError, match="has 3 entries, but the model has 32"):
        preset("llama-3-8b", 1_000, make_compression("snapkv", layer_budgets=[100, 90, 80]))
    with pytest.raises(ProfileError, match="number of layers is 4, but this model's is 32"):
        preset("llama-3-8b", 1_000, make_compression("snapkv", 128, profile=profile()))
    with pytest.raises(MethodError, match="known after the prompt only"):
        preset("llama-3-8b", 1_000, make_compression("snapkv", 128, allocation="entropy"))
    renumbered = make_compression("streamingllm-renumbered", 128)
    with pytest.raises(MethodError, match="several pieces"):
        preset("llama-3-8b", 1_000, renumbered, prefill_chunk=100)
    odd = shape_of({**find_model("llama-3-8b").config, "dtype": "float4"}, "odd")
    with pytest.raises(PlanError, match="type 'float4'"):
        plan_memory(odd, Deployment(100), [])


def test_a_profile_makes_the_planned_schedule():
    shape = find_model("smollm2-135m").shape
    from pyramidkv.model_shape import shape_fingerprint

    effective = [100.0] + [10.0] * 29
    own = profile(effective, shape_fingerprint(shape))
    record = plan_memory(shape, Deployment(2_000), [make_compression("snapkv", 128, profile=own)])
    schedule = record["plans"][0]["schedule"]
    assert sum(schedule) == 30 * 128
    assert schedule[0] > 3 * schedule[1]


def test_planning_needs_no_torch():
    code = (
        "import sys; from pyramidkv.planning import plan_memory; "
        "from pyramidkv.deployment import Deployment; "
        "from pyramidkv.model_source import find_model; "
        "from pyramidkv.compression import make_compression; "
        "plan_memory(find_model('llama-3-8b').shape, Deployment(8192), "
        "[make_compression('pyramidkv', 512)]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
