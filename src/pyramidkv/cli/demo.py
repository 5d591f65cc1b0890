"""`pyramidkv demo`: the main job on a real text and a small real model, side by side."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..compression import make_compression
from . import display, inputs, options
from .generate import run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION = "What is the password of the Lisbon office?"
NEEDLE = "The password of the Lisbon office is tulip-4821."


def demo(
    budget: Annotated[int, typer.Option(help="Tokens kept per layer on average.")] = 256,
    document_tokens: Annotated[
        int, typer.Option(help="Length of the document, up to about 6,000 tokens.")
    ] = 3200,
    output: Annotated[Path | None, typer.Option(help="Write the records as JSON.")] = None,
) -> None:
    """Find a password in the United States Constitution, with 8% of the KV cache.

    Runs SmolLM2-135M-Instruct, from its installed package or from the hub.
    """
    runs = [make_compression("full")]
    runs += [make_compression(name, budget) for name in ("pyramidkv", "streamingllm")]
    inputs.check_files({"--output": output})
    if document_tokens < 1:
        raise inputs.InputError(f"--document-tokens is {document_tokens}; it must be at least 1")

    options.quiet_transformers()
    from .. import loading
    from ..prompts import encode_prompt

    name = loading.demo_model()
    messages = display.console(stderr=True)
    with messages.status("loading SmolLM2-135M-Instruct (half a minute)"):
        tokenizer = loading.load_tokenizer(name)
        model = loading.load_model(name, dtype="float32")
    prompt = planted_document(tokenizer, document_tokens) + f"\n\n{QUESTION}"
    tokens = encode_prompt(tokenizer, prompt).shape[1]
    typer.echo(f"Document: the United States Constitution, {tokens:,} tokens with the question.")
    typer.echo(f"Planted a third of the way down: {NEEDLE!r}")
    typer.echo(f"Question: {QUESTION}\n")
    records = []
    for compression in runs:
        kept = "every token" if compression.budget is None else f"{budget} tokens per layer"
        typer.echo(f"{compression.method.name} ({kept}): ", nl=False)
        result = run(model, tokenizer, prompt, compression, max_new_tokens=24)
        records.append(result.record)
    typer.echo("")
    display.console().print(display.results_table(records))
    inputs.write_output(output, {"runs": records})


def planted_document(tokenizer: PreTrainedTokenizerBase, tokens: int) -> str:
    """Return the first tokens of the Constitution with the needle a third of the way down."""
    text = files("pyramidkv").joinpath("data/constitution.txt").read_text("utf-8")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    document = str(tokenizer.decode(ids[:tokens]))
    place = document.find("\n\n", len(document) // 3)
    place = len(document) if place < 0 else place
    return f"{document[:place]}\n\n{NEEDLE}{document[place:]}"
