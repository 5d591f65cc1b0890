"""vLLM itself, in this process: its tokens are those of the transformers engine, whatever happens.

The reference keeps, layer by layer, as many tokens as the plugin does.
"""

from __future__ import annotations

import os

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import gc
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import prompt_ids, tiny_model
from transformers import AutoModelForCausalLM

vllm = pytest.importorskip("vllm", reason="needs vLLM (make test-vllm)")

import pyramidkv
from pyramidkv.support import full_attention_layers
from pyramidkv.vllm.checks import settings_of
from pyramidkv.vllm.settings import KEY, ServingError, read_settings

LAYERS, BLOCK = 4, 32
SHAPE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LENGTHS = [200, 333, 96, 64, 20, 401, 257, 130]
BUDGET = {"budget": 64, "window_size": 16, "kernel_size": 7}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    tiny_model("llama", "sdpa", **SHAPE, num_hidden_layers=LAYERS).save_pretrained(path)
    return str(path)


def prompts(seed=0, lengths=LENGTHS):
    return [prompt_ids(n, seed=seed + i)[0][0].tolist() for i, n in enumerate(lengths)]


def start(folder, given, **options):
    """Start vLLM with the plugin, or without it if nothing is given."""
    if given is not None:
        options |= {
            "worker_cls": "pyramidkv.vllm.worker.CompressedCPUWorker",
            "scheduler_cls": "pyramidkv.vllm.scheduling.CompressedScheduler",
            "additional_config": {KEY: given},
        }
    options = {"max_num_seqs": 8, "max_model_len": 640, "enforce_eager": True} | options
    return vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK,
        gpu_memory_utilization=0.1,
        disable_log_stats=False,
        **options,
    )


@pytest.fixture
def serve(folder):
    """Starts vLLM; what it started ends with the test."""
    started = []

    def remembering(given=BUDGET, **options):
        started.append(start(folder, given, **options))
        return started[-1]

    yield remembering
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    gc.collect()


def generate(llm, asked, steps=12):
    parameters = vllm.SamplingParams(
        temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False
    )
    return llm.generate([{"prompt_token_ids": ids} for ids in asked], parameters, use_tqdm=False)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


_answers: dict[object, list[int]] = {}


