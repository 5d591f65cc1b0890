"""What `ask` and `chat` share: a compressed context from a document or from a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..records import format_bytes
from . import display, inputs, options

if TYPE_CHECKING:
    from ..context import CompressedContext


def check(given: dict[str, Any]) -> str | None:
    """Check what needs no model, and return the document's text; None if a file is to be loaded.

    Raises:
        PyramidKVError: neither or both are given, or options do not fit.
    """
    inputs.check_seed(given["seed"])
    document, saved = given["context"], given["load"]
    if (document is None) == (saved is None):
        which = "neither" if document is None else "both"
        raise inputs.InputError(
            f"give the document with --context FILE, or a saved one with --load FILE; {which} given"
        )
    if saved is not None:
        options.refuse_compression(given, "a saved context is compressed already")
        options.quiet_transformers()
        from ..context_file import read_description

        read_description(saved, check_content=False)  # all of it is checked when it is loaded
        return None
    options.compression_from(given)
    text = inputs.read_text(document)
    if not text.strip():
        where = "standard input" if str(document) == "-" else repr(str(document))
        raise inputs.InputError(f"{where} is empty; give a document with some text")
    return text


def open_context(
    given: dict[str, Any],
    text: str | None,
    questions: Sequence[str] = (),
    query_aware: bool = False,
    save_to: Path | None = None,
) -> tuple[CompressedContext, float]:
    """Compress the document, or load the saved context; returns the seconds that took, too.

    Questions are checked before any work; with `query_aware` the first one votes.
    """
    from .. import loading, prompts
    from ..context import CompressedContext, compress_context
    from ..context_file import check_savable
    from ..support import full_attention_layers

    config = loading.load_config(given["model"])
    full_attention_layers(config)
    if save_to is not None:
        check_savable(config)
    tokenizer = loading.load_tokenizer(given["model"])
    prompts.check_settings(given["max_new_tokens"], given["temperature"])
    prompts.check_chunk(given["prefill_chunk"])
    if text is not None:
        form = prompts.PromptFormat.choose(tokenizer, given["chat"])
        limit = prompts.context_length(config)
        for question in questions or ["?"]:
            tokens = len(form.encode(question.strip(), text))
            prompts.check_length(tokens, limit, given["max_new_tokens"])
    model = options.load_model(given["model"], given)
    started = time.perf_counter()
    if text is None:
        context = CompressedContext.load(given["load"], model, tokenizer)
    else:
        compression = options.compression_from(given)
        with display.progress("document, layers done") as on_layer:
            context = compress_context(
                model,
                tokenizer,
                text,
                compression.method,
                **compression.amounts,
                question=questions[0] if query_aware else None,
                prefill_chunk=given["prefill_chunk"],
                chat=given["chat"],
                on_layer=on_layer,
            )
    return context, time.perf_counter() - started


def describe(context: CompressedContext, seconds: float, loaded: bool) -> str:
    """Say in a line what a context holds and how long it took to have it."""
    from ..generation import measure_cache

    held = measure_cache(context.cache)
    kept = sum(held["kept_lengths"]) / len(held["kept_lengths"])
    how = "loaded" if loaded else "compressed"
    return (
        f"{how} in {seconds:.2f} s: {context.tokens_seen:,} tokens seen, {kept:,.0f} kept per "
        f"layer, KV cache {format_bytes(context.kv_bytes)} of "
        f"{format_bytes(held['kv_bytes_full'])}"
    )


def save(context: CompressedContext, path: Path | None) -> None:
    """Save a context if a file is given, and say so."""
    if path is not None:
        context.save(path)
        typer.echo(f"saved as {str(path)!r}", err=True)
