"""The command line as users run it: results, and mistakes in one sentence with exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import tiny_tokenizer, words
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from transformers import GPT2Config, Qwen3_5Config, Qwen3_5ForConditionalGeneration
from typer.testing import CliRunner

from pyramidkv import cli, loading


def run(*arguments: object, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Run the command in a process of its own: the one way to see what a user sees."""
    command = [sys.executable, "-m", "pyramidkv"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "COLUMNS": "100", "HF_HUB_OFFLINE": "1"},
        check=False,
    )


def small(folder) -> list[object]:
    return [
        *("generate", "--model", folder, "--budget", 20, "--window-size", 6),
        *("--kernel-size", 5, "--max-new-tokens", 6),
    ]


def test_generate_prints_the_text_then_a_table(model_folder, tmp_path):
    record_file = tmp_path / "record.json"
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text(words(60))
    done = run(*small(model_folder), "--prompt-file", prompt_file, "--output", record_file)
    assert done.returncode == 0, done.stderr.decode()
    record = json.loads(record_file.read_text())
    assert done.stdout.decode().split() == record["text"].split()
    table = done.stderr.decode()
    for words_ in ("prompt tokens", "60", "kept in all / full", "80 / 240", "10.2 kB / 30.7 kB"):
        assert words_ in table
    for words_ in ("kept, first layer", "kept, last layer", "3.0x", "time to first token"):
        assert words_ in table
    assert "Traceback" not in table


def test_compare_shows_both_and_where_the_texts_part(model_folder, tmp_path):
    record_file = tmp_path / "records.json"
    done = run(*small(model_folder), "--prompt", words(60), "--compare", "--output", record_file)
    assert done.returncode == 0, done.stderr.decode()
    compressed, full = json.loads(record_file.read_text())["runs"]
    assert compressed["kv_bytes_full"] == full["kv_bytes_full"] == full["kv_bytes"]
    assert (compressed["compression"]["method"], full["compression"]["method"]) == (
        "pyramidkv",
        "full",
    )
    table = done.stderr.decode()
    assert "pyramidkv 20" in table
    assert "The texts part after" in table or "Both texts are the same" in table


def test_a_dry_run_prints_the_schedule_and_loads_no_weights(
    model_folder, tmp_path, capsys, monkeypatch
):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    done = Outcome(
        *(capsys, monkeypatch, *small(tmp_path), "--prompt", words(60), "--dry-run"),
    )
    assert done.exit_code == 0
    assert "layer   0        30" in done.stdout
    assert "in all: 80 tokens, exactly 4 x 20" in done.stdout
    official = Outcome(
        *(capsys, monkeypatch, "generate", "--model", tmp_path, "--budget", 27, "--dry-run"),
        *("--method", "pyramidkv-official", "--prompt", words(60)),
    )
    assert "against the 108 that a budget of 27 allows" in official.stdout


def test_of_a_model_of_text_and_images_the_text_model_is_used(tmp_path, capsys, monkeypatch):
    text = tiny_model("qwen3_5_text").config.to_dict()
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 48}
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    # transformers would read a folder of words as this model's own kind of tokenizer
    monkeypatch.setattr(loading, "load_tokenizer", lambda name: tiny_tokenizer(False))
    arguments = [*small(tmp_path), "--prompt", words(60)]
    schedule = Outcome(capsys, monkeypatch, *arguments, "--dry-run").stdout
    assert "in all: 40 tokens, exactly 2 x 20" in schedule
    output = tmp_path / "record.json"
    assert Outcome(capsys, monkeypatch, *arguments, "--output", output).exit_code == 0
    model = json.loads(output.read_text())["model"]
    assert (model["model_type"], model["layers"]) == ("qwen3_5_text", 4)
    assert model["full_attention_layers"] == 2


def test_the_prompt_can_come_from_standard_input(model_folder, tmp_path):
    piped = run(*small(model_folder), "-", stdin=words(60).encode())
    given = run(*small(model_folder), "--prompt", words(60))
    record = tmp_path / "record.json"
    record.write_text("{}")  # an earlier one is replaced
    arguments = [*small(model_folder), "--prompt-file", "-", "--output", record]
    as_file = run(*arguments, stdin=words(60).encode())
    assert json.loads(record.read_text())["prompt_tokens"] == 60
    assert piped.returncode == 0
    assert piped.stdout == given.stdout == as_file.stdout


