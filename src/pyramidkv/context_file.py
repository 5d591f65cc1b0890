"""Saved contexts: one safetensors file with all that is needed to answer without a prompt pass.

A file holds the kept keys, values and positions, the document's tokens and text, and in its
metadata a JSON description, a format version and a checksum over the whole file. Everything is
checked before it is believed: a file that cannot be used is refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .cache import CompressedCache
from .compression import Compression
from .context import CompressedContext
from .errors import ContextFileError, PyramidKVError, first_line
from .prompts import PromptFormat, Turn, check_tokenizer
from .records import replacing
from .support import check_model, state_layers

FORMAT = "pyramidkv-context"
VERSION = 1
MAX_HEADER_BYTES = 16 * 2**20
"""No header of ours comes near this: texts and tokens are stored as tensors."""

_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
_BLANK = "0" * 64
_PROBE_TEXT = "The 3 quick foxes, naïve & ÇA: 漢字 🙂\n\n\tdef f(x): return x**2"
_SAMPLES = 16  # values read from each weight
_SETTINGS = (
    "attn_logit_softcapping",
    "head_dim",
    "hidden_act",
    "layer_types",
    "num_attention_heads",
    "num_key_value_heads",
    "query_pre_attn_scalar",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
)
"""Of a model's configuration: what changes its results although the weights are the same."""


