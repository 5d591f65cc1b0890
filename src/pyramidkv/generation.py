"""From a prompt to text on a compressed cache, with everything measured on the way."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)

from .budgets import whole
from .cache import CompressedCache
from .compression import Compression
from .engine import cache_parameter
from .errors import CacheStateError, PromptError
from .measure import PeakMemory, machine, versions
from .methods import Method
from .prompts import PromptFormat, check_chunk, check_settings, context_length, encode_prompt
from .support import check_model


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


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    decode_budget: int | None = None,
    decode_interval: int | None = None,
    prefill_chunk: int | None = None,
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
        method, budget, compression_ratio, decode_budget, decode_interval, options: see
            `CompressedCache`.
        prefill_chunk: process the prompt in pieces of this many tokens, so that no layer ever
            holds more than its share and one piece; by default in one.
        max_new_tokens: where to stop at the latest.
        temperature: 0 decodes greedily; above 0 samples.
        on_text: called with each piece of text as it is produced.
        on_layer: called with (layers done, layers) while the prompt is processed.

    Raises:
        PyramidKVError: the prompt, the method or the model does not fit.
    """
    check_model(model)
    check_settings(max_new_tokens, temperature)
    ids = encode_prompt(tokenizer, prompt, chat, context_length(model.config), max_new_tokens)
    ids = ids.to(model.device)
    own_implementation = model.config._attn_implementation
    cache = CompressedCache(
        model,
        method,
        budget,
        compression_ratio,
        decode_budget=decode_budget,
        decode_interval=decode_interval,
        on_layer=on_layer,
        **options,
    )
    pieces = plan_pieces(ids.shape[1], prefill_chunk, cache.compression)
    peak = PeakMemory(model.device)
    peak.start()
    stream = MeasuringStream(tokenizer, cache, on_text)
    mask = torch.ones_like(ids)
    cache.expect_prompt(mask)
    process(model, cache, ids, mask, pieces[:-1])
    output = decode(model, tokenizer, cache, ids, mask, stream, max_new_tokens, temperature)
    peak_bytes = peak.bytes()
    new_ids = output[0].tolist()
    text: str = tokenizer.decode(new_ids, skip_special_tokens=True)  # type: ignore[assignment]
    record = {
        **describe_run(model, cache, own_implementation),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "generation_config": model.generation_config.to_diff_dict(),
        "prompt_tokens": ids.shape[1],
        "prefill_chunk": prefill_chunk,
        "generated_tokens": len(new_ids),
        **stream.cache_after_prompt,
        "kept_lengths_at_end": [kept[0] for kept in cache.kept_lengths()],
        "kv_bytes_at_end": cache.kv_bytes,
        "peak_memory_bytes": peak_bytes,
        "peak_memory_kind": peak.kind,
        **stream.times(),
        "chat": PromptFormat.choose(tokenizer, chat).chat,
        "token_ids": new_ids,
        "text": text,
    }
    return Generation(text, new_ids, record)


def plan_pieces(
    tokens: int, chunk: int | None, compression: Compression, question: int = 0
) -> list[int]:
    """Return the sizes of the pieces a prompt is processed in, none above `chunk`.

    The last `question` tokens come in one piece.

    Raises:
        PromptError: the size is no size, or the question is longer.
        MethodError: the method cannot take a prompt in pieces.
    """
    check_chunk(chunk)
    if chunk is None:
        return [tokens]
    compression.method.require("prefill chunks")
    if question > chunk:
        raise PromptError(
            f"the question has {question} tokens, but prefill_chunk is {chunk}; a question that "
            "votes must fit into one piece"
        )
    starts = list(range(0, tokens, chunk))
    if starts[-1] > tokens - question:
        starts[-1] = tokens - question
    return [end - start for start, end in zip(starts, [*starts[1:], tokens], strict=True)]


