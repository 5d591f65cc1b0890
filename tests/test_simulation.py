"""The simulation: exact schedules, masses and counts, who wins where, and the command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from itertools import pairwise
from math import log2
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pyramidkv import cli
from pyramidkv.budgets import BudgetError, Entropy, Power, Pyramid
from pyramidkv.errors import PyramidKVError
from pyramidkv.plots import style
from pyramidkv.plots.simulation import draw
from pyramidkv.simulation import (
    PROFILES,
    AttentionModel,
    SimulationError,
    draw_layers,
    simulate,
)

SMALL = AttentionModel(layers=5, length=60, needles=9, sink_tokens=2, window_size=6)
NAMES = ["uniform", "pyramid", "power", "entropy", "inverted"]


def seeds(seed: int, trials: int) -> list[np.random.SeedSequence]:
    return np.random.SeedSequence(seed).spawn(trials)


def softmax_by_groups(layer) -> np.ndarray:
    """The attention of one layer in float64, from what the model says it is."""
    model = layer.model
    relevance = layer.relevance.astype(np.float64)
    parts = []
    for first, last, mass in (
        (0, model.sink_tokens, model.sink_mass),
        (model.sink_tokens, model.length - model.window_size, None),
        (model.length - model.window_size, model.length, model.recent_mass),
    ):
        if mass is None:
            mass = 1 - model.sink_mass - model.recent_mass
        weights = np.exp(layer.concentration * relevance[first:last])
        parts.append(mass * weights / weights.sum())
    return np.concatenate(parts)


def test_schedules_are_those_of_the_budgets_exact_and_strictly_decreasing():
    record = simulate(AttentionModel(), 512, trials=1)
    schedules = {name: result["schedule"] for name, result in record["allocations"].items()}
    assert list(schedules) == NAMES
    assert all(sum(schedule) == 16_384 for schedule in schedules.values())
    assert all(result["sum"] == 16_384 for result in record["allocations"].values())
    pyramid = schedules["pyramid"]
    assert all(a > b for a, b in pairwise(pyramid))
    assert (pyramid[0], pyramid[-1]) == (964, 60)
    assert pyramid == Pyramid(20).schedule(32, 512, 4096, 36)
    assert schedules["inverted"] == pyramid[::-1]
    assert schedules["power"] == Power(1.0).schedule(32, 512, 4096, 36)
    measured = Entropy(tuple(record["effective_tokens_by_layer"]))
    assert schedules["entropy"] == measured.schedule(32, 512, 4096, 36)
    assert [name for name, r in record["allocations"].items() if r["control"]] == ["inverted"]


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(9, 400), st.integers(8, 500), st.sampled_from(PROFILES))
def test_every_allocation_has_the_same_exact_total(layers, length, budget, profile):
    model = AttentionModel(
        layers, length, 1, needle_depth_profile=profile, sink_tokens=3, window_size=5
    )
    record = simulate(model, budget, trials=1)
    for result in record["allocations"].values():
        assert sum(result["schedule"]) == result["sum"] == layers * min(budget, length)
        assert 8 <= min(result["schedule"]) <= max(result["schedule"]) <= length
        assert 0 <= result["recall"] <= 1


@given(st.integers(1, 60), st.integers(1, 200), st.sampled_from(PROFILES))
def test_profiles_look_for_equally_many_needles_in_all(layers, needles, profile):
    model = AttentionModel(layers, 500, needles, needle_depth_profile=profile)
    counts = model.needles_by_layer()
    assert len(counts) == layers
    assert sum(counts) == (layers * needles + 1) // 2
    assert 0 <= min(counts) <= max(counts) <= needles
    assert counts == sorted(counts, reverse=profile != "rising")
    if profile == "flat":
        assert max(counts) - min(counts) <= 1


def test_the_ends_of_the_profiles():
    falling = AttentionModel().needles_by_layer()
    assert (falling[0], falling[-1]) == (64, 0)
    rising = AttentionModel(needle_depth_profile="rising")
    assert rising.needles_by_layer() == falling[::-1]
    assert AttentionModel(needle_depth_profile="flat").needles_by_layer() == [32] * 32
    assert AttentionModel(layers=3).concentrations() == [0.5, 1.75, 3.0]
    for profile, expected in (("falling", [3.0, 1.75, 0.5]), ("flat", [1.75] * 3)):
        model = AttentionModel(layers=3, concentration_depth_profile=profile)
        assert model.concentrations() == expected


def test_equal_seeds_give_equal_records_and_others_others():
    first, again, other = (simulate(SMALL, 20, seed, trials=3) for seed in (7, 7, 8))
    assert first == again == json.loads(json.dumps(first))
    assert first["allocations"]["pyramid"]["recall"] != other["allocations"]["pyramid"]["recall"]
    assert first["entropy_bits_by_layer"] != other["entropy_bits_by_layer"]
    assert first["model"] == dataclasses.asdict(SMALL)
    assert set(first["versions"]) == {"python", "pyramidkv", "numpy"}
    assert (first["budget"], first["seed"], first["trials"]) == (20, 7, 3)
    assert first["versions"]["numpy"] == np.__version__


def test_needles_are_one_text_for_all_layers_and_more_relevant_where_looked_for():
    model = AttentionModel(layers=20, length=3000, needle_strength=50.0)
    positions = set()
    for layer, sought in zip(
        draw_layers(model, *seeds(0, 1)), model.needles_by_layer(), strict=True
    ):
        assert len(set(layer.looked_for.tolist())) == sought
        assert set(np.flatnonzero(layer.relevance > 25)) == set(layer.looked_for.tolist())
        positions |= set(layer.looked_for.tolist())
    assert len(positions) == 64
    everything = AttentionModel(layers=40, length=20, needles=11, sink_tokens=2, window_size=7)
    drawn = [layer.looked_for for layer in draw_layers(everything, *seeds(0, 1))]
    assert np.unique(np.concatenate(drawn)).tolist() == list(range(2, 13))


def test_entropies_equal_a_direct_computation():
    record = simulate(SMALL, 20, seed=3, trials=4)
    direct = np.zeros(SMALL.layers)
    for seed in seeds(3, 4):
        for index, layer in enumerate(draw_layers(SMALL, seed)):
            weights = softmax_by_groups(layer)
            direct[index] -= (weights * np.log2(weights)).sum() / 4
    assert record["entropy_bits_by_layer"] == pytest.approx(direct, abs=1e-5)
    assert record["effective_tokens_by_layer"] == pytest.approx(2**direct, rel=1e-5)


def test_without_concentration_the_entropy_is_that_of_the_three_masses():
    model = AttentionModel(layers=2, c_min=0.0, c_max=0.0)
    record = simulate(model, 64, trials=1)
    expected = 0.3 * log2(4 / 0.3) + 0.2 * log2(32 / 0.2) + 0.5 * log2(4060 / 0.5)
    assert record["entropy_bits_most"] == pytest.approx(expected)
    assert record["entropy_bits_by_layer"] == pytest.approx([expected] * 2, abs=1e-5)
    equal = AttentionModel(
        layers=1, sink_tokens=0, window_size=0, sink_mass=0.0, recent_mass=0.0, c_min=0.0
    )
    assert simulate(equal, 64, trials=1)["entropy_bits_by_layer"] == pytest.approx([12.0])


def test_entropy_falls_with_rising_concentration():
    entropies = simulate(AttentionModel(), 512)["entropy_bits_by_layer"]
    assert entropies[0] > 8.8
    assert entropies[-1] < 6.2
    falling = AttentionModel(concentration_depth_profile="falling")
    entropies = simulate(falling, 512)["entropy_bits_by_layer"]
    assert entropies[0] < 6.2
    assert entropies[-1] > 8.8


@pytest.mark.parametrize(
    ("sinks", "window", "mass"), [(4, 32, 0.5), (0, 32, 0.2), (4, 0, 0.3), (0, 0, 0.0)]
)
def test_sinks_and_window_hold_exactly_the_mass_that_is_given(sinks, window, mass):
    model = AttentionModel(layers=3, length=300, sink_tokens=sinks, window_size=window)
    for layer in draw_layers(model, *seeds(0, 1)):
        _, kept = layer.kept([0, model.evictable])
        assert kept == pytest.approx([mass, 1.0], abs=1e-12)


def test_recall_and_attention_kept_equal_a_count_token_by_token():
    record = simulate(SMALL, 20, seed=11, trials=3)
    for result in record["allocations"].values():
        recalls, attention = [], []
        for seed in seeds(11, 3):
            found, mass = 0, 0.0
            for layer, kept in zip(draw_layers(SMALL, seed), result["schedule"], strict=True):
                weights = softmax_by_groups(layer)
                middle = sorted(range(2, 54), key=lambda i: -weights[i])
                chosen = {0, 1, *range(54, 60), *middle[: kept - 8]}
                assert len(chosen) == kept
                found += sum(int(i) in chosen for i in layer.looked_for)
                mass += sum(weights[i] for i in chosen) / SMALL.layers
            recalls.append(found / sum(SMALL.needles_by_layer()))
            attention.append(mass)
        assert result["recall"] == pytest.approx(np.mean(recalls))
        assert result["recall_se"] == pytest.approx(np.std(recalls, ddof=1) / 3**0.5)
        assert result["attention_kept"] == pytest.approx(np.mean(attention), abs=1e-6)


def test_differences_to_uniform_are_paired():
    record = simulate(AttentionModel(layers=8), 200, trials=12)
    uniform, pyramid = (record["allocations"][name] for name in ("uniform", "pyramid"))
    assert pyramid["versus_uniform"] == pytest.approx(pyramid["recall"] - uniform["recall"])
    assert uniform["versus_uniform"] == uniform["versus_uniform_se"] == 0
    unpaired = (pyramid["recall_se"] ** 2 + uniform["recall_se"] ** 2) ** 0.5
    assert 0 < pyramid["versus_uniform_se"] < unpaired


@pytest.mark.parametrize("budget", [60, 61, 1000])
def test_a_budget_of_the_whole_prompt_keeps_everything(budget):
    record = simulate(SMALL, budget, trials=2)
    for result in record["allocations"].values():
        assert result["schedule"] == [60] * 5
        assert (result["recall"], result["versus_uniform"]) == (1, 0)
        assert result["attention_kept"] == pytest.approx(1)
    assert record["winner"]["clear"] is False
    assert record["winner"]["level_with"] == ["pyramid", "power", "entropy"]


def by_margin(result: dict, other: dict) -> float:
    """How far one recall is above another, in (unpaired, hence larger) standard errors."""
    error = (result["recall_se"] ** 2 + other["recall_se"] ** 2) ** 0.5
    return (result["recall"] - other["recall"]) / error


@pytest.mark.parametrize("seed", range(5))
def test_where_lower_layers_look_for_more_the_pyramid_is_better(seed):
    """The power law of exponent 1 is the pyramid without its ends, so the two are level."""
    record = simulate(AttentionModel(needle_depth_profile="falling"), 512, seed)
    results = record["allocations"]
    assert by_margin(results["pyramid"], results["uniform"]) > 3
    assert results["pyramid"]["versus_uniform"] > 6 * results["pyramid"]["versus_uniform_se"]
    assert 0.02 < results["pyramid"]["versus_uniform"] < 0.06
    assert abs(results["pyramid"]["recall"] - results["power"]["recall"]) < 0.004
    assert record["winner"]["allocation"] in ("pyramid", "power")
    assert not {"uniform", "entropy"} & set(record["winner"]["level_with"])
    assert by_margin(results["uniform"], results["inverted"]) > 15


@pytest.mark.parametrize("seed", range(5))
def test_where_all_layers_look_for_equally_many_uniform_wins(seed):
    record = simulate(AttentionModel(needle_depth_profile="flat"), 512, seed)
    winner, results = record["winner"], record["allocations"]
    assert (winner["allocation"], winner["clear"]) == ("uniform", True)
    assert winner["ahead_by"] > 6 * winner["ahead_by_se"]
    assert all(by_margin(results["uniform"], results[n]) > 4 for n in NAMES[1:])


@pytest.mark.parametrize("seed", range(5))
def test_where_upper_layers_look_for_more_uniform_wins_and_the_control_is_above_it(seed):
    record = simulate(AttentionModel(needle_depth_profile="rising"), 512, seed)
    winner, results = record["winner"], record["allocations"]
    assert (winner["allocation"], winner["clear"]) == ("uniform", True)
    assert winner["ahead_by"] > 15 * winner["ahead_by_se"]
    inverted = results["inverted"]
    assert inverted["versus_uniform"] > 6 * inverted["versus_uniform_se"]


def test_one_trial_has_no_error_and_no_clear_winner():
    record = simulate(AttentionModel(needle_depth_profile="rising"), 512, trials=1)
    assert record["allocations"]["uniform"]["recall_se"] is None
    assert record["winner"]["allocation"] == "uniform"
    assert record["winner"]["clear"] is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0}, "layers is 0; it must be a whole number from 1 to 1,000"),
        ({"layers": 1001}, "layers is 1001"),
        ({"layers": 2.0}, "layers is 2.0"),
        ({"layers": True}, "layers is True"),
        ({"length": 0}, "length is 0"),
        ({"length": 10**7 + 1}, "from 1 to 10,000,000"),
        ({"needles": 0}, "needles is 0"),
        ({"sink_tokens": -1}, "sink_tokens is -1; it must be a whole number from 0"),
        ({"window_size": -1}, "window_size is -1"),
        ({"length": 99}, "64 needles do not fit between 4 sinks and a window of 32 in a prompt of"),
        ({"length": 10}, "give a length of at least 100, or fewer needles"),
        ({"needle_strength": float("nan")}, "needle_strength is nan; it must be a number from 0"),
        ({"needle_strength": float("inf")}, "needle_strength is inf"),
        ({"needle_strength": -1.0}, "needle_strength is -1.0"),
        ({"needle_depth_profile": "steep"}, "'steep'; choose one of falling, flat, rising"),
        ({"concentration_depth_profile": ""}, "concentration_depth_profile is ''"),
        ({"c_min": 4.0}, "c_min is 4.0, above c_max"),
        ({"sink_mass": 0.9}, "their sum must be below 1"),
        ({"recent_mass": 1.5}, "recent_mass is 1.5; it must be a number from 0 to 1"),
    ],
)
def test_impossible_models_are_refused(settings, message):
    with pytest.raises(SimulationError, match=re.escape(message)):
        AttentionModel(**settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": 0}, "trials is 0; it must be a whole number from 1"),
        ({"seed": -1}, "seed is -1"),
        ({"budget": 20.5}, "budget is 20.5"),
        ({"beta": 0.5}, "beta is 0.5"),
        ({"gamma": float("nan")}, "gamma is nan"),
    ],
)
def test_impossible_runs_are_refused(arguments, message):
    with pytest.raises(SimulationError, match=re.escape(message)):
        simulate(SMALL, **{"budget": 20, **arguments})


def test_a_budget_below_sinks_and_window_names_the_smallest_possible():
    with pytest.raises(BudgetError, match="smallest possible budget is 8"):
        simulate(SMALL, 7)


@pytest.mark.parametrize("trials", [1, 3])
def test_progress_counts_every_layer_once(trials):
    seen = []
    simulate(SMALL, 20, trials=trials, on_layer=lambda *steps: seen.append(steps))
    assert seen == [(i + 1, 10 * trials) for i in range(10 * trials)]


def test_no_torch_and_no_transformers_are_imported(tmp_path):
    code = (
        "import sys; from pyramidkv.cli import app; "
        "app(['simulate', '--layers', '2', '--plot', sys.argv[1]], standalone_mode=False); "
        "bad = {'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules); "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "p.png"], check=True)
    code = (
        "import sys; import pyramidkv.simulation, pyramidkv.plots.simulation, pyramidkv.cli; "
        "bad = {'torch', 'transformers', 'matplotlib'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The command


def invoke(*arguments: object):
    return CliRunner().invoke(
        cli.app, ["simulate", *map(str, arguments)], env={"COLUMNS": "80"}, catch_exceptions=True
    )


def test_the_command_prints_what_it_computed(tmp_path):
    file = tmp_path / "record.json"
    outcome = invoke("--output", file, "--seed", 5)
    assert outcome.exit_code == 0, outcome.output
    record = json.loads(file.read_text())
    assert record == simulate(AttentionModel(), 512, seed=5)  # the same defaults, all of them
    lines = outcome.stdout.splitlines()
    for name, result in record["allocations"].items():
        line = next(line for line in lines if line.startswith(name))
        assert f"{result['schedule'][0]:,} " in line
        assert " 16,384 " in line
        assert f"{100 * result['recall']:.1f} +- {100 * result['recall_se']:.1f}" in line
        assert f"{100 * result['attention_kept']:.1f}" in line
        if name != "uniform":
            assert f"{100 * result['versus_uniform']:+.1f} +- " in line
    assert max(len(line) for line in lines if " 16,384 " in line) <= 80
    bars = [line.split() for line in lines if re.match(r"  layer +\d+ ", line)]
    assert [int(bar[1]) for bar in (bars[0], bars[-1])] == [0, 31]
    assert len(bars) == 16
    assert float(bars[-1][2]) == round(record["entropy_bits_by_layer"][-1], 2)
    assert len(bars[0][3]) == 40 > len(bars[-1][3])
    assert "This is a model of attention, not a measurement" in outcome.stdout
    assert "a control" in outcome.stdout


def test_where_everything_is_kept_there_is_no_verdict():
    assert "winner" not in invoke("--length", 400).stdout
    assert "winner" in invoke("--length", 600).stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--needle-depth-profile", "flat"), r"Best: uniform, ahead of pyramid by \d\.\d \+- 0\."),
        ((), "No clear winner: power is less than 2 standard errors ahead of pyramid, but ahead"),
        (("--gamma", 3), "Best: pyramid, ahead of entropy by"),
        (("--trials", 1), "No clear winner: one trial has no standard error"),
        (("--length", 400), "The budget holds the whole prompt"),
        (("--length", 100, "--layers", 1, "--needles", 1), "layer   0 "),
    ],
)
def test_the_verdict_is_one_sentence(arguments, sentence):
    outcome = invoke(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert re.search(sentence, outcome.stdout), outcome.stdout


def test_the_options_reach_the_model(tmp_path):
    file = tmp_path / "record.json"
    outcome = invoke(
        *("--layers", 3, "--length", 90, "--needles", 7, "--budget", 25, "--seed", 4),
        *("--trials", 2, "--needle-depth-profile", "rising", "--needle-strength", 1.5),
        *("--concentration-depth-profile", "flat", "--beta", 9, "--gamma", 2.5),
        *("--window-size", 11, "--sink-tokens", 2, "--output", file),
    )
    assert outcome.exit_code == 0, outcome.output
    model = AttentionModel(3, 90, 7, 1.5, "rising", "flat", sink_tokens=2, window_size=11)
    assert json.loads(file.read_text()) == simulate(model, 25, 4, 2, 9, 2.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layers", 0), "layers is 0"),
        (("--length", 50), "64 needles do not fit"),
        (("--budget", 35), "smallest possible budget is 36"),
        (("--needle-strength", "nan"), "needle_strength is nan"),
        (("--needle-depth-profile", "up"), "choose one of falling, flat, rising"),
        (("--seed", -1), "--seed is -1"),
        (("--trials", 0), "trials is 0"),
        (("--beta", 0), "beta is 0.0"),
        (("--plot", "picture.jpg"), "must end in one of .png, .svg, .pdf"),
        (("--plot", "picture"), "must end in one of .png, .svg, .pdf"),
        (("--plot", "no/such/folder.png"), "it has no folder"),
        (("--output", "no/such/folder.json"), "it has no folder"),
        (("--plot", "a.svg", "--output", "a.svg"), "name two files"),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = invoke(*arguments)
    assert isinstance(outcome.exception, PyramidKVError), outcome.output
    assert message in str(outcome.exception)
    assert "\n" not in str(outcome.exception)
    assert outcome.stdout == ""
    assert os.listdir(tmp_path) == []


# The picture


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf", "PNG"])
def test_a_picture_is_written_in_the_format_of_its_name(suffix, tmp_path):
    file = tmp_path / f"picture.{suffix}"
    file.write_text("an earlier one is replaced")
    outcome = invoke("--layers", 4, "--plot", file)
    assert outcome.exit_code == 0, outcome.output
    data = file.read_bytes()
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix.lower()]
    assert data.startswith(start)
    if suffix == "svg":
        xml.etree.ElementTree.fromstring(data)
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("layers", [1, 2, 32, 200])
def test_the_picture_shows_the_record(layers):
    record = simulate(AttentionModel(layers=layers), 512, trials=2)
    figure = draw(record)
    entropy, kept, needles = figure.axes
    assert list(entropy.lines[0].get_ydata()) == record["entropy_bits_by_layer"]
    assert list(needles.lines[0].get_ydata()) == record["needles_by_layer"]
    drawn = [list(line.get_ydata()) for line in kept.lines]
    assert drawn == [result["schedule"] for result in record["allocations"].values()]
    assert (entropy.get_ylabel(), kept.get_ylabel()) == (
        "entropy of attention (bits)",
        "tokens kept",
    )
    texts = [text.get_text() for text in kept.get_legend().get_texts()]
    recall = 100 * record["allocations"]["pyramid"]["recall"]
    assert texts[1].startswith(f"pyramid: {recall:.1f} ±")
    assert texts[4].startswith("inverted (control): ")
    looks = [(line.get_linestyle(), line.get_marker()) for line in kept.lines]
    assert len({marker for _, marker in looks}) == 5  # told apart without colour


@pytest.mark.parametrize("layers", [32, 1000])
@pytest.mark.parametrize("budget", [512, 4096])  # recalls of 100.0 have the widest legend
def test_legends_hide_no_data_and_nothing_is_cut_off(layers, budget):
    figure = draw(simulate(AttentionModel(layers=layers), budget, trials=2))
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    title = figure.texts[0].get_window_extent()
    assert 0 <= title.x0 < title.x1 <= width
    assert title.y1 <= height
    for axes in figure.axes[:2]:
        legend = axes.get_legend().get_window_extent()
        assert legend.y0 >= axes.get_window_extent().y1 - 1
        assert 0 <= legend.x0 < legend.x1 <= width
        assert legend.y1 < title.y0
    left, right, twin = (axes.get_tightbbox() for axes in figure.axes)
    assert max(left.x1, twin.x1) < right.x0


def test_a_failed_save_leaves_the_earlier_picture(tmp_path):
    file = tmp_path / "picture.png"
    file.write_text("earlier")

    class Failing:
        def savefig(self, path, **options):
            Path(path).write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        style.save(Failing(), file)
    assert file.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["picture.png"]


def test_without_matplotlib_a_picture_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(style.PlotError, match=re.escape("pip install 'pyramidkv[plot]'")):
        style.check_picture(tmp_path / "a.png")
    outcome = invoke("--plot", tmp_path / "a.png", "--output", tmp_path / "a.json")
    assert isinstance(outcome.exception, style.PlotError)
    assert outcome.stdout == ""
    assert os.listdir(tmp_path) == []
    assert invoke("--layers", 2).exit_code == 0  # without a picture all is well
