"""Methods from a file on the command line: as built-in ones, noted in runs, told when they fail."""

from __future__ import annotations

import hashlib
import json

import plugin_files
import pytest
import torch
from conftest import words
from test_cli import run, small

from pyramidkv.method_options import Options
from pyramidkv.methods import METHODS
from pyramidkv.plugins import load_plugin
from pyramidkv.scores import WindowAttention


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {
            "question": f"w{9 + n} w5",
            "context": words(120 + 7 * n),
            "answers": "w7",
            "max_new_tokens": 12,
        }
        for n in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own(model_folder, data, output, plugin, methods, *arguments):
    return run(
        *("eval", "own", "--model", model_folder, "--data", data, "--output", output),
        *("--budgets", "40", "--methods", methods, "--plugin", plugin, *arguments),
    )


def read(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_run_answers_with_a_plugins_snapkv_as_with_snapkv(model_folder, data, tmp_path):
    plugin, folder = plugin_files.write(tmp_path / "m.py"), tmp_path / "run"
    methods = "full,snapkv,mine,snapkv:pyramid,mine:pyramid"
    done = own(model_folder, data, folder, plugin, methods)
    assert done.returncode == 0, done.stderr.decode()
    assert "mine (pyramid) 40" in done.stdout.decode()
    lines = read(folder)
    for line in lines:
        for rule in ("", " (pyramid)"):
            assert line["arms"][f"mine{rule} 40"] == line["arms"][f"snapkv{rule} 40"]
    differing = [one["arms"]["full"]["text"] != one["arms"]["mine 40"]["text"] for one in lines]
    assert any(differing)  # the budget does tell

    asked = json.loads((folder / "run.json").read_text())["asked"]
    digest = hashlib.sha256(plugin.read_bytes()).hexdigest()
    assert asked["settings"]["plugins"] == [{"file": "m.py", "sha256": digest}]
    assert asked["arms"]["mine 40"] == {**asked["arms"]["snapkv 40"], "method": "mine"}


def test_a_run_is_not_gone_on_with_after_the_file_has_changed(model_folder, data, tmp_path):
    plugin, folder = plugin_files.write(tmp_path / "m.py"), tmp_path / "run"
    assert own(model_folder, data, folder, plugin, "mine").returncode == 0
    before = (folder / "samples.jsonl").read_bytes()
    (tmp_path / "elsewhere").mkdir()
    moved = plugin_files.write(tmp_path / "elsewhere" / "m.py")
    assert own(model_folder, data, folder, moved, "mine", "--plugin", moved).returncode == 0
    plugin_files.write(plugin, plugin_files.SNAPKV + "# the same, but who knows\n")
    done = own(model_folder, data, folder, plugin, "mine")
    assert done.returncode == 2
    assert b"holds another run: it differs in settings (plugins); go on" in done.stderr
    assert (folder / "samples.jsonl").read_bytes() == before


def test_a_report_does_not_need_the_file(model_folder, data, tmp_path):
    plugin, folder = plugin_files.write(tmp_path / "m.py"), tmp_path / "run"
    assert own(model_folder, data, folder, plugin, "full,mine,mine:pyramid").returncode == 0
    plugin.unlink()
    page = tmp_path / "page.html"
    done = run("report", folder, "--output", page)
    assert done.returncode == 0, done.stderr.decode()
    shown = page.read_text()
    assert "settings: plugins" in shown
    assert "<th" in shown
    head = "<caption>Smallest KV memory"
    critical = shown[shown.index(head) :].split("</table>")[0]
    assert "mine (pyramid)</th>" in critical  # a method and allocation of its own, as in the run
    assert "mine</th>" in critical


@pytest.mark.parametrize("benchmark", ["needle", "ruler", "longbench", "own"])
def test_every_benchmark_takes_it_and_refuses_it_before_the_model(tmp_path, data, benchmark):
    broken = plugin_files.write(tmp_path / "m.py", "1 / 0\n")
    (tmp_path / "trec.jsonl").write_text("")
    own_options = {"longbench": ["--folder", tmp_path, "--tasks", "trec"], "own": ["--data", data]}
    done = run(
        *("eval", benchmark, "--model", "nowhere", "--output", tmp_path / "run"),
        *("--plugin", broken, *own_options.get(benchmark, [])),
    )
    assert done.returncode == 2
    if benchmark != "longbench":  # which reads its empty file first
        told = f"pyramidkv: {str(broken)!r} cannot be used: it raised ZeroDivisionError: division "
        assert done.stderr.decode() == told + "by zero (line 1 of 'm.py')\n"


def test_generate_ask_chat_and_plan_take_it(model_folder, tmp_path):
    plugin = plugin_files.write(tmp_path / "m.py")
    texts = {}
    for method in ("snapkv", "mine"):
        given = ["--method", method, "--plugin", plugin, "--prompt", words(60)]
        done = run(*small(model_folder), *given, "--output", tmp_path / f"{method}.json")
        assert done.returncode == 0, done.stderr.decode()
        record = json.loads((tmp_path / f"{method}.json").read_text())
        texts[method] = record["token_ids"], record["kept_lengths"]
        assert record["compression"]["method"] == method
    assert texts["mine"] == texts["snapkv"]
    document, saved = tmp_path / "document.txt", tmp_path / "saved.safetensors"
    document.write_text(words(60))
    options = ["--method", "mine", "--budget", 40, "--max-new-tokens", 3, "-q", "w5"]
    model = ["--model", model_folder]
    with_plugin = ["--plugin", plugin]
    done = run("ask", *model, "--context", document, "--save", saved, *options, *with_plugin)
    assert done.returncode == 0, done.stderr.decode()
    again = ["ask", *model, "--load", saved, "-q", "w5", "--max-new-tokens", 3]
    loaded = run(*again, *with_plugin)
    assert loaded.stdout == done.stdout
    without = run(*again)
    assert without.returncode == 2
    assert b"unknown method 'mine'" in without.stderr
    assert b"given with --plugin" in without.stderr
    talk = ["chat", *model, "--context", document, *options[:-2], *with_plugin]
    talked = run(*talk, stdin=b"w5\n/exit\n")
    assert talked.returncode == 0, talked.stderr.decode()
    assert talked.stdout == done.stdout
    plan = run("plan", model_folder, "--context", 500, "--budget", 64, *with_plugin, "--compare",
               "mine,mine:pyramid")  # fmt: skip
    assert plan.returncode == 0, plan.stderr.decode()
    assert "mine (pyramid) 64" in plan.stdout.decode()


def test_an_output_never_replaces_the_file(model_folder, tmp_path):
    plugin = plugin_files.write(tmp_path / "m.py")
    done = run(
        *(*small(model_folder), "--prompt", words(60), "--plugin", plugin, "--output", plugin),
    )
    assert done.returncode == 2
    assert b"is the file that is read; name another" in done.stderr
    document = tmp_path / "document.txt"
    document.write_text(words(60))
    talk = ("chat", "--model", model_folder, "--context", document, "--budget", 40)
    talked = run(*talk, "--plugin", plugin, stdin=f"/save {plugin}\n".encode())
    assert b"is the file that is read; name another" in talked.stderr
    assert plugin.read_text() == plugin_files.SNAPKV


def test_a_score_that_fails_ends_in_a_sentence(model_folder, tmp_path, data):
    plugin = plugin_files.broken(tmp_path / "m.py", result="scores[..., :-1]")
    generated = run(
        *(*small(model_folder), "--prompt", words(60), "--plugin", plugin, "--method", "broken")
    )
    judged = own(model_folder, data, tmp_path / "run", plugin, "full,broken")
    for done in (generated, judged):
        assert done.returncode == 2
        (line,) = done.stderr.decode().strip().splitlines()
        assert line.startswith("pyramidkv: the score of broken returned the shape (1, 2, ")


def test_the_documented_example_runs_as_documented(model_folder, data, tmp_path):
    text = plugin_files.example()
    assert 20 <= len(text.splitlines()) <= 42
    plugin, folder = plugin_files.write(tmp_path / "my_method.py", text), tmp_path / "run"
    listed = run("methods", "--plugin", plugin)
    assert listed.returncode == 0, listed.stderr.decode()
    shown = listed.stdout.decode().split("\nmine\n")[1]
    assert "keeps the tokens that one query of the window attends to most" in shown
    assert "uniform budgets, exact; 4 sinks; window 16; max-pool 7\n" in shown
    options = "--window-size, --sink-tokens, --pooling, --kernel-size, budget options"
    assert f"options: {options}\n" in shown
    done = own(model_folder, data, folder, plugin, "full,snapkv,mine,mine:pyramid")
    assert done.returncode == 0, done.stderr.decode()
    for line in read(folder):
        assert line["arms"]["mine 40"]["kept_tokens"] == 4 * 40
        assert line["arms"]["mine (pyramid) 40"]["kept_tokens"] == 4 * 40
    arms = json.loads((folder / "run.json").read_text())["asked"]["arms"]
    assert arms["mine 40"]["window_size"] == 16


def test_the_documented_example_computes_what_it_says(tmp_path):
    load_plugin(plugin_files.write(tmp_path / "my_method.py", plugin_files.example()))
    score = METHODS.pop("mine").make_score(Options(window_size=16))
    torch.manual_seed(0)
    queries, keys = torch.randn(2, 6, 16, 8), torch.randn(2, 2, 50, 8)
    for softcap in (None, 5.0):
        mine = score(queries, keys, keys, None, 0.35, softcap)
        expected = WindowAttention(16, "max", "max")(queries, keys, keys, None, 0.35, softcap)
        torch.testing.assert_close(mine, expected)
    assert score.query_count(9) == 9
    assert score.query_count(90) == 16
