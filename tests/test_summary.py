"""Summaries: means, paired intervals and footprints, in numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pyramidkv.compression import make_compression
from pyramidkv.evaluation.runner import name_arms
from pyramidkv.evaluation.summary import summarise

COMPRESSIONS = name_arms(
    [
        make_compression("full"),
        *(make_compression(name, b) for b in (64, 128) for name in ("snapkv", "pyramidkv")),
    ]
)
ARMS = {name: compression.parameters() for name, compression in COMPRESSIONS.items()}
FOOTPRINTS = {"full": 1.0, "snapkv 64": 0.1, "pyramidkv 64": 0.1, "snapkv 128": 0.2,
              "pyramidkv 128": 0.21}  # fmt: skip


def lines(scores, task="find", length=2048):
    """A run of 4 layers and prompts of 1,000 tokens; scores by arm, in the order of samples."""
    count = len(scores["full"])
    return [
        {
            "task": task,
            "question": f"What is {i}?",
            "answers": [f"{i}"],
            "facts": {} if length is None else {"length": length, "tokens": length - 128},
            "arms": {
                name: {
                    "score": scores[name][i],
                    "kept_tokens": 4000 if name == "full" else 4 * int(name.split()[-1]),
                    "kept_bytes": 100,
                    "compressed_tokens": 1000,
                    "full_tokens": 4000,
                    "footprint": FOOTPRINTS[name],
                }
                for name in scores
            },
        }
        for i in range(count)
    ]


def scored(count=200, seed=1):
    """Scores that move together: the hard samples are hard for all."""
    rng = np.random.default_rng(seed)
    ease = rng.uniform(0, 1, count)
    loss = {"full": 0.0, "snapkv 64": 0.3, "pyramidkv 64": 0.4, "snapkv 128": 0.05,
            "pyramidkv 128": 0.2}  # fmt: skip
    return {
        name: np.clip(ease - amount + rng.normal(0, 0.02, count), 0, 1).tolist()
        for name, amount in loss.items()
    }


def test_means_are_those_of_the_samples():
    scores = scored()
    summary = summarise(lines(scores), ARMS)["all"]
    assert summary["samples"] == 200
    for name in ARMS:
        arm = summary["arms"][name]
        assert arm["score"] == pytest.approx(np.mean(scores[name]))
        assert arm["kept_tokens"] == (1000 if name == "full" else int(name.split()[-1]))
        assert (arm["kept_bytes"], arm["footprint"]) == (100, FOOTPRINTS[name])
    json.dumps(summary)


def test_intervals_cover_the_mean_and_paired_ones_are_narrower():
    summary = summarise(lines(scored()), ARMS)["all"]
    full = summary["arms"]["full"]
    snap = summary["arms"]["snapkv 128"]
    for arm in (full, snap):
        low, high = arm["interval"]
        assert low < arm["score"] < high
        assert 0.05 < high - low < 0.12  # about 4 standard errors of a uniform variable
    low, high = snap["difference_interval"]
    assert low < snap["difference"] < high < 0
    assert high - low < 0.2 * (full["interval"][1] - full["interval"][0])
    assert "difference" not in full


def test_an_interval_has_the_coverage_it_claims():
    """Of many runs whose true mean is known, about 95% cover it."""
    covered = 0
    for seed in range(100):
        values = np.random.default_rng(seed).integers(0, 2, 60).astype(float).tolist()
        summary = summarise(lines({"full": values}), {"full": ARMS["full"]}, seed)
        low, high = summary["all"]["arms"]["full"]["interval"]
        covered += low <= 0.5 <= high
    assert 88 <= covered <= 100


def test_samples_that_differ_in_length_alone_are_drawn_together():
    """Twice the same scores are no more certain than once."""
    scores = scored(60)
    once = summarise(lines(scores), ARMS)["all"]["arms"]
    both = summarise(lines(scores) + lines(scores, length=4096), ARMS)["all"]["arms"]
    others = summarise(lines(scores) + lines(scores, task="other"), ARMS)["all"]["arms"]
    for name in ARMS:
        assert both[name]["interval"] == pytest.approx(once[name]["interval"])
        width, wider = (np.ptp(arms[name]["interval"]) for arms in (others, both))
        assert 0.6 < width / wider < 0.82  # 1 / sqrt(2)
    snap = both["snapkv 64"]["difference_interval"]
    assert snap == pytest.approx(once["snapkv 64"]["difference_interval"])


def test_draws_of_different_sizes_weigh_as_their_samples_do():
    """One question at three lengths, wrong, and one at a single length, right."""
    made = [line for length in (1, 2, 3) for line in lines({"full": [0.0]}, length=length)]
    made += [lines({"full": [1.0, 1.0]}, length=1)[1]]
    summary = summarise(made, {"full": ARMS["full"]})["all"]
    assert summary["arms"]["full"]["score"] == 0.25
    assert summary["arms"]["full"]["interval"] == [0.0, 1.0]
    unrelated = [line | {"facts": {}} for line in made]  # such as LongBench's
    low, high = summarise(unrelated, {"full": ARMS["full"]})["all"]["arms"]["full"]["interval"]
    assert (low, high) == (0.0, 0.75)


def test_samples_of_one_length_are_never_one_draw():
    """Many questions are worded alike, in files and where the answer is one of few."""
    same = {"question": "What is it?", "answers": ["b"]}
    scores = {"full": [0.0, 1.0] * 10}
    arms = {"full": ARMS["full"]}
    for length in (None, 2048):
        expected = summarise(lines(scores, length=length), arms)["all"]
        alike = [line | same for line in lines(scores, length=length)]
        assert summarise(alike, arms)["all"] == expected
    both = [line | same for length in (1, 2) for line in lines(scores, length=length)]
    assert summarise(both, arms)["all"]["arms"]["full"]["interval"] == pytest.approx(
        expected["arms"]["full"]["interval"]
    )


def test_methods_of_the_same_budget_are_compared_each_pair_once():
    scores = scored()
    pairs = summarise(lines(scores), ARMS)["all"]["pairs"]
    assert [(pair["first"], pair["second"]) for pair in pairs] == [
        ("snapkv 64", "pyramidkv 64"),
        ("snapkv 128", "pyramidkv 128"),
    ]
    for pair in pairs:
        change = np.mean(scores[pair["first"]]) - np.mean(scores[pair["second"]])
        assert pair["difference"] == pytest.approx(change)
        low, high = pair["difference_interval"]
        assert 0 < low < change < high


def test_the_critical_footprint_is_the_smallest_that_is_enough():
    level = {"full": [1.0], "snapkv 64": [0.89], "pyramidkv 64": [0.9], "snapkv 128": [0.95],
             "pyramidkv 128": [1.0]}  # fmt: skip
    summary = summarise(lines(level), ARMS)["all"]
    assert summary["critical_footprint"] == {"snapkv": 0.2, "pyramidkv": 0.1}
    none = {**level, "snapkv 128": [0.5]}
    assert summarise(lines(none), ARMS)["all"]["critical_footprint"]["snapkv"] is None
    nothing = {name: [0.0] for name in level}
    assert summarise(lines(nothing), ARMS)["all"]["critical_footprint"] == {
        "snapkv": None,
        "pyramidkv": None,
    }


def test_groups_are_all_each_task_and_each_length():
    scores = scored(10)
    cases = [("find", 2048), ("find", 4096), ("sum", None)]
    mixed = [line for task, length in cases for line in lines(scores, task, length)]
    summary = summarise(mixed, ARMS)
    assert {name: group["samples"] for name, group in summary.items()} == {
        "all": 30,
        "find": 20,
        "find, 2,048 tokens": 10,
        "find, 4,096 tokens": 10,
        "sum": 10,
    }


def test_the_same_seed_gives_the_same_intervals():
    first, again = (summarise(lines(scored()), ARMS, seed=4) for _ in range(2))
    assert first == again
    assert first != summarise(lines(scored()), ARMS, seed=5)


def test_allocations_of_one_method_have_critical_footprints_of_their_own():
    compressions = [
        make_compression("full"),
        make_compression("snapkv", 64),
        make_compression("snapkv", 64, allocation="pyramid"),
    ]
    arms = {n: c.parameters() for n, c in name_arms(compressions).items()}
    scores = {"full": [1.0], "snapkv 64": [0.5], "snapkv (pyramid) 64": [1.0]}
    kept = {
        "kept_tokens": 256,
        "kept_bytes": 100,
        "compressed_tokens": 1000,
        "full_tokens": 4000,
        "footprint": 0.1,
    }
    answered = {name: {"score": values[0], **kept} for name, values in scores.items()}
    made = [{"task": "all", "facts": {}, "arms": answered}]
    summary = summarise(made, arms)
    assert summary["all"]["critical_footprint"] == {"snapkv": None, "snapkv (pyramid)": 0.1}
    assert summary["all"]["samples"] == 1  # a task of that name does not count twice