def expected(folder, asked, given=BUDGET, steps=12):
    """What the transformers engine generates, keeping what the plugin keeps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    depth = len(full_attention_layers(model.config))
    settings = read_settings(given, depth)
    options = {
        name: value
        for name, value in given.items()
        if name in ("window_size", "kernel_size", "sink_tokens")
    }
    results = []
    for ids in asked:
        key = (folder, str(given), steps, tuple(ids))
        if key not in _answers:
            kept = settings.kept(len(ids), BLOCK)
            layers = [count for count in kept for _ in range(depth // settings.groups)]
            cache = pyramidkv.CompressedCache(
                model, given.get("method", "pyramidkv"), layer_budgets=layers, **options
            )
            prompt = torch.tensor([ids])
            whole = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=cache,
                max_new_tokens=steps,
                do_sample=False,
                eos_token_id=None,
            )
            _answers[key] = whole[0, len(ids) :].tolist()
        results.append(_answers[key])
    return results


def free_blocks(llm):
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize(
    "given",
    [
        BUDGET,
        {**BUDGET, "groups": 2},
        {**BUDGET, "method": "snapkv"},
        {**BUDGET, "allocation": "power", "gamma": 2.0},
        {"method": "snapkv", "layer_budgets": [150, 60, 40, 40], "window_size": 16},
        {"method": "streamingllm", "budget": 50},
        {**BUDGET, "min_prompt": 250},
    ],
    ids=str,
)
def test_alone_and_batched_its_tokens_are_those_of_the_transformers_engine(serve, folder, given):
    llm = serve(given, enable_prefix_caching=False)
    before = free_blocks(llm)
    wanted = expected(folder, prompts(), given)
    assert tokens(generate(llm, prompts())) == wanted
    for ids, answer in zip(prompts(), wanted, strict=True):
        assert tokens(generate(llm, [ids])) == [answer]
    assert free_blocks(llm) == before


def test_layers_with_a_sliding_window_are_left_alone(tmp_path):
    """Every other layer has a window of 16 tokens; in a process of its own, for another model."""
    folder = str(tmp_path / "hybrid")
    tiny_model("gemma3_text", "eager", **SHAPE).save_pretrained(folder)
    given = {**BUDGET, "groups": 2}
    for chunk in (2048, 64):
        answers, _ = in_own_process(
            tmp_path, folder, prompts(), 12, given, max_num_batched_tokens=chunk
        )
        assert answers == expected(folder, prompts(), given)


def test_with_room_for_the_prompt_it_is_stock(serve, folder, tmp_path):
    asked = prompts()
    stock, _ = in_own_process(tmp_path, folder, asked, 12, given=None)
    assert tokens(generate(serve({"budget": 500}), asked)) == stock
    assert tokens(generate(serve({"budget": 64, "min_prompt": 500}), asked)) == stock


AFTER_STOCK = """
import json, sys
sys.path.insert(0, {tests!r})
import test_serving_vllm as here
stock = here.start({folder!r}, None)
stock.llm_engine.engine_core.shutdown()
llm = here.start({folder!r}, here.BUDGET)
print(json.dumps(here.tokens(here.generate(llm, here.prompts()))))
"""


def after_stock(folder, **environment):
    code = AFTER_STOCK.format(tests=os.path.dirname(__file__), folder=folder)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment
    )


def test_it_can_follow_stock_vllm_in_one_process(folder):
    """vLLM remembers its choice of attention: ours, which did nothing for the first."""
    done = after_stock(folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == expected(folder, prompts())


def test_after_stock_vllm_without_plugins_it_refuses(folder):
    """Or blocks would be freed without compressing."""
    done = after_stock(folder, VLLM_PLUGINS="")
    assert done.returncode != 0
    assert "vLLM uses CPUAttentionBackendImpl as its attention; if it was started" in done.stderr


def test_settings_without_our_worker_are_refused(folder):
    """Or the cache would stay whole without a word."""
    with pytest.raises(ServingError, match="worker and scheduler of pyramidkv need each other"):
        start(folder, None, additional_config={KEY: BUDGET})


@pytest.mark.parametrize("chunk", [64, 96, 256, 2048])
def test_chunks_of_any_size_change_nothing(serve, folder, chunk):
    llm = serve(max_num_batched_tokens=chunk, enable_prefix_caching=False)
    assert tokens(generate(llm, prompts())) == expected(folder, prompts())


def test_prefixes_computed_before_are_taken_and_change_nothing(serve, folder):
    llm = serve(enable_prefix_caching=True)
    shared = prompt_ids(300, seed=99)[0][0].tolist()
    asked = [shared[: 300 - 7 * i] + ids for i, ids in enumerate(prompts(50, [60, 90, 40, 120]))]
    wanted = expected(folder, asked)
    for _ in range(3):
        outputs = generate(llm, asked)
        assert tokens(outputs) == wanted
    hits = [output.num_cached_tokens for output in outputs]
    settings = read_settings(BUDGET, LAYERS)
    for ids, hit in zip(asked, hits, strict=True):
        least = min(
            settings.skipped_blocks(group, len(ids) // BLOCK * BLOCK, BLOCK)
            for group in range(settings.groups)
        )
        assert hit == least * BLOCK > 0
    assert tokens(generate(llm, prompts())) == expected(folder, prompts())


def test_preempted_requests_go_on_as_if_they_had_not_been(serve, folder):
    """A pool so small that requests are sent back while they generate."""
    llm = serve(num_gpu_blocks_override=88, enable_prefix_caching=True)
    preempted = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counting(request, *args, **kwargs):
        preempted.append(request.num_output_tokens)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counting
    asked = prompts(7, [200, 190, 210, 180, 60, 200, 70, 220])
    before = free_blocks(llm)
    assert tokens(generate(llm, asked, 90)) == expected(folder, asked, steps=90)
    assert any(count > 0 for count in preempted)
    assert free_blocks(llm) == before


OWN_PROCESS = """
import json, sys
sys.path.insert(0, {tests!r})
import test_serving_vllm as here

if __name__ == "__main__":  # workers import this file, too
    given = json.loads(sys.argv[1])
    llm = here.start(given["folder"], given["given"], **given["options"])
    answers = here.tokens(here.generate(llm, given["asked"], given["steps"]))
    counters = {{m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}}
    print(json.dumps([answers, counters.get("vllm:spec_decode_num_accepted_tokens")]))
    llm.llm_engine.engine_core.shutdown()
