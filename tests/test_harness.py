"""lm-evaluation-harness on compressed caches: with the full cache its texts, else `generate`'s."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import plugin_files
import pytest
from conftest import tiny_tokenizer, words
from tiny import tiny_model

import pyramidkv
from pyramidkv.errors import HarnessError, PyramidKVError
from pyramidkv.methods import METHODS

WINDOW = {"window_size": 6, "kernel_size": 5}
SMALL = {"budget": 24, **WINDOW}
LENGTHS = (60, 97, 41, 133, 88, 52)  # no two alike, so that batches are padded
PROMPTS = [words(length) for length in LENGTHS]
NEW = 12
COMMAND = [sys.executable, "-m", "pyramidkv.evaluation.harness"]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/samples.jsonl
  cache_dir: {folder}/cache
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
{rest}
"""
GENERATES = """
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
"""
SCORES = """
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="session")
def lm_eval() -> Any:
    """The harness, with our model among its models."""
    harness = pytest.importorskip(
        "lm_eval", reason="needs lm-evaluation-harness: pip install 'pyramidkv[harness]'"
    )
    import_module("pyramidkv.evaluation.harness")
    return harness


@pytest.fixture(scope="session")
def make(lm_eval, model_folder):
    """Makes a model as the harness does, from its name and arguments."""
    from lm_eval.api.registry import get_model

    def make(name: str, batch_size: int = 1, folder: Path = model_folder, **arguments: Any) -> Any:
        given = {"pretrained": str(folder), **arguments}
        return get_model(name).create_from_arg_obj(
            given, {"batch_size": batch_size, "device": "cpu"}
        )

    return make


def generate(lm: Any, prompts: list[str] = PROMPTS, **settings: Any) -> list[str]:
    from lm_eval.api.instance import Instance

    chosen = {"until": ["\n\n"], "max_gen_toks": NEW, **settings}
    requests = [
        Instance("generate_until", {}, (prompt, dict(chosen)), 0, ("tiny", index, 1))
        for index, prompt in enumerate(prompts)
    ]
    return lm.generate_until(requests, disable_tqdm=True)


def alone(prompts: list[str] = PROMPTS, **arguments: Any) -> list[str]:
    """What `pyramidkv.generate` answers, prompt by prompt."""
    model, tokenizer = tiny_model("llama", "sdpa"), tiny_tokenizer(chat=False)
    return [
        pyramidkv.generate(model, tokenizer, prompt, **arguments, max_new_tokens=NEW).text
        for prompt in prompts
    ]


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory) -> Path:
    """Two tasks of the same samples: one generates, one scores."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"question": prompt, "answer": "w5"}) for prompt in PROMPTS]
    (folder / "samples.jsonl").write_text("\n".join(lines))
    for name, kind, rest in (
        ("tiny_generation", "generate_until", GENERATES),
        ("tiny_scores", "loglikelihood", SCORES),
    ):
        text = TASK.format(name=name, folder=folder, kind=kind, rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.mark.parametrize("batch_size", [1, 4])
def test_with_the_full_cache_texts_are_the_harness_s_own(make, batch_size):
    own = generate(make("hf", batch_size))
    assert generate(make("pyramidkv", batch_size, method="full")) == own
    assert generate(make("pyramidkv", batch_size, **SMALL)) != own


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    "arguments",
    [
        SMALL,
        {"method": "snapkv", "compression_ratio": 0.7, **WINDOW},
        {"method": "streamingllm-renumbered", "budget": 24},
        {
            "method": "h2o",
            "budget": 24,
            "decode_budget": 26,
            "decode_interval": 2,
            "window_size": 6,
        },
        {"method": "snapkv", "layer_budgets": [40, 30, 20, 10], **WINDOW},
        {"allocation": "entropy", **SMALL},
    ],
    ids=["pyramidkv", "ratio", "renumbered", "decode budget", "list", "measured"],
)
def test_texts_are_those_of_generate(make, batch_size, arguments):
    assert generate(make("pyramidkv", batch_size, **arguments)) == alone(**arguments)


def test_a_prompt_within_its_budget_keeps_everything(make):
    own = generate(make("hf"))
    assert generate(make("pyramidkv", budget=200, method="snapkv")) == own


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("arguments", [{"method": "full"}, SMALL], ids=["full", "small"])
def test_texts_end_before_a_stop_of_several_tokens(make, batch_size, arguments):
    lm = make("pyramidkv", batch_size, **arguments)
    free = generate(lm)
    stop = "".join(re.findall(r"w\d+", free[3])[4:6])  # the tiny tokenizer joins words
    steps: list[int] = []
    hook = lm.model.register_forward_hook(lambda *_: steps.append(1))
    stopped = generate(lm, until=[stop])
    hook.remove()
    assert stopped == [text.split(stop)[0] for text in free]
    assert stopped[3].count("w") == 4
    if batch_size == 1:
        assert len(steps) < len(PROMPTS) * NEW
    if arguments == {"method": "full"}:
        assert stopped == generate(make("hf", batch_size), until=[stop])


