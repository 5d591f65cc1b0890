"""Attention profiles: the figures, the samples they come from, and the command."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
import torch
from conftest import tiny_tokenizer, words
from test_cli import run
from tiny import prompt_ids, tiny_model

from pyramidkv.budgets import Entropy, Pyramid
from pyramidkv.cli.profile import most_kept
from pyramidkv.entropy import MeasurementError
from pyramidkv.errors import PromptError
from pyramidkv.method_options import Options
from pyramidkv.model_shape import shape_fingerprint
from pyramidkv.plots.profile import draw
from pyramidkv.profiling import (
    attention_kept,
    cut_samples,
    describe_trend,
    profile_attention,
)
from pyramidkv.schedule_profile import ProfileError, ScheduleProfile
from pyramidkv.selection import select

LENGTH, WINDOW, SINKS = 120, 8, 3
SIZES = {"length": LENGTH, "window_size": WINDOW, "sink_tokens": SINKS}


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(chat=False)


@pytest.fixture(scope="module")
def texts():
    return {"a": words(130), "b": " ".join(reversed(words(260).split()))}


def attentions(model, ids):
    """Attention weights `[query_heads, N, N]` of every layer, as transformers returns them."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_attentions=True)
    return [weights[0].double() for weights in out.attentions]


@pytest.mark.parametrize("all_queries", [False, True], ids=["window", "all queries"])
def test_figures_equal_those_of_the_full_attention_matrix(tokenizer, texts, all_queries):
    model = tiny_model("qwen3", "eager")
    profile = profile_attention(model, tokenizer, texts, all_queries=all_queries, **SIZES)
    samples = cut_samples(tokenizer, texts, LENGTH, None)
    assert [sample.text for sample in samples] == ["a", "b"]
    first = 0 if all_queries else LENGTH - WINDOW
    by_sample = [attentions(model, sample.ids) for sample in samples]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    recent = (distance < WINDOW) & (torch.arange(LENGTH) >= SINKS)
    for layer, described in enumerate(profile.record["layers"]):
        voting = [weights[layer][:, first:] for weights in by_sample]
        entropies = torch.stack([-(w * (w + 1e-12).log2()).sum(-1).mean(-1) for w in voting])
        assert described["entropy_bits"] == pytest.approx(float(entropies.mean()), abs=1e-5)
        assert described["entropy_by_head"] == pytest.approx(entropies.mean(0).tolist(), abs=1e-5)
        assert described["effective_tokens"] == pytest.approx(
            float(entropies.exp2().mean()), rel=1e-5
        )
        ends = [float(entropies.min()), float(entropies.max())]
        assert described["entropy_quartiles"][::4] == pytest.approx(ends, abs=1e-5)
        sinks = torch.stack([w[..., :SINKS].sum(-1).mean() for w in voting]).mean()
        assert described["sink_mass"] == pytest.approx(float(sinks), abs=1e-5)
        near = torch.stack([(w * recent[first:]).sum(-1).mean() for w in voting]).mean()
        assert described["recent_mass"] == pytest.approx(float(near), abs=1e-5)


def test_the_attention_kept_is_that_on_what_snapkv_keeps(tokenizer, texts):
    model = tiny_model("llama", "eager")
    budgets = [20, 60, LENGTH]
    profile = profile_attention(model, tokenizer, texts, budgets=budgets, samples=1, **SIZES)
    options = Options(window_size=WINDOW, sink_tokens=SINKS)
    ids = cut_samples(tokenizer, texts, LENGTH, 1)[0].ids
    expected = []
    for weights in attentions(model, ids):
        mean = weights[:, -WINDOW:].mean(1).view(2, 3, LENGTH)  # [kv_heads, group, N]
        expected.append({})
        for budget in budgets:
            chosen = select(
                mean.amax(1).float()[None], budget, SINKS, WINDOW, options.make_pooling()
            )[0]
            kept = mean.gather(-1, chosen[:, None].expand(-1, 3, -1)).sum(-1).mean()
            expected[-1][str(budget)] = float(kept)
    for described, values in zip(profile.record["layers"], expected, strict=True):
        assert described["attention_kept"] == pytest.approx(values, abs=1e-6)
        assert described["attention_kept"][str(LENGTH)] == pytest.approx(1)
    uniform = profile.record["attention_kept"]["uniform"]
    for budget in budgets:
        mean = sum(values[str(budget)] for values in expected) / 4
        assert uniform[str(budget)] == pytest.approx(mean, abs=1e-6)