def test_ratio_schedule_and_allocation_options_reach_the_method(model_folder, capsys, monkeypatch):
    def given(*arguments):
        fixed = ["generate", "--model", model_folder, "--prompt", words(200), "--dry-run"]
        return Outcome(capsys, monkeypatch, *fixed, *arguments).stdout

    assert "exactly 4 x 100" in given("--compression-ratio", 0.5)
    assert "in all: 290 tokens" in given("--layer-budgets", "100,80,60,50")
    assert "exactly 4 x 60" in given("--budget", 60, "--allocation", "power", "--gamma", 2)
    assert given("--budget", 60, "--beta", 50) != given("--budget", 60, "--beta", 2)
    assert "in all: 800 tokens" in given("--method", "full")


def test_budgets_of_heads_come_from_a_file(model_folder, tmp_path, capsys, monkeypatch):
    table, record = tmp_path / "heads.json", tmp_path / "record.json"
    given = *("generate", "--model", model_folder, "--prompt", words(100)), *("--method", "adakv")
    given = *given, "--head-budgets", table, "--max-new-tokens", 2, "--output", record

    def generate(text):
        table.write_text(text)
        return Outcome(capsys, monkeypatch, *given)

    assert generate("[[90, 40], [36, 50], [200, 37], [60, 60]]").exit_code == 0
    written = json.loads(record.read_text())
    assert written["schedule"] == [65, 43, 68.5, 60]
    assert written["schedule_total"] == 236.5
    assert written["compression"]["head_budgets"] == [[90, 40], [36, 50], [200, 37], [60, 60]]
    record.unlink()
    for text, message in (
        ("[[90, 40", "is no JSON"),
        ("[[90, 40]]", "are for 1 layers of 2 KV heads, but the model has 4"),
        ("[[90, 40], [36, 50], [200, 35], [60, 60]]", "a head of layer 2 is to keep 35 tokens"),
        ('{"a": 1}', "it is a list of whole numbers for each layer"),
    ):
        assert_one_sentence(generate(text), message)
    table.unlink()
    assert_one_sentence(Outcome(capsys, monkeypatch, *given), "No such file")
    assert not record.exists()
    table.write_text("[[90, 40], [36, 50], [200, 37], [60, 60]]")
    assert_one_sentence(
        Outcome(capsys, monkeypatch, *given[:-1], table), "is the file that is read"
    )


def test_heads_of_all_layers_compete_on_the_command_line(
    model_folder, tmp_path, capsys, monkeypatch
):
    record = tmp_path / "record.json"
    given = *("generate", "--model", model_folder, "--prompt", words(100)), "--budget", 50
    given = *given, "--method", "global", "--max-new-tokens", 2
    assert Outcome(capsys, monkeypatch, *given, "--output", record).exit_code == 0
    written = json.loads(record.read_text())
    assert written["schedule_total"] == 200
    assert sum(written["kept_lengths"]) == 200
    assert_one_sentence(
        Outcome(capsys, monkeypatch, *given, "--dry-run"), "is known after the prompt only"
    )
    assert_one_sentence(
        Outcome(capsys, monkeypatch, *given, "--head-budgets", record),
        "global has no option 'head_budgets'",
    )