@pytest.mark.parametrize("batch_size", [1, 4])
def test_prompts_that_are_too_long_lose_their_beginning(make, batch_size):
    room = 80
    own = generate(make("hf", batch_size, max_length=room))
    assert generate(make("pyramidkv", batch_size, max_length=room, method="full")) == own
    if batch_size == 1:
        cut = [" ".join(prompt.split()[-(room - NEW) :]) for prompt in PROMPTS]
        assert any(len(prompt.split()) > room - NEW for prompt in PROMPTS)
        lm = make("pyramidkv", max_length=room, **SMALL)
        assert generate(lm) == alone(cut, **SMALL)


def test_sampling_goes_through(make):
    import torch

    texts = []
    for name, arguments in (("hf", {}), ("pyramidkv", {"method": "full"})):
        lm = make(name, 4, **arguments)
        torch.manual_seed(3)
        texts.append(generate(lm, do_sample=True, temperature=2.0))
    assert texts[0] == texts[1] != generate(make("hf", 4))


def test_the_model_is_as_before_after_an_evaluation(make):
    lm = make("pyramidkv", **SMALL)
    implementation = lm.model.config._attn_implementation
    first = generate(lm)
    assert lm.model.config._attn_implementation == implementation == "sdpa"
    assert generate(lm) == first


def test_a_loaded_model_is_taken_too(make):
    from lm_eval.api.registry import get_model

    taken = get_model("pyramidkv")(
        tiny_model("llama", "sdpa"), tokenizer=tiny_tokenizer(chat=False), **SMALL
    )
    assert generate(taken) == generate(make("pyramidkv", **SMALL))
    with pytest.raises(HarnessError, match=r"no argument 'sinks'; .*sink_tokens"):
        get_model("pyramidkv")(
            tiny_model("llama", "sdpa"), tokenizer=tiny_tokenizer(chat=False), sinks=2, **SMALL
        )


def test_simple_evaluate_logs_the_texts_of_generate_and_the_compression(
    lm_eval, model_folder, task_folder
):
    from lm_eval.tasks import TaskManager

    results = lm_eval.simple_evaluate(
        model="pyramidkv",
        model_args=f"pretrained={model_folder},budget=24,window_size=6,kernel_size=5",
        tasks=["tiny_generation"],
        task_manager=TaskManager(include_path=str(task_folder), include_defaults=False),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
    )
    assert _texts(results["samples"]["tiny_generation"]) == alone(**SMALL)
    expected = pyramidkv.compression.make_compression("pyramidkv", **SMALL).parameters()
    assert results["config"]["compression"] == expected
    assert results["config"]["model"] == "pyramidkv"


def test_chat_templates_and_system_instructions_are_the_harness_s(lm_eval, tmp_path, task_folder):
    from lm_eval.tasks import TaskManager

    tiny_model("llama", "sdpa").save_pretrained(tmp_path)
    tiny_tokenizer(chat=True).save_pretrained(tmp_path)
    logged = {}
    for name, arguments in (("hf", {}), ("pyramidkv", {"method": "full"}), ("pyramidkv", SMALL)):
        lm = lm_eval.api.registry.get_model(name).create_from_arg_obj(
            {"pretrained": str(tmp_path), **arguments}, {"batch_size": 4, "device": "cpu"}
        )
        manager = TaskManager(include_path=str(task_folder), include_defaults=False)
        results = lm_eval.evaluate(
            lm,
            manager.load(["tiny_generation"]),
            bootstrap_iters=0,
            apply_chat_template=True,
            system_instruction="w7 w8",
        )
        logged[name, len(arguments)] = results["samples"]["tiny_generation"]
    prompts = [sample["arguments"][0][0] for sample in _ordered(logged["hf", 0])]
    assert prompts == [f"<user> w7 w8 <user> {prompt} <assistant> " for prompt in PROMPTS]
    assert _texts(logged["pyramidkv", 1]) == _texts(logged["hf", 0])
    assert _texts(logged["pyramidkv", len(SMALL)]) == alone(prompts, **SMALL)


