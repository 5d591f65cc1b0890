"""The registry: names, defaults, options, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pyramidkv.budgets import BudgetError
from pyramidkv.compression import describe_total, make_compression
from pyramidkv.method_options import MethodError, Options
from pyramidkv.methods import METHODS, get_method


def test_every_method_of_the_field_is_there():
    assert list(METHODS) == [
        "full",
        "streamingllm",
        "streamingllm-renumbered",
        "h2o",
        "snapkv",
        "pyramidkv",
        "adakv",
        "pyramidkv-ada",
        "global",
        "snapkv-paper",
        "pyramidkv-paper",
        "pyramidkv-official",
    ]


def test_defaults_are_the_documented_ones():
    for name in ("snapkv", "pyramidkv"):
        options = METHODS[name].options
        assert (options.window_size, options.sink_tokens) == (32, 4)
        assert (options.pooling, options.kernel_size, options.group_reduce) == ("max", 31, "max")
    for name in ("snapkv-paper", "pyramidkv-paper", "pyramidkv-official"):
        options = METHODS[name].options
        assert (options.window_size, options.sink_tokens) == (8, 0)
        assert (options.pooling, options.kernel_size, options.group_reduce) == ("max", 7, "mean")
    assert METHODS["pyramidkv"].options.beta == 20


def test_methods_of_one_budget_keep_the_same_total():
    for prompt in (50, 200, 1000, 20_000):
        totals = {
            name: sum(make_compression(name, 128).schedule(32, prompt))
            for name, method in METHODS.items()
            if method.evicts and name not in ("pyramidkv-official", "global")
        }
        assert set(totals.values()) == {32 * min(128, prompt)}, totals


def test_the_official_budgets_say_how_much_they_overspend():
    schedule = make_compression("pyramidkv-official", 128).schedule(32, 4000)
    assert "4,272 tokens, +4.3%" in describe_total(schedule, 128, 4000)
    exact = make_compression("pyramidkv", 128).schedule(32, 4000)
    assert "exactly 32 x 128" in describe_total(exact, 128, 4000)


def test_full_keeps_everything():
    assert make_compression("full").schedule(4, 77) == [77] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "snapkw", "budget": 64}, "unknown method 'snapkw'; the methods are: full, "),
        ({"budget": 64, "compression_ratio": 0.5}, "both given"),
        ({}, "neither given"),
        ({"budget": 35}, "smallest possible budget is 36"),
        ({"budget": 0}, "smallest possible budget is 36"),
        ({"budget": -5}, "smallest possible budget is 36"),
        ({"compression_ratio": 1.0}, "at least 0 and below 1"),
        ({"compression_ratio": -0.1}, "at least 0 and below 1"),
        ({"budget": 64, "kernel_size": 4}, "odd number"),
        ({"budget": 64, "pooling": "median"}, "choose one of max, avg"),
        ({"budget": 64, "group_reduce": "sum"}, "choose one of mean, max"),
        ({"budget": 64, "window_size": -1}, "0 or more"),
        ({"budget": 64, "window_size": 0}, "at least 1"),
        ({"budget": 64, "beta": 0.5}, "at least 1"),
        ({"budget": 64, "windowsize": 8}, "no option 'windowsize'; its options are: allocation, "),
        ({"method": "streamingllm", "budget": 64, "kernel_size": 3}, "no option 'kernel_size'"),
        ({"method": "full", "budget": 64}, "keeps everything"),
        ({"budget": 64, "gamma": 2.0}, "gamma means nothing to 'pyramid' budgets"),
        ({"method": "snapkv", "budget": 64, "beta": 5}, "beta means nothing to 'uniform'"),
        ({"budget": "64"}, "a whole number of tokens"),
        ({"budget": 64.5}, "a whole number of tokens"),
        ({"compression_ratio": "0.9"}, "it is a number"),
        ({"layer_budgets": "64,64"}, "a list of whole numbers"),
        ({"layer_budgets": 64}, "layer_budgets is 64; it is a list of whole numbers"),
        ({"method": None, "budget": 64}, "give a method's name"),
        ({"budget": 64, "allocation": "list"}, "go together"),
        ({"budget": 64, "layer_budgets": [64, 64]}, "takes neither"),
        ({"budget": 64, "allocation": "power", "c_min": 20}, "at least 36"),
        ({"budget": 64, "allocation": "power", "c_min": 65}, "below c_min"),
    ],
)
def test_mistakes_are_refused_in_one_sentence(arguments, words):
    with pytest.raises((MethodError, BudgetError)) as caught:
        make_compression(**arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_ratio_that_leaves_less_than_the_window_is_refused_not_raised():
    compression = make_compression("pyramidkv", compression_ratio=0.9)
    assert sum(compression.schedule(4, 1000)) == 400
    with pytest.raises(BudgetError, match="leaves 10 of 100 prompt tokens"):
        compression.schedule(4, 100)
    with pytest.raises(BudgetError, match="leaves 2 of 20 prompt tokens"):
        compression.schedule(4, 20)


def test_ratio_zero_keeps_everything_at_any_length():
    compression = make_compression("snapkv", compression_ratio=0)
    for prompt in (1, 20, 36, 500):
        assert compression.schedule(3, prompt) == [prompt] * 3


def test_options_are_checked_when_made():
    with pytest.raises(MethodError, match="sink_tokens is -1"):
        Options(sink_tokens=-1)


def test_a_methods_options_can_be_changed_without_changing_the_method():
    changed = get_method("pyramidkv", window_size=8)
    assert changed.options.window_size == 8
    assert METHODS["pyramidkv"].options.window_size == 32
    again = make_compression(changed, 64, sink_tokens=0)
    assert again.method.options.protected == 8


def test_parameters_are_plain_values_for_a_record():
    parameters = make_compression("pyramidkv", 64).parameters()
    assert parameters["method"] == "pyramidkv"
    assert parameters["budget"] == 64
    assert parameters["beta"] == 20
    assert "gamma" in parameters


def test_listing_methods_needs_no_torch():
    code = (
        "import sys, pyramidkv.methods, pyramidkv.cli; "
        "from pyramidkv.compression import make_compression as make; "
        "make('pyramidkv', 64).schedule(4, 99); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
