"""`pyramidkv plan` as users run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import run
from test_schedule_profile import profile
from tiny import tiny_model

import pyramidkv
from pyramidkv.cli import inputs
from pyramidkv.model_shape import shape_fingerprint
from pyramidkv.plots.plan import draw

MODEL_PRESETS = Path(pyramidkv.__file__).with_name("presets")


def rows(output: bytes) -> dict[str, str]:
    """Return the plan's table by the names of its rows, of all its parts."""
    result: dict[str, str] = {}
    for name, values in re.findall(r"^(\S[^\n]*?) {2,}(\S.*)$", output.decode(), re.MULTILINE):
        result[name] = " ".join([*result.get(name, "").split(), *values.split()])
    return result


def test_a_plan_shows_what_its_record_says(tmp_path):
    record_file, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    done = run(
        *("plan", "llama-3-8b", "--context", 8192, "--batch", 2, "--budget", 512),
        *("--gpu-memory", "80GB", "--bandwidth", "3.35TB/s"),
        *("--output", record_file, "--plot", picture),
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    shown = rows(done.stdout)
    assert shown["KV cache, request"] == "1.1 GB (1.0 GiB) 67.1 MB (64.0 MiB)"
    assert shown["of the batch"] == "2.1 GB (2.0 GiB) 134.2 MB (128.0 MiB)"
    assert shown["smaller by"] == "1.0x 16.0x"
    assert shown["against the budget"] == "- exact"
    assert shown["kept in all"] == "262,144 16,384"
    record = json.loads(record_file.read_text())
    plan = record["plans"][0]
    assert shown["fit, together"].split()[1] == f"{plan['requests_together']:,}"
    assert shown["fit, one by one"].split()[1] == f"{plan['requests_one_by_one']:,}"
    assert shown["tokens/s at most"].split()[1] == f"{plan['tokens_per_second_at_most']:,.1f}"
    assert record["model"]["found"] == "preset"
    bars = [line for line in done.stdout.decode().splitlines() if line.endswith("#")]
    assert [int(line.split()[2].replace(",", "")) for line in bars] == plan["schedule"]
    assert picture.read_text().lstrip().startswith("<?xml")


def test_methods_stand_side_by_side_with_their_true_totals():
    done = run(
        *("plan", "llama-3-70b", "--context", 8000, "--budget", 128),
        *("--compare", "snapkv, pyramidkv,pyramidkv-official"),
    )
    shown = rows(done.stdout)
    assert shown["kept in all"] == "640,000 10,240 10,240 13,040"
    assert shown["against the budget"] == "- exact exact +27.3%"
    assert "…" not in done.stdout.decode()
    layers = [line.split() for line in done.stdout.decode().splitlines() if line[:1].isdigit()]
    assert len(layers) == 40  # of 80, the first and the last among them
    assert layers[0] == ["0", "128", "215", "242"]
    assert layers[-1] == ["79", "128", "41", "84"]
    assert {"step reads, weights", "peak, one by one"} <= set(shown)  # no row is broken up


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_figure_is_ever_cut_off(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    command = [sys.executable, "-m", "pyramidkv"]
    methods = "snapkv,pyramidkv,h2o,pyramidkv-official,streamingllm,h2o:power"
    arguments = ["plan", "llama-3.1-70b", "--context", "131072", "--budget", "512"]
    done = subprocess.run(
        [*command, *arguments, "--compare", methods], check=True, capture_output=True
    )
    shown = rows(done.stdout)
    assert shown["kept in all"].split() == [
        "10,485,760",
        *["40,960"] * 3,
        "41,360",
        *["40,960"] * 2,
    ]
    assert "…" not in done.stdout.decode()
    for title in ("full", "pyramidkv-official 512", "h2o (power) 512"):
        assert title in done.stdout.decode()


def test_each_method_takes_the_options_that_mean_something_to_it(tmp_path):
    done = run(
        *("plan", "llama-3-8b", "--context", 8000, "--budget", 128, "--beta", 5),
        *("--compare", "full,snapkv,pyramidkv,streamingllm,h2o:power", "--gamma", 2),
        *("--output", tmp_path / "o.json"),
    )
    assert done.returncode == 0, done.stderr.decode()
    plans = json.loads((tmp_path / "o.json").read_text())["plans"]
    assert [plan["method"] for plan in plans] == ["snapkv", "pyramidkv", "streamingllm", "h2o"]
    chosen = [plan["compression"] for plan in plans]
    assert (chosen[1]["beta"], chosen[3]["allocation"], chosen[3]["gamma"]) == (5, "power", 2)
    assert {plan["schedule_total"] for plan in plans} == {32 * 128}


def test_layers_are_numbered_as_the_model_numbers_them():
    done = run("plan", "gemma-3-1b", "--context", 8000, "--budget", 64)
    numbers = [int(line.split()[1]) for line in done.stdout.decode().splitlines() if "#" in line]
    assert numbers == [5, 11, 17, 23]


def test_a_batch_that_does_not_fit_has_no_speed():
    done = run(
        *("plan", "llama-3.1-8b", "--context", 32768, "--batch", 100, "--budget", 2048),
        *("--gpu-memory", "80GiB", "--bandwidth", "3.35TB/s"),
    )
    shown = rows(done.stdout)
    assert shown["tokens/s at most"].startswith("does not fit 8,")
    assert "Room for caches: 61.2 GB (57.0 GiB) on each GPU" in done.stdout.decode()
    assert "note: 100 requests do not fit with full" in done.stdout.decode()


def test_the_schedule_file_stands_beside_the_methods_own_budgets(model_folder, tmp_path):
    shape = shape_fingerprint(json.loads((model_folder / "config.json").read_text()))
    profile(shape=shape).write(tmp_path / "p.json")
    done = run(
        *("plan", model_folder, "--context", 2000, "--budget", 128),
        *("--compare", "snapkv,pyramidkv,snapkv:entropy", "--schedule", tmp_path / "p.json"),
    )
    assert done.returncode == 0, done.stderr.decode()
    for title in ("snapkv 128", "pyramidkv 128", "snapkv (entropy) 128"):
        assert title in done.stdout.decode()
    assert rows(done.stdout)["kept in all"] == "8,000 512 512 512"


def test_without_a_method_only_the_full_cache_is_shown():
    shown = rows(run("plan", "deepseek-v3", "--context", 1000).stdout)
    assert shown["KV cache, request"] == "70.3 MB (67.0 MiB)"
    assert "smaller by" not in shown
    assert "kept in all" not in shown
    shown = rows(run("plan", "gemma-2b", "--context", 1000).stdout)
    assert shown["KV cache, request"] == "18.4 MB (17.6 MiB)"


def test_a_folder_is_planned_with_its_stored_weights(tmp_path):
    model = tiny_model("llama", "sdpa")
    model.save_pretrained(tmp_path)
    done = run("plan", tmp_path, "--context", 100, "--budget", 40, "--output", tmp_path / "o.json")
    assert done.returncode == 0, done.stderr.decode()
    weights = json.loads((tmp_path / "o.json").read_text())["weights"]
    stored = sum(p.numel() * 4 for p in model.parameters())
    assert (weights["parameters"], weights["bytes"]) == (stored // 4, stored)
    assert weights["counted_from"] == "stored weights"
    assert "stored, 4.00 bytes per parameter" in done.stdout.decode()
    config = run("plan", tmp_path / "config.json", "--context", 100, "--budget", 40)
    assert rows(config.stdout)["KV cache, request"] == rows(done.stdout)["KV cache, request"]


def test_presets_are_listed():
    listed = run("plan", "presets").stdout.decode().split()
    assert {"llama-3-8b", "llama-3-70b", "mixtral-8x7b", "gemma-3-4b", "qwen3-8b"} <= set(listed)


def test_the_command_starts_without_torch():
    code = (
        "import sys; from pyramidkv.cli import app; "
        "app(['plan', 'llama-3-8b', '--context', '8192', '--budget', '512'], "
        "standalone_mode=False); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0


PLAN = ["llama-3-8b", "--context", "8192"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-8b"], "give the length of a prompt with --context"),
        (["llama-9", "--context", "10"], "the presets are: "),
        (["absent/config.json", "--context", "10"], "there is no file or folder"),
        (["broken.json", "--context", "10"], "is not JSON in UTF-8"),
        (["list.json", "--context", "10"], "holds a JSON list, not an object"),
        (["empty.json", "--context", "10"], "has no model_type"),
        (["half.json", "--context", "10"], "hidden_size"),
        (["half.json", "--context", "10"], "num_attention_heads"),
        (["gpt.json", "--context", "10"], "architecture 'gpt2'"),
        (["llama-3-8b", "--context", "0"], "context is 0; it must be a whole number from 1"),
        ([*PLAN, "--batch", "0"], "batch is 0"),
        ([*PLAN, "--budget", "10"], "the smallest possible budget is 36"),
        ([*PLAN, "--budget", "99", "--compression-ratio", "0.5"], "both given"),
        ([*PLAN, "--method", "snapkv"], "neither given"),
        ([*PLAN, "--method", "snapkw", "--budget", "99"], "unknown method 'snapkw'"),
        ([*PLAN, "--method", "snapkv", "--compare", "h2o", "--budget", "99"], "both given"),
        ([*PLAN, "--compare", ",", "--budget", "99"], "--compare names nothing"),
        ([*PLAN, "--gpu-memory", "80"], "--gpu-memory is '80'; give a number with a unit"),
        ([*PLAN, "--gpu-memory", "-1GB"], "give a number with a unit"),
        ([*PLAN, "--gpu-memory", "0GB"], "gpu_memory is 0"),
        ([*PLAN, "--gpu-memory", "10GB"], "do not fit into 1 x 9.0 GB"),
        ([*PLAN, "--gpu-memory", "80GB", "--kv-memory", "5GB"], "both given"),
        ([*PLAN, "--bandwidth", "3TB"], "--bandwidth is '3TB'; give a number with a unit, such"),
        ([*PLAN, "--dtype", "int2"], "choose one of float32"),
        ([*PLAN, "--tensor-parallel", "5"], "divides the query heads"),
        ([*PLAN, "--schedule", "other.json", "--budget", "99"], "measured on another model"),
        ([*PLAN, "--schedule", "half.json", "--budget", "99"], "is no schedule profile"),
        ([*PLAN, "--allocation", "entropy", "--budget", "99"], "known after the prompt only"),
        ([*PLAN, "--gpu-utilization", "0.5"], "a fraction of --gpu-memory; give that too"),
        (["presets", "--context", "9"], "'presets' is no file, no folder and no hub id"),
        ([*PLAN, "--compare", "snapkv,h2o", "--budget", "99", "--beta", "3"], "takes --beta"),
        (
            [*PLAN, "--compare", "snapkv", "--budget", "99", "--schedule", "other.json"],
            "takes --schedule; a method can be given an allocation, such as snapkv:entropy",
        ),
        ([*PLAN, "--compare", "snapkv:steep", "--budget", "99"], "choose one of uniform, pyramid"),
        ([*PLAN, "--plot", "a.jpg"], "must end in one of .png, .svg, .pdf"),
        ([*PLAN, "--plot", "a.png", "--output", "a.png"], "name two files"),
        (
            [*PLAN, "--schedule", "other.json", "--budget", "99", "--output", "other.json"],
            "--output 'other.json' is the file that is read",
        ),
        ([*PLAN, "--output", "no/such.json"], "it has no folder"),
    ],
)
def test_mistakes_end_in_one_sentence_and_leave_no_file(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    files = {
        "broken.json": "{",
        "list.json": "[]",
        "empty.json": "{}",
        "half.json": '{"model_type": "llama", "num_hidden_layers": 4, "vocab_size": 10}',
        "gpt.json": '{"model_type": "gpt2"}',
        "other.json": json.dumps(profile().as_dict()),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    done = run("plan", *arguments)
    assert done.returncode == 2, done.stdout.decode()
    lines = done.stderr.decode().strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(os.listdir(tmp_path)) == sorted(files)
    assert done.stdout == b""


def test_amounts_of_memory_have_units():
    for text, expected in (
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("1.5TB", 1_500_000_000_000),
        ("0.1GB", 10**8),
        ("512MiB", 2**29),
        ("10kB", 10_000),
        ("7B", 7),
    ):
        assert inputs.byte_count(text, "--x") == expected
    assert inputs.bytes_per_second("3.35TB/s", "--x") == 3_350_000_000_000
    for text in ("80", "GB", "80XB", "1e3GB", "nanGB", "8 0GB", "", "80iB", "٣GB"):
        with pytest.raises(inputs.InputError, match="give a number with a unit"):
            inputs.byte_count(text, "--x")


def test_the_picture_shows_the_record(tmp_path):
    done = run(
        *("plan", "llama-3-70b", "--context", 8000, "--budget", 128),
        *("--compare", "snapkv,pyramidkv,pyramidkv-official", "--output", tmp_path / "o.json"),
    )
    assert done.returncode == 0
    record = json.loads((tmp_path / "o.json").read_text())
    figure = draw(record)
    kept, sizes = figure.axes
    drawn = [list(line.get_ydata()) for line in kept.lines]
    assert drawn == [plan["schedule"] for plan in record["plans"]]
    plans = [record["full"], *record["plans"]]
    widths = [bar.get_width() * 1e9 for bar in sizes.patches]
    assert widths == pytest.approx([plan["kv_bytes_request"] for plan in plans])
    assert sizes.get_xlabel() == "KV cache per request (GB)"
    assert [text.get_text() for text in kept.get_legend().get_texts()] == [
        "snapkv 128: 10,240 in all",
        "pyramidkv 128: 10,240 in all",
        "pyramidkv-official 128: 13,040 in all (+27.3%)",
    ]
    assert kept.get_ylabel() == "tokens kept per KV head"
    figure.draw_without_rendering()
    assert kept.get_tightbbox().x1 < sizes.get_tightbbox().x0
    width, height = figure.bbox.size
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height
    legend = kept.get_legend().get_window_extent()
    assert legend.y0 >= kept.get_window_extent().y1 - 1
    assert legend.y1 < figure.texts[0].get_window_extent().y0


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path):
    config = json.loads((MODEL_PRESETS / "llama-3-8b.json").read_text())
    (tmp_path / "m$_$.json").write_text(json.dumps(config))
    done = run("plan", tmp_path / "m$_$.json", "--context", 9, "--plot", tmp_path / "p.svg")
    assert done.returncode == 0, done.stderr.decode()


def test_the_picture_of_a_model_without_anything_to_keep(tmp_path):
    done = run("plan", "deepseek-v3", "--context", 1000, "--plot", tmp_path / "p.png")
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
