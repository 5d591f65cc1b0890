"""`pyramidkv generate`: one prompt, one answer, on a compressed cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..methods import Compression, describe_total, make_compression
from . import display, inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..generation import Generation


def generate(
    model: Annotated[str, typer.Option(help="Hub id, model folder or GGUF file.")],
    source: Annotated[
        str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with the prompt; - is standard input.")
    ] = None,
    method: Annotated[str, typer.Option(help="See `pyramidkv methods`.")] = "pyramidkv",
    budget: Annotated[
        int | None,
        typer.Option(help="Tokens kept per layer on average, sinks and window included."),
    ] = None,
    compression_ratio: Annotated[
        float | None,
        typer.Option(help="Fraction of the prompt removed, instead of a budget: 0.9 keeps 10%."),
    ] = None,
    window_size: Annotated[
        int | None, typer.Option(help="Last prompt tokens, always kept; their queries vote.")
    ] = None,
    sink_tokens: Annotated[int | None, typer.Option(help="First tokens, always kept.")] = None,
    pooling: Annotated[str | None, typer.Option(help="max or avg.")] = None,
    kernel_size: Annotated[
        int | None, typer.Option(help="Odd width of the pooling; 1 is none.")
    ] = None,
    group_reduce: Annotated[
        str | None, typer.Option(help="mean or max over query heads that share a KV head.")
    ] = None,
    window_reduce: Annotated[
        str | None, typer.Option(help="mean or max over the window's queries.")
    ] = None,
    value_norm: Annotated[
        bool | None,
        typer.Option("--value-norm/--no-value-norm", help="Weight scores by value norms."),
    ] = None,
    allocation: Annotated[str | None, typer.Option(help="uniform, pyramid, power or list.")] = None,
    beta: Annotated[
        float | None, typer.Option(help="Steepness of the pyramid, from 1 (uniform).")
    ] = None,
    gamma: Annotated[float | None, typer.Option(help="Exponent of the power law.")] = None,
    c_max: Annotated[int | None, typer.Option(help="Lowest layer of the power law.")] = None,
    c_min: Annotated[int | None, typer.Option(help="Highest layer of the power law.")] = None,
    layer_budgets: Annotated[
        str | None, typer.Option(help="Budgets layer by layer, such as 400,200,100.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Where to stop at the latest.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")] = None,
    device_map: Annotated[
        str | None, typer.Option(help="Such as auto, to spread layers over devices.")
    ] = None,
    attn_implementation: Annotated[
        str | None, typer.Option(help="sdpa, eager or flash_attention_2.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template [default: if there is one]."),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the full cache too and show both.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the schedule; load no weights.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the record as JSON.")] = None,
) -> None:
    """Generate from a prompt with a compressed KV cache."""
    options: dict[str, Any] = {
        "window_size": window_size,
        "sink_tokens": sink_tokens,
        "pooling": pooling,
        "kernel_size": kernel_size,
        "group_reduce": group_reduce,
        "window_reduce": window_reduce,
        "value_norm": value_norm,
        "allocation": allocation,
        "beta": beta,
        "gamma": gamma,
        "c_max": c_max,
        "c_min": c_min,
        "layer_budgets": inputs.layer_budgets(layer_budgets),
    }
    compression = make_compression(
        method,
        budget,
        compression_ratio,
        **{name: value for name, value in options.items() if value is not None},
    )
    inputs.check_seed(seed)
    text = inputs.read_prompt(prompt, prompt_file, source)
    inputs.check_output(output, prompt_file)
    if dry_run and (output is not None or compare):
        raise inputs.InputError(
            "--dry-run runs nothing, so it takes neither --output nor --compare"
        )

    quiet_transformers()
    # From here on torch and transformers are needed.
    from .. import generation, loading
    from ..support import full_attention_layers

    config = loading.load_config(model)
    layers = full_attention_layers(config)
    tokenizer = loading.load_tokenizer(model)
    limit = generation.context_length(config)
    generation.check_settings(max_new_tokens, temperature)
    ids = generation.encode_prompt(tokenizer, text, chat, limit, max_new_tokens)
    schedule = compression.schedule(len(layers), ids.shape[1])
    if dry_run:
        show_schedule(compression, schedule, ids.shape[1])
        return
    with display.console(stderr=True).status(f"loading {model}"):
        loaded = loading.load_model(
            model,
            dtype=dtype,
            device=device,
            device_map=device_map,
            attn_implementation=attn_implementation,
        )
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "chat": chat}
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
            compression.budget,
            compression.compression_ratio,
            on_layer=on_layer,
            on_text=lambda piece: typer.echo(piece, nl=False),
            **settings,
        )
    typer.echo()
    return result


def show_schedule(compression: Compression, schedule: list[int], prompt_tokens: int) -> None:
    """Print what each layer would keep of a prompt."""
    out = display.console()
    out.print(f"{compression.method.name}, prompt of {prompt_tokens:,} tokens, kept per layer:")
    for line in display.schedule_lines(schedule):
        out.print(line)
    explicit = compression.method.options.allocation == "list"
    if explicit or not compression.method.evicts:
        out.print(f"in all: {sum(schedule):,} tokens")
    else:
        budget = compression.budget_for(prompt_tokens)
        out.print(f"in all: {describe_total(schedule, budget, prompt_tokens)}")
    full = len(schedule) * prompt_tokens
    out.print(f"full cache: {full:,} tokens, {full / sum(schedule):.1f}x as many")


def describe_parting(compressed: Generation, full: Generation) -> str:
    """Say where the texts of two runs part."""
    from ..generation import common_prefix

    if compressed.token_ids == full.token_ids:
        return f"Both texts are the same, {len(full.token_ids)} tokens."
    shared = common_prefix(compressed.token_ids, full.token_ids)
    return (
        f"The texts part after {shared} tokens; the full cache's has {len(full.token_ids)}, the "
        f"compressed one's {len(compressed.token_ids)}."
    )


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice out of the output; before its import."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