MISTAKES = {
    "budget below sinks and window": (["--budget", 35], "smallest possible budget is 36"),
    "both budget and ratio": (["--budget", 64, "--compression-ratio", 0.5], "both given"),
    "neither budget nor ratio": ([], "neither given"),
    "ratio of one": (["--compression-ratio", 1], "at least 0 and below 1"),
    "negative ratio": (["--compression-ratio", -0.5], "at least 0 and below 1"),
    "unknown method": (["--method", "pyramid", "--budget", 64], "the methods are: full, "),
    "an option of another method": (
        ["--method", "streamingllm", "--budget", 64, "--kernel-size", 3],
        "no option 'kernel_size'",
    ),
    "even kernel": (["--budget", 64, "--kernel-size", 4], "odd number"),
    "layer budgets that are no numbers": (["--layer-budgets", "a,b"], "whole numbers"),
    "layer budgets for another model": (["--layer-budgets", "50,50"], "2 entries"),
    "output into a missing folder": (
        ["--budget", 64, "--output", "/nowhere/at/all.json"],
        "no folder '/nowhere/at'",
    ),
    "output that is a folder": (["--budget", 64, "--output", "/"], "no plain file"),
    "output that is a device": (["--budget", 64, "--output", "/dev/null"], "no plain file"),
    "output to standard output": (["--budget", 64, "--output", "-"], "no plain file"),
    "output with a name too long": (["--budget", 64, "--output", "x" * 300], "too long"),
    "output where no file can be made": (["--budget", 64, "--output", "/proc/x.json"], "cannot"),
    "a dry run with output": (["--budget", 64, "--dry-run", "--output", "a.json"], "neither"),
    "options of another allocation": (["--budget", 64, "--gamma", 2], "means nothing"),
    "a device without weights": (["--budget", 64, "--device", "meta"], "holds no weights"),
    "unknown dtype": (["--budget", 64, "--dtype", "int3"], "choose one of auto"),
    "unknown device": (["--budget", 64, "--device", "abacus"], "cannot use the device 'abacus'"),
    "unknown attention": (["--budget", 64, "--attn-implementation", "magic"], "magic"),
    "flex attention": (
        ["--budget", 64, "--attn-implementation", "flex_attention"],
        "'flex_attention' is not supported",
    ),
    "flash attention that is not installed": (
        ["--budget", 64, "--attn-implementation", "flash_attention_2"],
        "cannot load the weights",
    ),
    "device and device map": (
        ["--budget", 64, "--device", "cpu", "--device-map", "auto"],
        "either a device or a device map",
    ),
    "nothing to generate": (["--budget", 64, "--max-new-tokens", 0], "at least 1"),
    "negative seed": (["--budget", 64, "--seed", -1], "--seed is -1"),
    "infinite beta": (["--budget", 64, "--beta", "inf"], "finite number"),
    "official beta that is not whole": (
        ["--method", "pyramidkv-official", "--budget", 64, "--beta", 2.5],
        "whole numbers",
    ),
    "official beta that is infinite": (
        ["--method", "pyramidkv-official", "--budget", 64, "--beta", "inf"],
        "whole numbers",
    ),
    "negative temperature": (["--budget", 64, "--temperature", -1], "0 or a positive"),
    "chat without template": (["--budget", 64, "--chat"], "no chat template"),
    "ratio too large for the prompt": (["--compression-ratio", 0.9], "leaves 10 of 100"),
}


def assert_one_sentence(result, message: str) -> None:
    text = result.stderr if isinstance(result.stderr, str) else result.stderr.decode()
    code = getattr(result, "returncode", None)
    assert (result.exit_code if code is None else code) == 2, text
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("pyramidkv: ")
    assert message in lines[0]