"""


def in_own_process(tmp_path, folder, asked, steps, given=BUDGET, several=False, **options):
    """Return what vLLM answers in a process of its own, and guessed tokens that were right."""
    script = tmp_path / "serve.py"
    script.write_text(OWN_PROCESS.format(tests=os.path.dirname(__file__)))
    asked_for = {
        "folder": folder,
        "given": given,
        "asked": asked,
        "steps": steps,
        "options": options,
    }
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(several))
    done = subprocess.run(
        [sys.executable, script, json.dumps(asked_for)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_guessed_tokens_change_nothing(folder, tmp_path):
    """In a process of its own: what vLLM loads for guessing keeps it from starting again."""
    asked = [*(ids[:40] * 5 for ids in prompts(3, [40, 40, 40])), *prompts()]
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    answers, accepted = in_own_process(tmp_path, folder, asked, 60, speculative_config=guessing)
    assert answers == expected(folder, asked, steps=60)
    assert accepted > 0


def test_two_workers_that_share_each_layer_change_nothing(folder, tmp_path):
    answers, _ = in_own_process(
        tmp_path, folder, prompts(), 12, several=True, tensor_parallel_size=2
    )
    assert answers == expected(folder, prompts())


def test_a_compiled_model_changes_nothing(folder, tmp_path):
    answers, _ = in_own_process(tmp_path, folder, prompts(), 12, enforce_eager=False)
    assert answers == expected(folder, prompts())


def test_blocks_are_freed_as_soon_as_the_prompt_is_complete(serve):
    llm = serve(enable_prefix_caching=False)
    engine, before = llm.llm_engine, free_blocks(llm)
    parameters = vllm.SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, detokenize=False
    )
    prompt = prompts(0, [500])[0]
    engine.add_request("one", {"prompt_token_ids": prompt}, parameters)
    engine.step()
    engine.step()
    settings = read_settings(BUDGET, LAYERS)
    held = sum(
        -(-(len(prompt) + 1) // BLOCK) - settings.skipped_blocks(group, len(prompt), BLOCK)
        for group in range(settings.groups)
    )
    assert before - free_blocks(llm) == held < settings.groups * (len(prompt) // BLOCK) / 3
    engine.abort_request(["one"])
    engine.step()
    assert free_blocks(llm) == before


def test_several_answers_with_seeds_and_log_probabilities(serve):
    llm = serve()
    parameters = vllm.SamplingParams(
        temperature=1, seed=3, n=3, logprobs=2, max_tokens=6, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts()]
    first, second = (llm.generate(asked, parameters, use_tqdm=False) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert [list(o.token_ids) for o in a.outputs] == [list(o.token_ids) for o in b.outputs]
        assert len({tuple(o.token_ids) for o in a.outputs}) > 1
        assert all(len(o.logprobs) == 6 for o in a.outputs)


@pytest.mark.parametrize(
    "options", [{"max_num_batched_tokens": 64}, {"num_gpu_blocks_override": 88}], ids=str
)
def test_seeds_hold_whether_prompts_take_steps_or_are_computed_anew(serve, options):
    """vLLM on CPUs would end here, since it winds generators back in a way they do not have."""
    parameters = vllm.SamplingParams(
        temperature=1, seed=3, max_tokens=90, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": ids} for ids in prompts(7, [200, 190, 210, 180, 60, 200])]
    wanted = tokens(serve().generate(asked, parameters, use_tqdm=False))
    llm = serve(**options)
    assert tokens(llm.generate(asked, parameters, use_tqdm=False)) == wanted
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert (counts["vllm:num_preemptions"] > 0) == ("num_gpu_blocks_override" in options)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"budget": 10}, {}, "the smallest possible budget is 36"),
        (BUDGET, {"max_num_batched_tokens": 20}, "a window of 16 tokens beside 7 other requests"),
        (BUDGET, {"long_prefill_token_threshold": 9}, "long_prefill_token_threshold is 9"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(serve, given, options, message):
    with pytest.raises(Exception, match=message):
        serve(given, **options)


def test_prompts_that_grow_are_refused(serve):
    scheduler = serve().llm_engine.engine_core.engine_core.scheduler
    with pytest.raises(ServingError, match="cannot serve streaming sessions \\(request one\\)"):
        scheduler.add_request(SimpleNamespace(request_id="one", resumable=True))
    assert not scheduler.requests


def test_without_settings_it_says_so():
    config = type("Config", (), {"additional_config": {}})()
    with pytest.raises(ServingError, match="the plugin has no settings; give --additional-config"):
        settings_of(config)
