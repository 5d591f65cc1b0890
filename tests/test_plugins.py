"""Methods from a user's file: registered, refused, withdrawn, checked; results as built in."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace

import plugin_files
import pytest
import torch
from tiny import prompt_ids, tiny_model

import pyramidkv
from pyramidkv import Method, MethodError, Options, PluginError, ScoreError, register_method
from pyramidkv.compression import Compression, describe_method, make_compression, without_amount
from pyramidkv.many import compress_many
from pyramidkv.methods import METHODS
from pyramidkv.plugins import describe_plugins, load_plugin
from pyramidkv.scores import AccumulatedAttention, WindowAttention

SMALL = {"window_size": 6, "kernel_size": 5}


@pytest.fixture(autouse=True)
def registry():
    before = dict(METHODS)
    yield before
    METHODS.clear()
    METHODS.update(before)


def make(options):
    return WindowAttention(options.window_size)


MINE = Method("mine", "keeps what I say", "this test", make)


def test_a_registered_method_is_named_like_the_others():
    assert register_method(MINE) is MINE
    assert register_method(replace(MINE)) == MINE  # the same again
    compression = make_compression("mine", 64, allocation="pyramid", window_size=8)
    assert describe_method(compression.parameters()) == "mine (pyramid) 64"
    assert sum(compression.schedule(4, 500)) == 4 * 64


def test_what_evicts_nothing_has_no_use_for_budgets_whatever_it_supports():
    register_method(replace(MINE, make_score=None))
    for amounts in ({"decode_budget": 64}, {"allocation": "entropy"}):
        with pytest.raises(MethodError, match="mine does not support (a decode|budgets by)"):
            make_compression("mine", **amounts)
    with pytest.raises(MethodError, match="mine does not support a decode budget; streamingllm, h"):
        Compression(METHODS["mine"], decode_budget=64)


def test_what_renumbers_does_so_once_whatever_it_supports():
    register_method(replace(MINE, renumber=True))
    with pytest.raises(MethodError, match="mine does not support a decode budget"):
        make_compression("mine", 64, decode_budget=64)
    with pytest.raises(MethodError, match="mine does not support budgets by the entropy"):
        make_compression("mine", 64, allocation="entropy")


@pytest.mark.parametrize("name", ["my-method", "m2", "2d", "top_k", "v1.5"])
def test_names_the_command_line_can_read_are_taken(name):
    assert register_method(replace(MINE, name=name)).name == name


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("mine", "'mine' is no method; give a pyramidkv.Method"),
        *(
            (replace(MINE, name=name), f"cannot have the name {name!r}; take lower-case")
            for name in ("a,b", "a:b", "a b", "Mine", "", "-a", "a-", "a--b", "a\n", "é", None, 3)
        ),
        (replace(MINE, name="snapkv"), "the name 'snapkv' is taken by another method; choose"),
        (replace(MINE, make_score="mean"), "make_score of mine is 'mean'; give a function"),
        (replace(MINE, options={}), "options of mine are {}; give pyramidkv.Options"),
        (replace(MINE, settable=frozenset({"size"})), "settable of mine is frozenset({'size'})"),
        (replace(MINE, settable={"beta"}), "give a frozenset of names among window_size, "),
        (replace(MINE, supports=frozenset({"flight"})), "among prefill chunks, decode budget, "),
    ],
)
def test_what_is_no_usable_method_is_refused_in_a_sentence(registry, method, words):
    with pytest.raises(MethodError) as caught:
        register_method(method)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert registry == METHODS


def test_a_file_is_loaded_once_and_again_when_it_changes(tmp_path):
    path = plugin_files.write(tmp_path / "m.py")
    assert load_plugin(path) == ["mine"]
    first = METHODS["mine"]
    assert load_plugin(str(path)) == ["mine"]
    assert METHODS["mine"] is first
    plugin_files.write(path, plugin_files.SNAPKV.replace('"mine"', '"other"'))
    assert load_plugin(path) == ["other"]
    assert "mine" not in METHODS
    assert describe_plugins([path, path]) == [
        {"file": "m.py", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    ]
    del METHODS["other"]
    assert load_plugin(path) == ["other"]


def test_two_files_of_one_name_are_both_described_in_a_fixed_order(tmp_path):
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        text = plugin_files.SNAPKV.replace('"mine"', f'"{name}"')
        paths.append(plugin_files.write(tmp_path / name / "m.py", text))
        assert load_plugin(paths[-1]) == [name]
    described = describe_plugins(paths)
    assert described == describe_plugins(paths[::-1])
    assert [told["file"] for told in described] == ["m.py", "m.py"]
    assert len({told["sha256"] for told in described}) == 2


HALF = plugin_files.SNAPKV + "\n{}\n"
LINE = plugin_files.SNAPKV.count("\n") + 2


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ("1 / 0", f"it raised ZeroDivisionError: division by zero (line {LINE} of 'm.py')"),
        ("raise RuntimeError", f"it raised RuntimeError (line {LINE} of 'm.py')"),
        ("raise RuntimeError('a\\nb')", "it raised RuntimeError: a (line"),
        ("import sys; sys.exit('bye')", "it raised SystemExit: bye (line"),
        ("def f(:", f"it raised SyntaxError: invalid syntax (line {LINE} of 'm.py')"),
        ("torch.zeros(2) @ torch.zeros(3)", f"(line {LINE} of 'm.py')"),
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be"),
        (
            "register_method(Method('snapkv', '', '', make))",
            f"MethodError: the name 'snapkv' is taken by another method; choose another name (line "
            f"{LINE} of",
        ),
    ],
)
def test_a_file_that_raises_leaves_nothing_behind(tmp_path, registry, last, words):
    path = plugin_files.write(tmp_path / "m.py", HALF.format(last))
    modules = set(sys.modules)
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            load_plugin(path)
        assert words in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert registry == METHODS
        assert not {name for name in set(sys.modules) - modules if "plugin" in name}


def test_a_change_that_fails_leaves_the_methods_of_before(tmp_path):
    path = plugin_files.write(tmp_path / "m.py")
    load_plugin(path)
    before = METHODS["mine"]
    plugin_files.write(path, HALF.format("1 / 0"))
    with pytest.raises(PluginError, match="ZeroDivisionError"):
        load_plugin(path)
    assert METHODS["mine"] is before


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("absent.py", None, "there is no file '{}'; give the Python file"),
        ("a" * 300 + ".py", None, "cannot read '{}': File name too long"),
        ("m.txt", "", "'{}' is no .py file; give the Python file"),
        ("m.py", "", "'{}' registers no method; let it call pyramidkv.register_method"),
        ("m.py", "\0", "SyntaxError"),
        ("m.py", "x = '\udcff'", "SyntaxError"),
    ],
)
def test_what_is_no_plugin_is_refused_in_a_sentence(tmp_path, registry, name, text, words):
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(PluginError) as caught:
        load_plugin(path)
    assert words.format(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert registry == METHODS


def test_a_folder_is_no_plugin(tmp_path):
    (tmp_path / "m.py").mkdir()
    with pytest.raises(PluginError, match="there is no file"):
        load_plugin(tmp_path / "m.py")


def test_a_name_that_is_no_utf_8_is_one(tmp_path):
    path = plugin_files.write(tmp_path / os.fsdecode(b"caf\xe9.py"))
    assert load_plugin(path) == ["mine"]


def test_registering_needs_no_torch(tmp_path):
    text = (
        "from pyramidkv import Method, Options, register_method\n"
        "register_method(Method('mine', '', '', lambda options: None))\n"
    )
    path = plugin_files.write(tmp_path / "m.py", text)
    code = (
        "import sys, pyramidkv; "
        f"assert pyramidkv.load_plugin({str(path)!r}) == ['mine']; "
        "from pyramidkv.compression import make_compression as make; "
        "assert sum(make('mine', 64).schedule(4, 99)) == 256; "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("amounts", [{"budget": 24}, {"budget": 24, "decode_budget": 24}])
def test_a_plugins_snapkv_keeps_what_snapkv_keeps(tmp_path, amounts):
    load_plugin(plugin_files.write(tmp_path / "m.py"))
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(80, 57)
    if "decode_budget" in amounts:
        ids, mask = ids[:1], mask[:1]
    texts, kept = [], []
    for name in ("snapkv", "mine"):
        cache = pyramidkv.CompressedCache(model, name, **amounts, **SMALL, decode_interval=None)
        out = model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=50, do_sample=False
        )
        texts.append(out.tolist())
        kept.append([layer.kept_positions().tolist() for layer in cache.compressed_layers])
    assert texts[0] == texts[1]
    assert kept[0] == kept[1]


def test_equal_scores_of_a_plugin_are_made_once(tmp_path):
    called = []

    @dataclass(frozen=True)
    class Counting:
        window: int

        def query_count(self, prompt_length):
            return 0

        def __call__(self, queries, keys, values, valid, scale, softcap=None):
            called.append(queries.shape[2])
            return keys.float().norm(dim=-1)

    for name in ("one", "two"):
        method = Method(name, "", "", lambda options: Counting(options.window_size))
        register_method(method)
    same = [make_compression(name, 24, **SMALL) for name in ("one", "two")]
    model = tiny_model("llama", "sdpa")
    (cache,) = compress_many(model, prompt_ids(80)[0], [same]).caches
    assert called == [0] * 4  # once per layer
    for layer in cache.compressed_layers:
        assert torch.equal(layer.kept_positions(0), layer.kept_positions(1))
    other = make_compression("two", 24, window_size=7)
    compress_many(model, prompt_ids(80)[0], [[*same, other]])
    assert len(called) == 4 + 8


def alone(model, ids, compression):
    with pyramidkv.compress(model, method=compression.method, budget=compression.budget):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)


def many(model, ids, compression):
    compress_many(model, ids, [[compression]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"result": "scores[..., 1:]"}, "the shape (1, 2, 79); return (1, 2, 80), one number for"),
        ({"result": "scores[0]"}, "the score of broken returned the shape (2, 80)"),
        ({"result": "scores.double()"}, "returned float64 on cpu; return float32 on cpu"),
        ({"result": "scores.long()"}, "returned int64 on cpu; return float32 on cpu"),
        ({"result": "scores.to('meta')"}, "returned float32 on meta; return float32 on cpu"),
        ({"result": "scores * float('nan')"}, "the score of broken returned NaN; return numbers"),
        ({"result": "scores.tolist()"}, "the score of broken returned a list; return a float32"),
        ({"result": "scores / none"}, "the score of broken raised NameError: name 'none' is not"),
        ({"result": "1 / 0"}, "raised ZeroDivisionError: division by zero (line 13 of 'm.py')"),
        ({"count": "prompt_length + 1"}, "query_count of broken returned 81 for a prompt of 80 to"),
        ({"count": "-1"}, "query_count of broken returned -1 for a prompt of 80 tokens"),
        ({"count": "2.0"}, "query_count of broken returned 2.0"),
        ({"count": "1 / 0"}, "query_count of broken raised ZeroDivisionError"),
        (
            {"make": "1 / 0"},
            "make_score of broken raised ZeroDivisionError: division by zero (line",
        ),
        ({"make": "None"}, "make_score of broken returned None; return a score, which has"),
        ({"make": "dict"}, "make_score of broken returned <class 'dict'>; return a score"),
        ({"make": "type('S', (Broken,), {'__hash__': None})()"}, "the score of broken has no hash"),
    ],
)
@pytest.mark.parametrize("way", [alone, many])
def test_a_score_that_is_none_is_refused_in_a_sentence(tmp_path, given, words, way):
    load_plugin(plugin_files.broken(tmp_path / "m.py", **given))
    model = tiny_model("llama", "sdpa")
    with pytest.raises(ScoreError) as caught:
        way(model, prompt_ids(80)[0], make_compression("broken", 24, **SMALL))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    if way is alone:
        assert model.config._attn_implementation == "sdpa"


def test_scores_of_the_package_are_not_wrapped():
    for name in ("snapkv", "h2o", "streamingllm", "pyramidkv-official"):
        score = METHODS[name].build_score()
        assert type(score).__module__ == "pyramidkv.scores"
    assert METHODS["full"].build_score() is None


@dataclass(frozen=True)
class Sums(AccumulatedAttention):
    """H2O's score from outside of the package: it is checked, and still adds up."""

    spoilt: str = field(default="nothing")

    def accumulate(self, *arguments):
        result = super().accumulate(*arguments)
        return result[..., 1:] if self.spoilt == "accumulate" else result

    def reduce(self, sums):
        result = super().reduce(sums)
        return result.double() if self.spoilt == "reduce" else result