class Outcome:
    """A run of `main` inside this process: quicker than a process of its own."""

    def __init__(self, capsys, monkeypatch, *arguments):
        monkeypatch.setattr(sys, "argv", ["pyramidkv", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        self.exit_code = caught.value.code
        self.stdout, self.stderr = capsys.readouterr()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_in_one_sentence_and_exit_code_two(
    mistake, model_folder, capsys, monkeypatch
):
    arguments, message = MISTAKES[mistake]
    outcome = Outcome(
        *(capsys, monkeypatch, "generate", "--model", model_folder),
        *("--prompt", words(100), *arguments),
    )
    assert_one_sentence(outcome, message)
    assert outcome.stdout == ""


def test_a_device_map_places_the_model(model_folder, capsys, monkeypatch):
    arguments = [*small(model_folder), "--prompt", words(60)]
    mapped = Outcome(capsys, monkeypatch, *arguments, "--device-map", "cpu")
    assert mapped.exit_code == 0
    assert mapped.stdout == Outcome(capsys, monkeypatch, *arguments).stdout


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t\n"])
def test_an_empty_prompt_is_refused(prompt, model_folder, capsys, monkeypatch):
    arguments = ["generate", "--model", model_folder, "--budget", 64, "--prompt", prompt]
    assert_one_sentence(Outcome(capsys, monkeypatch, *arguments), "prompt is empty")


def test_a_prompt_longer_than_the_context_is_refused(model_folder, capsys, monkeypatch):
    arguments = ["generate", "--model", model_folder, "--budget", 64, "--prompt", words(1000)]
    assert_one_sentence(Outcome(capsys, monkeypatch, *arguments), "context is 1,024 tokens")


def test_prompts_that_cannot_be_read_are_refused(model_folder, tmp_path, capsys, monkeypatch):
    def given(*arguments):
        return Outcome(
            capsys, monkeypatch, "generate", "--model", model_folder, "--budget", 64, *arguments
        )

    latin = tmp_path / "latin.txt"
    latin.write_bytes("Café".encode("latin-1"))
    assert_one_sentence(given("--prompt-file", latin), "is not UTF-8 text (byte 3)")
    assert_one_sentence(given("--prompt-file", tmp_path / "none.txt"), "No such file")
    assert_one_sentence(given("--prompt-file", tmp_path), "Is a directory")
    assert_one_sentence(given(), "give the prompt once")
    assert_one_sentence(given("--prompt", "a", "--prompt-file", latin), "2 given")
    assert_one_sentence(given("some text"), "unexpected argument 'some text'")
    binary = run(*small(model_folder), "-", stdin=b"\xff\xfe")
    assert_one_sentence(binary, "standard input is not UTF-8")


def test_models_that_cannot_be_used_are_refused(model_folder, tmp_path, capsys, monkeypatch):
    def given(model):
        arguments = ["generate", "--model", model, "--budget", 64, "--prompt", words(100)]
        return Outcome(capsys, monkeypatch, *arguments)

    assert_one_sentence(given("./nowhere"), "no model at './nowhere'")
    assert_one_sentence(given("nowhere.gguf"), "no model at 'nowhere.gguf'")
    assert_one_sentence(given("nobody/no-such-model"), "cannot load the configuration")
    assert_one_sentence(given(tmp_path), "has no config.json")
    GPT2Config().save_pretrained(tmp_path)
    assert_one_sentence(given(tmp_path), "'gpt2' is not supported; supported are: ")
    (tmp_path / "config.json").write_text("{")
    assert_one_sentence(given(tmp_path), "cannot load the configuration")
    no_weights = tmp_path / "no-weights"
    tiny_model("llama").config.save_pretrained(no_weights)
    tiny_tokenizer(False).save_pretrained(no_weights)
    assert_one_sentence(given(no_weights), "cannot load the weights")
    broken = no_weights / "model.safetensors"
    broken.write_bytes(b"not a safetensors file")
    assert_one_sentence(given(no_weights), "cannot load the weights")
    weights = load_file(model_folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, broken, metadata={"format": "pt"})
    assert_one_sentence(given(no_weights), "1 are missing, such as model.layers.2.mlp.up_proj")


def test_the_output_follows_links_and_never_replaces_the_prompt(
    model_folder, tmp_path, capsys, monkeypatch
):
    prompt, target, link = tmp_path / "prompt.txt", tmp_path / "real.json", tmp_path / "link.json"
    prompt.write_text(words(60))
    link.symlink_to(target)
    arguments = [*small(model_folder), "--prompt-file", prompt, "--output"]
    assert_one_sentence(
        Outcome(capsys, monkeypatch, *arguments, prompt), "is the file that is read"
    )
    assert prompt.read_text() == words(60)
    assert Outcome(capsys, monkeypatch, *arguments, link).exit_code == 0
    assert link.is_symlink()
    record = json.loads(target.read_text())
    assert (record["seed"], record["chat"], len(record["token_ids"])) == (0, False, 6)
    assert record["model_given"] == str(model_folder)


def test_an_unsupported_architecture_is_refused_before_tokenizer_and_weights(
    tmp_path, capsys, monkeypatch
):
    GPT2Config().save_pretrained(tmp_path)  # no tokenizer and no weights in the folder
    arguments = ["generate", "--model", tmp_path, "--budget", 64, "--prompt", "text"]
    assert_one_sentence(Outcome(capsys, monkeypatch, *arguments), "'gpt2' is not supported")


def test_an_interruption_ends_without_a_traceback(capsys, monkeypatch):
    class Interrupting(dict):
        def values(self):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["pyramidkv.cli.methods"], "METHODS", Interrupting())
    outcome = Outcome(capsys, monkeypatch, "methods")
    assert outcome.exit_code == 130
    assert "Traceback" not in outcome.stderr


def test_methods_lists_each_with_what_it_does():
    result = CliRunner().invoke(cli.app, ["methods"])
    assert result.exit_code == 0
    for name in ("full", "streamingllm", "h2o", "snapkv", "pyramidkv", "pyramidkv-official"):
        assert f"\n{name}\n" in f"\n{result.stdout}"
    assert "pyramid budgets, exact; 4 sinks; window 32; max-pool 31" in result.stdout
    assert "not exact" in result.stdout


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.stdout.startswith("pyramidkv 0.")
