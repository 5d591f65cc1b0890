"""From a prompt to text on a compressed cache, with everything measured on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from .cache import CompressedCache
from .engine import cache_parameter
from .errors import CacheStateError, PromptError
from .measure import PeakMemory, machine, versions
from .methods import Method


@dataclass(frozen=True)
class Generation:
    """What one run produced.

    Attributes:
        text: the generated text, special tokens left out.
        token_ids: the generated tokens.
        record: versions, machine, model, method with all parameters, schedule, kept lengths,
            bytes, peak memory and times; plain values, ready for JSON.
    """

    text: str
    token_ids: list[int]
    record: dict[str, Any]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chat: bool | None = None,
    context_length: int | None = None,
    max_new_tokens: int = 0,
) -> Tensor:
    """Return the prompt's token ids, `[1, tokens]`.

    Args:
        prompt: the user's text.
        chat: put it into the model's chat template; by default if the tokenizer has one.
        context_length: the most tokens the model takes, generated ones included.
        max_new_tokens: tokens that are to be generated.

    Raises:
        PromptError: the prompt is empty or too long, or there is no chat template.
    """
    if not prompt.strip():
        raise PromptError("the prompt is empty; give some text")
    if chat is None:
        chat = tokenizer.chat_template is not None
    if chat:
        if tokenizer.chat_template is None:
            raise PromptError("this model's tokenizer has no chat template; use --no-chat")
        message = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(  # type: ignore[assignment]
            message, add_generation_prompt=True, tokenize=False
        )
    encoded = tokenizer(prompt, add_special_tokens=not chat, return_tensors="pt", verbose=False)
    ids: Tensor = encoded["input_ids"]
    if context_length is not None and ids.shape[1] + max_new_tokens > context_length:
        raise PromptError(
            f"the prompt has {ids.shape[1]:,} tokens and {max_new_tokens:,} are to be generated, "
            f"but this model's context is {context_length:,} tokens; shorten the prompt or "
            "generate less"
        )
    return ids


def check_settings(max_new_tokens: int, temperature: float) -> None:
    """Raise `PromptError` if nothing is to be generated or the temperature is none."""
    if max_new_tokens < 1:
        raise PromptError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise PromptError(f"temperature is {temperature}; it must be 0 or a positive number")


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens a model takes, or None if its configuration does not say."""
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else int(length)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    temperature: float = 0.0,
    on_text: Callable[[str], None] | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Generation:
    """Answer a prompt from a compressed cache and record how it went.

    Args:
        model, tokenizer: from transformers.
        prompt: the user's text; with `chat` it is put into the chat template (default: if any).
        method, budget, compression_ratio, options: see `CompressedCache`.
        max_new_tokens: where to stop at the latest.
        temperature: 0 decodes greedily; above 0 samples.
        on_text: called with each piece of text as it is produced.
        on_layer: called with (layers done, layers) while the prompt is processed.

    Raises:
        PyramidKVError: the prompt, the method or the model does not fit.
    """
    check_settings(max_new_tokens, temperature)
    ids = encode_prompt(tokenizer, prompt, chat, context_length(model.config), max_new_tokens)
    ids = ids.to(model.device)
    own_implementation = model.config._attn_implementation
    cache = CompressedCache(model, method, budget, compression_ratio, on_layer=on_layer, **options)
    stream = _MeasuringStream(tokenizer, cache, on_text)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else _GREEDY
    peak = PeakMemory(model.device)
    peak.start()
    stream.begin()
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            eos_token_id=_stop_tokens(model, tokenizer),
            pad_token_id=_pad_token(tokenizer),
            streamer=stream,
            **sampling,
            **{cache_parameter(model): cache},
        )
    peak_bytes = peak.bytes()
    new_ids = output[0, ids.shape[1] :].tolist()
    text: str = tokenizer.decode(new_ids, skip_special_tokens=True)  # type: ignore[assignment]
    record = {
        "versions": versions(),
        "machine": machine(model.device),
        "model": _describe(model, cache, own_implementation),
        "compression": cache.compression.parameters(),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "generation_config": model.generation_config.to_diff_dict(),
        "prompt_tokens": ids.shape[1],
        "generated_tokens": len(new_ids),
        **stream.cache_after_prompt,
        "kv_bytes_at_end": cache.kv_bytes,
        "peak_memory_bytes": peak_bytes,
        "peak_memory_kind": peak.kind,
        **stream.times(),
        "chat": tokenizer.chat_template is not None if chat is None else chat,
        "token_ids": new_ids,
        "text": text,
    }
    return Generation(text, new_ids, record)


_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "temperature": None,
    "top_p": None,
    "top_k": None,
}  # without the Nones, a model's own sampling settings would be warned about


class _MeasuringStream(TextStreamer):
    """Passes text on as it comes and notes the time of each token."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cache: CompressedCache,
        on_text: Callable[[str], None] | None,
    ):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._cache = cache
        self._on_text = on_text
        self._times: list[float] = []
        self.cache_after_prompt: dict[str, Any] = {}

    def begin(self) -> None:
        self._times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self._times.append(time.perf_counter())
            if not self.cache_after_prompt:
                self.cache_after_prompt = measure_cache(self._cache)
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self._on_text is not None and text:
            self._on_text(text)

    def times(self) -> dict[str, float | None]:
        steps = [b - a for a, b in zip(self._times[1:], self._times[2:], strict=False)]
        return {
            "time_to_first_token_s": self._times[1] - self._times[0],
            "time_per_output_token_s": statistics.median(steps) if steps else None,
        }


def measure_cache(cache: CompressedCache) -> dict[str, Any]:
    """Describe what a cache holds, read off its tensors; for one prompt."""
    if not cache.prompt_lengths:
        raise CacheStateError(
            "the model did not use the compressed cache it was given, so nothing was compressed"
        )
    kept = [lengths[0] for lengths in cache.kept_lengths()]
    schedule = cache.schedules[0]
    prompt = cache.prompt_lengths[0]
    kv_bytes_full = cache.kv_bytes
    for layer in cache.compressed_layers:
        for tensor in (layer.keys, layer.values):
            assert tensor is not None
            kv_bytes_full += tensor.nbytes // tensor.shape[2] * (prompt - tensor.shape[2])
    return {
        "schedule": schedule,
        "schedule_total": sum(schedule),
        "full_total": prompt * len(schedule),
        "kept_lengths": kept,
        "kv_bytes": cache.kv_bytes,
        "kv_bytes_full": kv_bytes_full,
        "allocated_bytes": cache.allocated_bytes,
    }


def _describe(
    model: PreTrainedModel, cache: CompressedCache, implementation: str
) -> dict[str, Any]:
    config = model.config
    keys = cache.compressed_layers[0].keys
    assert keys is not None
    return {
        "name": config._name_or_path,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "full_attention_layers": len(cache.compressed_layers),
        "kv_heads": keys.shape[1],
        "head_dim": keys.shape[3],
        "dtype": str(keys.dtype).removeprefix("torch."),
        "attn_implementation": implementation,
    }


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    own = model.generation_config.eos_token_id
    stops = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    return sorted(token for token in stops if isinstance(token, int)) or None


def _pad_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else tokenizer.eos_token_id


def common_prefix(first: list[int], second: list[int]) -> int:
    """Return after how many tokens two generations part; the shorter's length if they do not."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
