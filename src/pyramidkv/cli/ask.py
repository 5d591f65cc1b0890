"""`pyramidkv ask`: one document, any number of questions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import contexts, display, inputs, options


@options.taking(
    options.AMOUNTS,
    options.METHOD_OPTIONS,
    options.PLUGINS,
    options.GENERATION,
    options.MODEL,
)
def ask(
    model: options.Model,
    context: options.ContextFile = None,
    load: options.Load = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", help="A question; may be given several times."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", help="Save the compressed context for --load.")
    ] = None,
    query_aware: Annotated[
        bool,
        typer.Option("--query-aware", help="Let the first question vote on what is kept."),
    ] = False,
    output: options.Output = None,
    **given: Any,
) -> None:
    """Ask questions of one document: it is processed once, each question starts from there."""
    given |= {"model": model, "context": context, "load": load}
    plugins = options.load_plugins(given)
    text = contexts.check(given)
    questions = question or []
    if not questions and save is None:
        raise inputs.InputError("give a question with -q TEXT, or a file to save to with --save")
    if query_aware and (load is not None or not questions):
        why = "a saved context is compressed already" if load is not None else "none is given"
        raise inputs.InputError(f"--query-aware lets the first question vote, but {why}")
    # A context that is loaded is in memory before anything is saved, so that it may be replaced.
    read = [context, *options.files_read(given), *plugins]
    inputs.check_files({"--output": output}, [load, *read], model)
    inputs.check_files({"--save": save, "--output": output}, read, model)

    options.quiet_transformers()
    from transformers import set_seed

    from ..prompts import check_text

    for asked in questions:
        check_text(asked, "question")
    opened, seconds = contexts.open_context(given, text, questions, query_aware, save)
    messages = display.console(stderr=True)
    messages.print(contexts.describe(opened, seconds, load is not None))
    if opened.turns:
        messages.print(f"its {len(opened.turns)} turns are left out; chat goes on with them")
    contexts.save(opened, save)
    answers = []
    for asked in questions:
        set_seed(given["seed"])
        if len(questions) > 1:
            typer.echo(f"> {asked.strip()}")
        answer = opened.ask(
            asked,
            max_new_tokens=given["max_new_tokens"],
            temperature=given["temperature"],
            on_text=lambda piece: typer.echo(piece, nl=False),
        )
        typer.echo()
        first = answer.record["time_to_first_token_s"]
        messages.print(f"first token after {first:.2f} s, {len(answer.token_ids)} tokens")
        answers.append({"question": asked, **answer.record})
    record = {
        "context": {**opened.record, "model_given": model, "seconds": seconds},
        "loaded": load is not None,
        "seed": given["seed"],
        "answers": answers,
    }
    inputs.write_output(output, record)