def test_a_score_of_sums_adds_up_as_a_built_in_one():
    register_method(replace(METHODS["h2o"], name="sums", make_score=lambda o: Sums(o.group_reduce)))
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(90)
    texts = []
    for name in ("h2o", "sums"):
        cache = pyramidkv.CompressedCache(model, name, decode_budget=24, window_size=6)
        cache.expect_prompt(mask)
        with torch.no_grad():
            for start in range(0, 90, 30):
                model(ids[:, start : start + 30], past_key_values=cache, use_cache=True)
            for step in range(70):
                model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
        texts.append([layer.kept_positions().tolist() for layer in cache.compressed_layers])
    assert texts[0] == texts[1]
    assert len(texts[0][0][0]) <= 24 + 32


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        ("accumulate", r"accumulate of sums returned the shape \(1, 2, 3, 29\); return"),
        ("reduce", "reduce of sums returned float64 on cpu; return float32"),
    ],
)
def test_sums_that_are_none_are_refused(spoilt, words):
    register_method(replace(METHODS["h2o"], name="sums", make_score=lambda o: Sums("mean", spoilt)))
    model = tiny_model("llama", "sdpa")
    ids, mask = prompt_ids(90)
    cache = pyramidkv.CompressedCache(model, "sums", 24, window_size=6)
    cache.expect_prompt(mask)
    with torch.no_grad(), pytest.raises(ScoreError, match=words):
        model(ids[:, :30], past_key_values=cache, use_cache=True)


def test_a_name_without_its_amount_does_not_depend_on_the_registry():
    register_method(MINE)
    arms = {}
    for rule in ("uniform", "pyramid"):
        for amount in ({"budget": 64}, {"compression_ratio": 0.9}):
            parameters = make_compression("mine", **amount, allocation=rule).parameters()
            arms[describe_method(parameters)] = parameters
    full = make_compression("full").parameters()
    del METHODS["mine"]
    told = [without_amount(name, parameters) for name, parameters in arms.items()]
    assert told == ["mine", "mine", "mine (pyramid)", "mine (pyramid)"]
    assert without_amount("full", full) == "full"


def test_options_are_exported():
    assert pyramidkv.Options is Options
    assert pyramidkv.Score.__module__ == pyramidkv.AccumulatingScore.__module__