def process(
    model: PreTrainedModel,
    cache: CompressedCache,
    ids: Tensor,
    mask: Tensor,
    pieces: Sequence[int],
) -> None:
    """Pass the first tokens of `ids` through the model's decoder, piece by piece.

    Args:
        ids, mask: `[batch, tokens]`.
        pieces: how many tokens at a time; their sum may be below `tokens`.
    """
    decoder = model.get_decoder()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    start = 0
    with torch.inference_mode():
        for size in pieces:
            end = start + size
            decoder(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                use_cache=True,
                **{cache_parameter(decoder): cache},
            )
            start = end


def decode(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CompressedCache,
    ids: Tensor,
    mask: Tensor,
    stream: MeasuringStream | None,
    max_new_tokens: int,
    temperature: float,
    stop: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Generate from what the cache has not seen yet of `ids`; returns the new ids `[batch, n]`.

    Args:
        ids, mask: `[batch, tokens]`, of everything seen and new.
        stop: given all ids `[batch, tokens so far]` after each token; True ends the generation.
    """
    sampling = {"do_sample": True, "temperature": temperature} if temperature else _GREEDY
    criteria = [] if stop is None else [_Stop(stop)]
    with torch.inference_mode():
        output = model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            num_beams=1,  # a stream has no use for more
            eos_token_id=stop_tokens(model, tokenizer),
            pad_token_id=pad_token(tokenizer),
            streamer=stream,
            stopping_criteria=StoppingCriteriaList(criteria),
            **sampling,
            **{cache_parameter(model): cache},
        )
    new: Tensor = output[:, ids.shape[1] :]
    return new


class _Stop(StoppingCriteria):
    def __init__(self, stop: Callable[[Tensor], bool]):
        self._stop = stop

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self._stop(input_ids), device=input_ids.device)


def until_stop(ids: list[int], stops: Collection[int]) -> list[int]:
    """Cut off what pads a finished row: everything after the first token that ends an answer."""
    for index, token in enumerate(ids):
        if token in stops:
            return ids[: index + 1]
    return ids


_GREEDY: dict[str, Any] = {
    "do_sample": False,
    "temperature": None,
    "top_p": None,
    "top_k": None,
}  # without the Nones, a model's own sampling settings would be warned about


class MeasuringStream(TextStreamer):
    """Passes text on as it comes and notes the time of each token; time counts from its making."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cache: CompressedCache,
        on_text: Callable[[str], None] | None,
        started: float | None = None,
    ):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._cache = cache
        self._on_text = on_text
        self._times = [time.perf_counter() if started is None else started]
        self.cache_after_prompt: dict[str, Any] = {}

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
    for layer, held in zip(cache.compressed_layers, kept, strict=True):
        kv_bytes_full += round(len(cache.prompt_lengths) * layer.token_bytes * (prompt - held))
    return {
        "schedule": schedule,
        "schedule_total": whole(sum(schedule)),
        "full_total": prompt * len(schedule),
        "kept_lengths": kept,
        "kv_bytes": cache.kv_bytes,
        "kv_bytes_full": kv_bytes_full,
        "allocated_bytes": cache.allocated_bytes,
    }


def describe_run(
    model: PreTrainedModel, cache: CompressedCache, implementation: str
) -> dict[str, Any]:
    """Describe what a run depends on: versions, machine, model and compression.

    `implementation` is the model's own attention implementation.
    """
    config = model.config
    keys, _ = cache.compressed_layers[0].states_like()
    described = {
        "name": config._name_or_path,
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "full_attention_layers": len(cache.compressed_layers),
        "kv_heads": keys.shape[1],
        "head_dim": keys.shape[3],
        "dtype": str(keys.dtype).removeprefix("torch."),
        "attn_implementation": implementation,
    }
    return {
        "versions": versions(),
        "machine": machine(model.device),
        "model": described,
        "compression": cache.compression.parameters(),
    }


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int] | None:
    """Return every token that ends an answer: the model's own and the tokenizer's."""
    own = model.generation_config.eos_token_id
    stops = set(own if isinstance(own, list) else [own]) | {tokenizer.eos_token_id}
    return sorted(token for token in stops if isinstance(token, int)) or None


def pad_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return a token to pad with."""
    pad = tokenizer.pad_token_id
    return pad if isinstance(pad, int) else tokenizer.eos_token_id
