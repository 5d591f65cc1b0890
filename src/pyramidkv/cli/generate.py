"""`pyramidkv generate`: one prompt, one answer, on a compressed cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import Compression, describe_method, describe_total, make_compression
from . import display, inputs, options

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation import Generation


@options.taking(
    options.AMOUNTS,
    options.METHOD_OPTIONS,
    options.PLUGINS,
    options.GENERATION,
    options.MODEL,
)
def generate(
    model: options.Model,
    source: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with the prompt; - is standard input.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the full cache too and show both.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the schedule; load no weights.")
    ] = False,
    output: options.Output = None,
    **given: Any,
) -> None:
    """Generate from a prompt with a compressed KV cache."""
    chat, prefill_chunk, seed = given["chat"], given["prefill_chunk"], given["seed"]
    max_new_tokens, temperature = given["max_new_tokens"], given["temperature"]
    plugins = options.load_plugins(given)
    compression = options.compression_from(given)
    inputs.check_seed(seed)
    text = inputs.read_prompt(prompt, prompt_file, source)
    inputs.check_files(
        {"--output": output}, [prompt_file, *options.files_read(given), *plugins], model
    )
    if dry_run and (output is not None or compare):
        raise inputs.InputError(
            "--dry-run runs nothing, so it takes neither --output nor --compare"
        )

    options.quiet_transformers()
    # From here on torch and transformers are needed.
    from .. import loading, prompts
    from ..model_shape import layers_to_compress
    from ..support import full_attention_layers

    config = loading.load_config(model)
    layers = full_attention_layers(config)
    tokenizer = loading.load_tokenizer(model)
    limit = prompts.context_length(config)
    prompts.check_settings(max_new_tokens, temperature)
    prompts.check_chunk(prefill_chunk)
    ids = prompts.encode_prompt(tokenizer, text, chat, limit, max_new_tokens)
    layers_to_compress(config, compression)
    if dry_run or not compression.follows_prompt:
        schedule = compression.schedule(len(layers), ids.shape[1])
    else:
        compression.possible_budget(ids.shape[1])  # refuses what does not fit the prompt
    if dry_run:
        show_schedule(compression, schedule, layers, ids.shape[1], prefill_chunk)
        return
    loaded = options.load_model(model, given)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "chat": chat}
    settings["prefill_chunk"] = prefill_chunk
    runs = [run(loaded, tokenizer, text, compression, seed, **settings)]
    if compare:
        full = make_compression("full")
        display.console(stderr=True).print("\nfull cache:")
        runs.append(run(loaded, tokenizer, text, full, seed, **settings))
    messages = display.console(stderr=True)
    messages.print()
    messages.print(display.results_table([result.record for result in runs]))
    if compare:
        messages.print(describe_parting(*runs))
    records = [{**result.record, "seed": seed, "model_given": model} for result in runs]
    inputs.write_output(output, records[0] if len(records) == 1 else {"runs": records})


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    compression: Compression,
    seed: int = 0,
    **settings: Any,
) -> Generation:
    """Generate once; the text goes to standard output as it is produced."""
    from transformers import set_seed

    from ..generation import generate as run_generation

    set_seed(seed)
    with display.progress("prompt, layer") as on_layer:
        result = run_generation(
            model,
            tokenizer,
            text,
            compression.method,
            **compression.amounts,
            on_layer=on_layer,
            on_text=lambda piece: typer.echo(piece, nl=False),
            **settings,
        )
    typer.echo()
    return result


def show_schedule(
    compression: Compression,
    schedule: list[int],
    layers: list[int],
    prompt_tokens: int,
    prefill_chunk: int | None = None,
) -> None:
    """Print what each layer would keep of a prompt."""
    out = display.console()
    title = describe_method(compression.parameters())
    out.print(f"{title}, prompt of {prompt_tokens:,} tokens, kept per layer:")
    for line in display.schedule_lines(schedule, layers):
        out.print(line)
    explicit = compression.method.options.allocation == "list"
    if explicit or not compression.method.evicts:
        out.print(f"in all: {sum(schedule):,} tokens")
    else:
        budget = compression.budget_for(prompt_tokens)
        out.print(f"in all: {describe_total(schedule, budget, prompt_tokens)}")
    full = len(schedule) * prompt_tokens
    out.print(f"full cache: {full:,} tokens, {full / sum(schedule):.1f}x as many")
    if prefill_chunk is not None:
        out.print(
            f"in pieces of {prefill_chunk:,}: a layer never holds more than its share and one"
        )
    if compression.decode_budget is not None:
        out.print(
            f"while decoding: every {compression.decode_interval} tokens back to "
            f"{compression.decode_budget:,} per layer on average"
        )


def describe_parting(compressed: Generation, full: Generation) -> str:
    """Say where the texts of two runs part."""
    from ..prompts import common_prefix

    if compressed.token_ids == full.token_ids:
        return f"Both texts are the same, {len(full.token_ids)} tokens."
    shared = common_prefix(compressed.token_ids, full.token_ids)
    return (
        f"The texts part after {shared} tokens; the full cache's has {len(full.token_ids)}, the "
        f"compressed one's {len(compressed.token_ids)}."
    )
