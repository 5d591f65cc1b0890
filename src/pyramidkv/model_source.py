"""Finding a model's configuration by name, without loading the model.

A name is a path (a configuration under any file name, a model folder, a GGUF file), a preset, or a
hub id. Weights are never read, only how large they are stored.
"""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import PyramidKVError
from .hub import NotOnHubError, download
from .model_defaults import WRAPPERS
from .model_shape import ModelShape, shape_of
from .records import read_json_object

LARGEST_CONFIG = 16 * 2**20
"""Bytes above which a file is taken to be no configuration."""

LARGEST_HEADER = 100 * 10**6
"""Bytes above which the safetensors format allows no header."""

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_PRESETS = Path(__file__).with_name("presets")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


class ModelSourceError(PyramidKVError):
    """No configuration is to be had under this name; the message says why."""


class _NoHubFileError(ModelSourceError):
    """The hub, or its local cache, does not give out this file."""


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration and where it was found.

    Attributes:
        name: what the user gave; of a preset, its name in lower case.
        config: the mapping in its `config.json`.
        weight_bytes: bytes of the stored weights, read off their index or header; None if there
            are none to look at.
        where: `file`, `folder`, `preset` or `hub`.
    """

    name: str
    config: dict[str, Any]
    weight_bytes: int | None
    where: Literal["file", "folder", "preset", "hub"]

    @property
    def shape(self) -> ModelShape:
        """The model's shape.

        Raises:
            ConfigError, UnsupportedModelError: see `model_shape.shape_of`.
        """
        return shape_of(self.config, self.name)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of `weight_bytes` must know, in sentences."""
        if self.name.endswith(".gguf"):
            return ("weights of a GGUF file are unpacked when it is loaded",)
        if self.weight_bytes is None or self.config.get("model_type") not in WRAPPERS:
            return ()
        return ("the stored weights are those of the whole model, images included",)


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(path.stem for path in _PRESETS.glob("*.json"))


def find_model(name: str) -> ModelSource:
    """Return a model's configuration: of a path if there is one, else of a preset, else a hub id.

    Raises:
        ModelSourceError: there is none under this name, or it cannot be read.
        LoadError: a GGUF file cannot be read.
    """
    if not name.strip():
        raise ModelSourceError(
            "the model's name is empty; give a config.json, a model folder, a hub id, or a preset: "
            f"{', '.join(preset_names())}"
        )
    if os.path.isdir(name):
        return _from_folder(name)
    if os.path.exists(name):
        return _from_file(name)
    if name.lower() in preset_names():
        preset = name.lower()
        config = _read_mapping(_PRESETS / f"{preset}.json")
        return ModelSource(preset, config, None, "preset")
    if _looks_like_path(name):
        raise ModelSourceError(
            f"there is no file or folder {name!r}; give an existing one, a hub id, or a preset: "
            f"{', '.join(preset_names())}"
        )
    if _HUB_ID.fullmatch(name):
        return _from_hub(name)
    raise ModelSourceError(
        f"{name!r} is no file, no folder and no hub id such as owner/name; the presets are: "
        f"{', '.join(preset_names())}"
    )


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".json", ".gguf", "/"))


def _from_folder(name: str) -> ModelSource:
    folder = Path(name)
    if not (folder / CONFIG_FILE).exists():
        raise ModelSourceError(
            f"the folder {name!r} has no {CONFIG_FILE}, so it is not a model folder"
        )
    config = _read_mapping(folder / CONFIG_FILE)
    return ModelSource(name, config, _stored_bytes(folder), "folder")


def _from_file(name: str) -> ModelSource:
    if name.endswith(".gguf"):
        # Only transformers knows how a GGUF file's fields map to a configuration. It imports torch
        # and takes seconds.
        from .loading import load_config

        # Its blocks are unpacked into float32 unless another type is asked for: see loading.py.
        return ModelSource(name, {**load_config(name).to_dict(), "dtype": "float32"}, None, "file")
    return ModelSource(name, _read_mapping(Path(name)), None, "file")


def _from_hub(name: str) -> ModelSource:
    from huggingface_hub import try_to_load_from_cache

    config = _read_mapping(_download(name, CONFIG_FILE))
    try:
        stored = _indexed_bytes(_download(name, INDEX_FILE))
    except _NoHubFileError:
        weights = try_to_load_from_cache(name, WEIGHTS_FILE)
        stored = _tensor_bytes(Path(weights)) if isinstance(weights, str) else None
    return ModelSource(name, config, stored, "hub")


def _download(name: str, file: str) -> Path:
    """Return the path of a file of the hub, cached or downloaded."""
    try:
        return download(name, file)
    except NotOnHubError as error:
        reason = str(error)
    alike = max((p for p in preset_names() if p in name.lower()), key=len, default=None)
    presets = f"the preset {alike}" if alike else f"a preset: {', '.join(preset_names())}"
    raise _NoHubFileError(
        f"cannot get the {file} of {name!r} from the hub: {reason}; give another hub id, a "
        f"config.json, a model folder, or {presets}"
    )


def _stored_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in a model folder; None if it has none in safetensors."""
    if (folder / INDEX_FILE).exists():
        return _indexed_bytes(folder / INDEX_FILE)
    if (folder / WEIGHTS_FILE).exists():
        return _tensor_bytes(folder / WEIGHTS_FILE)
    return None


def _indexed_bytes(path: Path) -> int | None:
    """Return the total an index of weights names; None if it names none."""
    metadata = _read_mapping(path).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if total is None:
        return None
    if isinstance(total, float) and total.is_integer():  # some writers add up in floats
        total = int(total)
    if type(total) is not int or total < 0:
        raise ModelSourceError(
            f"the index {str(path)!r} is damaged: total_size is {total!r}; download it again"
        )
    return total


def _tensor_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file's tensors, from its header.

    The format: the header's length in 8 bytes, the header (JSON), the tensors' bytes, to which the
    `data_offsets` in the header refer.
    """
    try:
        size = _plain_size(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(LARGEST_HEADER, size - 8):
                raise _damaged(path)
            header = json.loads(file.read(length).decode("utf-8"))
        room = size - 8 - length
        offsets = [
            tensor["data_offsets"] for key, tensor in header.items() if key != "__metadata__"
        ]
        return sum(_extent(pair, room) for pair in offsets)
    except OSError as error:
        raise ModelSourceError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _damaged(path) from None


def _extent(offsets: Any, room: int) -> int:
    start, end = offsets
    if type(start) is not int or type(end) is not int or not 0 <= start <= end <= room:
        raise ValueError(offsets)
    return end - start


def _damaged(path: Path) -> ModelSourceError:
    return ModelSourceError(
        f"{str(path)!r} is no safetensors file, or not all of it; download it again"
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of bounded size."""
    try:
        return read_json_object(path, LARGEST_CONFIG)
    except OSError as error:
        raise ModelSourceError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except ValueError as error:
        raise ModelSourceError(f"{str(path)!r} {error}; give a config.json") from None


def _plain_size(path: Path) -> int:
    """Return a file's size; refuse devices and pipes, which may never end."""
    if not path.is_file():
        raise ModelSourceError(f"{str(path)!r} is no plain file; give a config.json")
    return path.stat().st_size