def test_what_an_allocation_keeps_is_read_at_its_own_schedule(tokenizer, texts):
    model = tiny_model("llama", "eager")
    measured = profile_attention(model, tokenizer, texts, budgets=[30], **SIZES)
    options = Options(window_size=WINDOW, sink_tokens=SINKS)
    curves = [torch.zeros(LENGTH + 1, dtype=torch.float64) for _ in range(4)]
    for sample in cut_samples(tokenizer, texts, LENGTH, None):
        for layer, weights in enumerate(attentions(model, sample.ids)):
            received = weights[:, -WINDOW:].mean(1).view(2, 3, LENGTH)
            curves[layer] += attention_kept(received, options) / 2
    for name, allocation in (
        ("pyramid", Pyramid()),
        ("entropy", Entropy(measured.schedule.effective_tokens)),
    ):
        schedule = allocation.schedule(4, 30, LENGTH, WINDOW + SINKS)
        expected = sum(float(c[n]) for c, n in zip(curves, schedule, strict=True)) / 4
        assert measured.record["attention_kept"][name]["30"] == pytest.approx(expected, abs=1e-6)


def test_only_full_attention_layers_are_measured(tokenizer, texts):
    model = tiny_model("gemma3_text", "eager")
    profile = profile_attention(model, tokenizer, texts, samples=1, **SIZES)
    assert [layer["layer"] for layer in profile.record["layers"]] == [1, 3]
    assert len(profile.schedule.effective_tokens) == 2
    assert model.config._attn_implementation == "eager"


def test_the_softcap_is_measured_with(tokenizer, texts):
    model = tiny_model("gemma2", "eager")
    ids = cut_samples(tokenizer, texts, LENGTH, 1)[0].ids
    profile = profile_attention(model, tokenizer, texts, samples=1, **SIZES)
    for described, layer in zip(profile.record["layers"], (1, 3), strict=True):
        last = attentions(model, ids)[layer][:, -WINDOW:]
        entropy = -(last * (last + 1e-12).log2()).sum(-1).mean()
        assert described["entropy_bits"] == pytest.approx(float(entropy), abs=1e-5)


def test_an_earlier_schedule_is_judged_by_other_texts(tokenizer, texts):
    model = tiny_model("llama", "eager")
    sizes = {**SIZES, "budgets": [30]}
    earlier = profile_attention(model, tokenizer, {"a": texts["a"]}, **sizes)
    own = profile_attention(model, tokenizer, {"a": texts["a"]}, schedule=earlier.schedule, **sizes)
    kept = own.record["attention_kept"]
    assert kept["schedule"] == kept["entropy"]
    other = profile_attention(
        model, tokenizer, {"b": texts["b"]}, schedule=earlier.schedule, **sizes
    )
    shares = Entropy(earlier.schedule.effective_tokens).schedule(4, 30, LENGTH, WINDOW + SINKS)
    options = Options(window_size=WINDOW, sink_tokens=SINKS)
    ids = cut_samples(tokenizer, {"b": texts["b"]}, LENGTH, 1)[0].ids
    expected = 0.0
    for weights, share in zip(attentions(model, ids), shares, strict=True):
        received = weights[:, -WINDOW:].mean(1).view(2, 3, LENGTH)
        expected += float(attention_kept(received, options)[share]) / 4
    assert other.record["attention_kept"]["schedule"]["30"] == pytest.approx(expected, abs=1e-6)
    stranger = tiny_model("llama", "eager", num_hidden_layers=3)
    with pytest.raises(ProfileError, match="number of layers is 4"):
        profile_attention(stranger, tokenizer, texts, schedule=earlier.schedule, **sizes)


def test_what_is_kept_most_is_told_by_budget():
    kept = {
        "uniform": {"64": 0.5, "128": 0.7, "256": 0.9},
        "pyramid": {"64": 0.6, "128": 0.6, "256": 0.8},
    }
    assert most_kept(kept) == "pyramid at 64; uniform at 128, 256"