def _ordered(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(samples, key=lambda sample: sample["doc_id"])


def _texts(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in _ordered(samples)]


def test_scores_are_refused(lm_eval, make, task_folder):
    from lm_eval.tasks import TaskManager

    lm = make("pyramidkv", **SMALL)
    manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    with pytest.raises(HarnessError, match=r"pass over the prompt.*generate_until, or --model hf"):
        lm_eval.evaluate(lm, manager.load(["tiny_scores"]), bootstrap_iters=0)
    with pytest.raises(HarnessError, match="nothing is compressed yet"):
        lm.loglikelihood_rolling([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a budget .* or a compression ratio .*; neither given"),
        ({"budget": 24, "compression_ratio": 0.5}, "both given"),
        ({"method": "pyramid", "budget": 64}, "unknown method 'pyramid'"),
        ({"budget": 8}, "a budget of 8 is too small"),
        ({"budget": "many"}, "budget is 'many'"),
        ({"budget": 64, "gamma": 2}, "gamma means nothing to 'pyramid' budgets"),
        ({"method": "snapkv", "layer_budgets": 40}, "layer_budgets is 40; it is a list"),
        ({"budget": 64, "sinks": 2}, r"no argument 'sinks'; .*sink_tokens"),
        ({"budget": 64, "schedule": "none.json"}, "cannot read 'none.json'"),
        ({"budget": 64, "plugin": "none.py"}, "there is no file 'none.py'"),
    ],
)
def test_mistakes_are_told_in_a_sentence(make, arguments, message):
    with pytest.raises(PyramidKVError, match=message) as caught:
        make("pyramidkv", **arguments)
    assert "\n" not in str(caught.value)


def test_a_method_comes_from_its_file_and_is_noted(make, tmp_path):
    path = plugin_files.write(tmp_path / "m.py")
    lm = make("pyramidkv", method="mine", plugin=str(path), **SMALL)
    assert generate(lm) == generate(make("pyramidkv", method="snapkv", **SMALL))
    (noted,) = lm.get_model_info()["plugins"]
    assert noted["file"] == "m.py"
    assert "plugins" not in make("pyramidkv", **SMALL).get_model_info()
    del METHODS["mine"]


def test_a_model_must_be_named(lm_eval):
    with pytest.raises(HarnessError, match="give pretrained="):
        lm_eval.api.registry.get_model("pyramidkv").create_from_arg_string("budget=64")


def test_models_that_cannot_be_compressed_are_refused_before_anything_is_generated(make, tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=200)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer(chat=False).save_pretrained(tmp_path)
    with pytest.raises(PyramidKVError, match="architecture 'gpt2' is not supported"):
        make("pyramidkv", folder=tmp_path, budget=64)


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, check=False
    )


@pytest.mark.slow
def test_the_command_line_is_the_harness_s(lm_eval, model_folder, task_folder, tmp_path):
    shared = ["--model", "pyramidkv", "--tasks", "tiny_generation", "--include_path", task_folder]
    shared += ["--device", "cpu", "--batch_size", "4", "--output_path", tmp_path, "--log_samples"]
    chosen = f"pretrained={model_folder},method=snapkv,layer_budgets=[40,30,20,10],window_size=6"
    done = _run([*map(str, shared), "--model_args", chosen])
    assert done.returncode == 0, done.stderr
    assert "|tiny_generation|" in done.stdout
    (file,) = tmp_path.rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert _texts(samples) == alone(method="snapkv", layer_budgets=[40, 30, 20, 10], window_size=6)
    (file,) = tmp_path.rglob("results_*.json")
    noted = json.loads(file.read_text())["config"]["compression"]
    assert noted["method"] == "snapkv"
    assert noted["layer_budgets"] == [40, 30, 20, 10]


@pytest.mark.slow
def test_mistakes_end_the_command_with_a_sentence(lm_eval, model_folder, task_folder):
    arguments = ["--model", "pyramidkv", "--model_args", f"pretrained={model_folder},budget=8"]
    arguments += ["--tasks", "tiny_generation", "--include_path", str(task_folder)]
    done = _run([*arguments, "--device", "cpu"])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("pyramidkv: a budget of 8 is too small")
    assert "Traceback" not in done.stderr


def test_without_the_harness_importing_says_what_to_install(monkeypatch):
    for name in ["lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "pyramidkv.evaluation.harness", raising=False)
    with pytest.raises(HarnessError, match=r"lm_eval is not.*pip install 'pyramidkv\[harness\]'"):
        import_module("pyramidkv.evaluation.harness")


def test_without_the_harness_the_command_says_what_to_install():
    program = (
        "import runpy, sys; sys.modules['lm_eval'] = None; "
        "runpy.run_module('pyramidkv.evaluation.harness', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("pyramidkv: lm-evaluation-harness")
    assert "pip install 'pyramidkv[harness]'" in done.stderr