def save(context: CompressedContext, path: Path, turns: list[Turn]) -> None:
    """Write a context to a temporary file beside `path` and put it in its place.

    Raises:
        ContextFileError: it cannot be written, its method is not one of the registry's, or the
            model has layers that cannot be saved.
        CacheStateError: something follows the document in its cache.
    """
    tokenizer, compression = context.form.tokenizer, context.cache.compression
    if not _is_registered(compression):
        raise ContextFileError(
            f"the method {compression.method.name!r} is not, or not as it is here, in the "
            "registry, so a context made with it could not be loaded again"
        )
    check_savable(context.model.config)
    described = {
        "model": model_fingerprint(context.model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "compression": compression.parameters(),
        "schedule": context.cache.schedules[0],
        "chat": context.form.chat,
        "record": context.record,
    }
    tensors = {name: tensor.cpu() for name, tensor in context.cache.tensors().items()}
    tensors["token_ids"] = torch.tensor(context.token_ids, dtype=torch.int32)
    tensors["text"] = _to_bytes(context.text)
    tensors["turns"] = _to_bytes(json.dumps([[turn.question, turn.answer] for turn in turns]))
    metadata = {
        "format": FORMAT,
        "format_version": str(VERSION),
        "checksum": _BLANK,
        "context": json.dumps(described, ensure_ascii=False),
    }
    try:
        with replacing(path) as temporary:
            save_file({n: t.contiguous() for n, t in tensors.items()}, temporary, metadata)
            _write_checksum(temporary)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ContextFileError(f"cannot write {str(path)!r}: {reason}") from None


def _is_registered(compression: Compression) -> bool:
    try:
        return Compression.from_parameters(compression.parameters()) == compression
    except PyramidKVError:
        return False


def check_savable(config: PreTrainedConfig) -> None:
    """Raise `ContextFileError` if contexts of such a model cannot be saved."""
    if state_layers(config):
        raise ContextFileError(
            f"contexts of {config.model_type} models cannot be saved: their linear-attention or "
            "convolution layers hold states, which only live in memory"
        )


def load(
    path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> CompressedContext:
    """Read a context; on the CPU its keys and values are mapped, not copied.

    Raises:
        ContextFileError: it cannot be used; the message says why.
    """
    check_model(model)
    check_tokenizer(tokenizer)
    described = read_description(path)
    try:
        return _build(path, described, model, tokenizer)
    except ContextFileError:
        raise
    except PyramidKVError as error:
        raise ContextFileError(f"{str(path)!r} cannot be used: {error}") from None
    except KeyError as error:
        raise ContextFileError(
            f"{str(path)!r} is no valid saved context: it lacks {error.args[0]!r}"
        ) from None
    except Exception as error:  # whoever forges a file finds one that no list has
        told = isinstance(error, ValueError | SafetensorError)
        reason = first_line(error) if told else type(error).__name__
        raise ContextFileError(f"{str(path)!r} is no valid saved context: {reason}") from None


def read_description(path: Path, check_content: bool = True) -> dict[str, Any]:
    """Return what a saved context says about itself, after checking that it is whole.

    Args:
        path: the file; beyond its header it is read block by block.
        check_content: compare the content with the checksum, too.

    Raises:
        ContextFileError: it is damaged, none of ours, or of a newer version.
    """
    name = repr(str(path))
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ContextFileError(f"{name} is no plain file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ContextFileError(f"{name} is no saved context, or is cut off")
            header = file.read(length)
            metadata = _metadata(name, header)
            found = _CHECKSUM.search(header)
            if found is None:
                raise ContextFileError(f"{name} is damaged: its checksum is missing")
            digest = hashlib.sha256(start + header[: found.start(1)] + _BLANK.encode())
            digest.update(header[found.end(1) :])
            while check_content and (block := file.read(2**20)):
                digest.update(block)
    except OSError as error:
        if isinstance(error, ContextFileError):
            raise
        raise ContextFileError(f"cannot read {name}: {error.strerror or error}") from None
    if check_content and digest.hexdigest().encode() != found.group(1):
        raise ContextFileError(
            f"{name} is damaged or cut off: its content does not match its checksum"
        )
    try:
        described = json.loads(metadata["context"])
    except (KeyError, ValueError, RecursionError):
        described = None
    if not isinstance(described, dict):
        raise ContextFileError(f"{name} is no valid saved context: it has no description")
    return {**described, "checksum": metadata.get("checksum")}


def _metadata(name: str, header: bytes) -> dict[str, str]:
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError):
        raise ContextFileError(f"{name} is no saved context, or its header is damaged") from None
    found = parsed.get("__metadata__") if isinstance(parsed, dict) else None
    metadata: dict[str, str] = found if isinstance(found, dict) else {}
    texts = all(isinstance(value, str) for value in metadata.values())
    if not texts or metadata.get("format") != FORMAT:
        raise ContextFileError(
            f"{name} is no saved context of pyramidkv; give a file written by ask --save or "
            "CompressedContext.save"
        )
    version = metadata.get("format_version", "")
    if version != str(VERSION):
        newer = re.fullmatch("[0-9]{1,8}", version) is not None and int(version) > VERSION
        why = "a newer version of pyramidkv: update it" if newer else "no known version"
        raise ContextFileError(
            f"{name} has the format version {version[:20]!r}, which is that of {why}; this one "
            f"reads version {VERSION}"
        )
    return metadata


def _write_checksum(path: Path) -> None:
    """Put the checksum of the whole file, with zeros in its place, into the file."""
    with path.open("r+b") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        found = _CHECKSUM.search(header)
        assert found is not None
        digest = hashlib.sha256(start + header)
        while block := file.read(2**20):
            digest.update(block)
        file.seek(8 + found.start(1))
        file.write(digest.hexdigest().encode())


def _build(
    path: Path,
    described: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
) -> CompressedContext:
    _check_origin(repr(str(path)), described, model, tokenizer)
    compression = Compression.from_parameters(described["compression"])
    with safe_open(path, framework="pt", device="cpu") as file:
        if (file.metadata() or {}).get("checksum") != described["checksum"]:
            raise ValueError("it was replaced while it was read")
        names = list(file.keys())
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    text = _to_text(tensors.pop("text"))
    turns = [Turn(*turn) for turn in json.loads(_to_text(tensors.pop("turns")))]
    token_ids = _token_ids(tensors.pop("token_ids"), model)
    chat, record = described["chat"], described["record"]
    if type(chat) is not bool or not isinstance(record, dict):
        raise ValueError("its description has values of other types")
    if not all(isinstance(text, str) for turn in turns for text in (turn.question, turn.answer)):
        raise ValueError("its turns are no texts")
    form = PromptFormat(tokenizer, chat)
    if form.encode("What", text)[: len(token_ids)] != token_ids:
        raise ValueError("its text and its tokens do not belong together")
    tensors = {name: _on_device(tensor, name, model) for name, tensor in tensors.items()}
    schedule = described["schedule"]
    cache = CompressedCache.from_tensors(model, compression, tensors, len(token_ids), schedule)
    return CompressedContext(model, form, cache, text, token_ids, record, turns)


def _to_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _to_text(stored: Tensor) -> str:
    if stored.dtype != torch.uint8 or stored.ndim != 1 or not stored.numel():
        raise ValueError("its texts are none")
    return stored.numpy().tobytes().decode()


def _on_device(tensor: Tensor, name: str, model: PreTrainedModel) -> Tensor:
    """Move a layer's tensor to where that layer is; on the CPU it stays mapped."""
    layers: Any = model.get_decoder().layers
    kind, index, *_ = name.split(".")
    if kind != "layers" or not index.isdecimal() or int(index) >= len(layers):
        raise ValueError(f"it has a tensor of unknown purpose: {name}")
    device = next(layers[int(index)].parameters()).device
    return tensor.to(model.device if device.type == "meta" else device)


def _token_ids(stored: Tensor, model: PreTrainedModel) -> list[int]:
    if stored.dtype != torch.int32 or stored.ndim != 1 or not stored.numel():
        raise ValueError("its token ids are none")
    ids: list[int] = stored.tolist()
    if not 0 <= min(ids) <= max(ids) < model.config.vocab_size:
        raise ValueError("it has token ids outside of the model's vocabulary")
    return ids


def _check_origin(
    name: str, described: dict[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    theirs, ours = described["model"], model_fingerprint(model)
    if {**theirs, "name": None} != {**ours, "name": None}:  # a folder may have been moved
        shape = ("model_type", "layers", "settings")
        if theirs["dtype"] != ours["dtype"] and all(theirs[name] == ours[name] for name in shape):
            raise ContextFileError(
                f"{name} was made in {theirs['dtype']}, but the model is in {ours['dtype']}; load "
                f"the model in {theirs['dtype']}"
            )
        known_as = theirs["name"] or "a model without a name"
        raise ContextFileError(
            f"{name} was made with another model: {known_as} ({theirs['model_type']}, "
            f"{theirs['layers']} layers, {theirs['dtype']}); load that one"
        )
    if described["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise ContextFileError(
            f"{name} was made with another tokenizer or chat template; load the one it was made "
            "with"
        )


def model_fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Return what tells models apart: shape, settings, and a sample of every weight."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if weight.device.type != "meta" and weight.numel():
            flat = weight.detach().reshape(-1)
            step = max(1, flat.shape[0] // _SAMPLES)
            digest.update(flat[::step][:_SAMPLES].float().cpu().numpy().tobytes())
    config = model.config
    settings = {name: getattr(config, name, None) for name in _SETTINGS}
    return {
        "name": config._name_or_path,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "settings": json.dumps(settings, sort_keys=True, default=str),
        "weights": digest.hexdigest(),
    }


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what tells tokenizers apart: vocabulary, cutting of a probe, chat template."""
    facts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer(_PROBE_TEXT, verbose=False)["input_ids"],
        tokenizer.chat_template,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