def test_the_schedule_profile_serves_the_model_it_was_measured_on(tokenizer, texts, tmp_path):
    import pyramidkv

    model = tiny_model("llama", "sdpa")
    measured = profile_attention(model, tokenizer, texts, **SIZES)
    assert dict(measured.schedule.shape) == shape_fingerprint(model.config.to_dict())
    measured.schedule.write(tmp_path / "p.json")
    read = ScheduleProfile.read(tmp_path / "p.json")
    assert read == measured.schedule
    assert json.loads(json.dumps(measured.record)) == measured.record
    cache = pyramidkv.CompressedCache(model, "snapkv", 60, profile=read)
    with torch.no_grad():
        model(prompt_ids(300)[0], past_key_values=cache)
    expected = Entropy(measured.schedule.effective_tokens).schedule(4, 60, 300, 36)
    assert [kept[0] for kept in cache.kept_lengths()] == expected


def test_samples_are_taken_from_the_texts_in_turns(tokenizer):
    texts = {"a": words(250), "b": words(130), "c": words(390)}
    samples = cut_samples(tokenizer, texts, 100, 5)
    assert [(s.text, s.start) for s in samples] == [
        ("a", 0),
        ("b", 0),
        ("c", 0),
        ("a", 100),
        ("c", 100),
    ]
    whole = tokenizer(texts["c"], add_special_tokens=False).input_ids
    assert samples[4].ids == whole[100:200]


def test_a_beginning_of_text_token_stands_before_every_piece(tokenizer):
    class Leading:
        bos_token_id = tokenizer.bos_token_id

        def __call__(self, text, add_special_tokens, **options):
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
            return {"input_ids": [1, *ids] if add_special_tokens else ids}

    samples = cut_samples(Leading(), {"a": words(250)}, 100, 2)
    assert [s.ids[0] for s in samples] == [1, 1]
    assert [(len(s.ids), s.start) for s in samples] == [(100, 0), (100, 99)]


@pytest.mark.parametrize(
    ("entropies", "verdict", "correlation"),
    [
        ([9, 7, 5, 4, 3, 1], "funnel", -1),
        ([1, 2, 3, 4, 5, 6], "widens", 1),
        ([1, 5, 1, 5, 1, 5], "no trend", 0.29277002188455997),
        ([3, 3, 3, 3], "no trend", 0),
        ([4, 3, 1], "too few layers", -1),
        ([3], "too few layers", 0),
    ],
)
def test_a_trend_is_a_rank_correlation_with_depth(entropies, verdict, correlation):
    trend = describe_trend(entropies, [2.0**bits for bits in entropies])
    assert trend["verdict"] == verdict
    assert trend["correlation"] == pytest.approx(correlation)
    third = -(-len(entropies) // 3)
    assert trend["lower"] == sum(2.0**bits for bits in entropies[:third]) / third
    assert trend["upper"] == sum(2.0**bits for bits in entropies[-third:]) / third


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "length is 1; it must be a whole number of at least 2"),
        ({"length": 36}, "a sample of 36 tokens has none beside 4 sinks and a window of 32"),
        ({"length": 2000}, "2,000 tokens is longer than this model's context of 1,024"),
        ({"length": 200}, "the text 'a' has 130 tokens, fewer than one sample of 200"),
        ({"length": 100, "samples": 9}, "9 samples of 100 tokens are asked for, but the texts"),
        ({"length": 100, "samples": 0}, "samples is 0"),
        ({"length": 100, "window_size": 0}, "window_size is 0"),
        ({"length": 100, "budgets": [20]}, "must lie between 36"),
        ({"length": 100, "budgets": [101]}, "and 100"),
    ],
)
def test_what_cannot_be_measured_is_refused(tokenizer, texts, options, message):
    with pytest.raises(PromptError, match=message):
        profile_attention(tiny_model("llama", "sdpa"), tokenizer, texts, **options)


def test_attention_that_is_no_number_is_told(tokenizer, texts):
    model = tiny_model("llama", "sdpa")
    with torch.no_grad():
        model.model.layers[2].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(MeasurementError, match="--dtype float32"):
        profile_attention(model, tokenizer, texts, **SIZES)


def test_no_text_and_empty_texts_are_refused(tokenizer):
    model = tiny_model("llama", "sdpa")
    with pytest.raises(PromptError, match="no text is given"):
        profile_attention(model, tokenizer, {}, length=100)
    with pytest.raises(PromptError, match="the text 'a' is empty"):
        profile_attention(model, tokenizer, {"a": "  "}, length=100)


def test_the_picture_shows_the_record(tokenizer, texts):
    record = profile_attention(tiny_model("qwen3", "eager"), tokenizer, texts, **SIZES).record
    figure = draw(record)
    spread, heads, kept, bar = figure.axes
    mean = [layer["entropy_bits"] for layer in record["layers"]]
    assert list(spread.lines[1].get_ydata()) == mean
    table = [layer["entropy_by_head"] for layer in record["layers"]]
    assert heads.images[0].get_array().tolist() == table
    assert spread.get_ylabel() == "attention entropy (bits)"
    assert heads.get_xlabel() == "query head"
    assert "bits" in bar.get_ylabel()
    figure.draw_without_rendering()
    shares = [list(line.get_ydata()) for line in kept.lines]
    wanted = [
        [100 * share for share in by_budget.values()]
        for by_budget in record["attention_kept"].values()
    ]
    assert shares == wanted
    assert kept.get_ylabel() == "attention kept (%)"
    boxes = [axes.get_tightbbox() for axes in (spread, heads, bar, kept)]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    for axes in (spread, kept):
        assert axes.get_legend().get_window_extent().y0 >= axes.get_window_extent().y1 - 1


def test_the_command_writes_what_it_shows(model_folder, tmp_path):
    files = []
    for name in ("a", "b", "c"):
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text(words(130 + 7 * len(files)))
    made = {name: tmp_path / name for name in ("record.json", "schedule.json", "picture.png")}
    done = run(
        *("profile", "--model", model_folder, "--length", 100, "--budgets", "40,80"),
        *("--output", made["record.json"], "--save-schedule", made["schedule.json"]),
        *("--plot", made["picture.png"], "--text", *files),
    )
    assert done.returncode == 0, done.stderr.decode()
    record = json.loads(made["record.json"].read_text())
    shown = done.stdout.decode()
    for layer in record["layers"]:
        assert f"{layer['entropy_bits']:.2f}" in shown
    assert len(record["samples"]) == 3
    assert "rank correlation of entropy and depth" in shown
    assert made["picture.png"].read_bytes().startswith(b"\x89PNG")
    # the schedule serves any command
    plan = run(
        "plan",
        model_folder,
        "--context",
        500,
        "--budget",
        64,
        "--method",
        "snapkv",
        "--schedule",
        made["schedule.json"],
        "--output",
        tmp_path / "plan.json",
    )
    assert plan.returncode == 0, plan.stderr.decode()
    planned = json.loads((tmp_path / "plan.json").read_text())["plans"][0]
    used = run(
        "generate",
        "--model",
        model_folder,
        "--prompt",
        words(500),
        "--budget",
        64,
        "--method",
        "snapkv",
        "--schedule",
        made["schedule.json"],
        "--max-new-tokens",
        2,
        "--output",
        tmp_path / "run.json",
    )
    assert used.returncode == 0, used.stderr.decode()
    assert json.loads((tmp_path / "run.json").read_text())["schedule"] == planned["schedule"]
    assert sum(planned["schedule"]) == 4 * 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one text"),
        (["--text", "absent.txt"], "cannot read 'absent.txt'"),
        (["--text", "a.txt", "a.txt"], "'a.txt' is given twice"),
        (["--text", "a.txt", "--length", "500"], "has 130 tokens, fewer than one sample of 500"),
        (["--text", "a.txt", "--budgets", "12,x"], "--budgets is '12,x'; give whole numbers"),
        (["--text", "a.txt", "--output", "a.txt"], "'a.txt' is the file that is read"),
        (
            ["--text", "a.txt", "--output", "o.json", "--save-schedule", "o.json"],
            "--save-schedule and --output are both 'o.json'",
        ),
        (["--text", "a.svg", "--plot", "a.svg"], "--plot 'a.svg' is the file that is read"),
        (
            ["--text", "a.txt", "--plot", "p.png", "--save-schedule", "p.png"],
            "--save-schedule and --plot are both 'p.png'",
        ),
        (["--text", "a.txt", "--plot", "p.gif"], "must end in one of .png, .svg, .pdf"),
        (["--text", "a.txt", "--plot", "no/p.png"], "it has no folder"),
    ],
)
def test_mistakes_end_in_one_sentence_and_leave_no_file(
    model_folder, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    for name in ("a.svg", "a.txt"):
        (tmp_path / name).write_text(words(130))
    done = run("profile", "--model", model_folder, *arguments)
    assert done.returncode == 2
    lines = done.stderr.decode().strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(os.listdir(tmp_path)) == ["a.svg", "a.txt"]
    assert (tmp_path / "a.svg").read_text() == words(130)
