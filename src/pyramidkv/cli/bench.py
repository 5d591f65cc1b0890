"""`pyramidkv bench`: times and bytes of methods and of transformers' own cache, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..records import format_bytes
from . import display, inputs, options

_SHARED = options.Group(
    "What is measured",
    {
        "methods": (options.Methods, "full,snapkv,pyramidkv,adakv"),
        "plugin": (options.Plugins, None),
        "budgets": (options.Budgets, "512"),
        "window_size": (options.WindowSize, None),
        "sink_tokens": (options.SinkTokens, None),
    },
)


@options.taking(_SHARED, options.MODEL)
def bench(
    model: options.Model,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "2000,8000",
    batch: Annotated[str, typer.Option(help="Prompts processed together, such as 1,4.")] = "1",
    steps: Annotated[int, typer.Option(help="Tokens generated after each prompt.")] = 32,
    repeats: Annotated[int, typer.Option(help="Turns that count; one more warms up.")] = 3,
    threads: Annotated[
        int | None, typer.Option(help="Threads on the CPU; by default torch's choice.")
    ] = None,
    seed: options.Seed = 0,
    output: options.Output = None,
    plot: options.Plot = None,
    **given: Any,
) -> None:
    """Measure prompt time, time per token, bytes and peak memory; arms take turns."""
    inputs.check_seed(seed)
    inputs.check_files({"--output": output, "--plot": plot}, options.load_plugins(given), model)
    inputs.check_picture(plot)
    if threads is not None and threads < 1:
        raise inputs.InputError(f"--threads is {threads}; give at least 1")
    compressions = options.compressions(given)
    sizes = inputs.whole_numbers(lengths, "--lengths")
    batches = inputs.whole_numbers(batch, "--batch")
    options.quiet_transformers()
    import torch

    from .. import loading
    from ..benchmarking import check_bench, run_bench

    config = loading.load_config(model)
    check_bench(config, compressions, sizes, batches, steps, repeats)
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = options.load_model(model, given)
    with display.progress_with_time_left("prompts") as on_run:
        record = run_bench(
            loaded,
            compressions,
            sizes,
            batches,
            steps=steps,
            repeats=repeats,
            seed=seed,
            on_run=on_run,
        )
    inputs.write_output(output, record)
    if plot is not None:
        from ..plots.bench import draw

        inputs.write_picture(plot, draw(record))
    show(record)


def show(record: dict[str, Any]) -> None:
    """Print a bench's record."""
    out = display.console()
    settings, machine = record["settings"], record["machine"]
    place = machine["device_name"] or machine["processor"]
    out.print(
        f"Random prompts; medians of {settings['repeats']} turns, lowest and highest; a token is "
        f"the median of {settings['steps']}. {machine['torch_threads']} threads on {place}, "
        f"{record['model']['dtype']}. Peak memory: {record['peak_memory_kind']}, weights included."
    )
    for (length, batch), results in _groups(record["results"]):
        many = f", {batch} at a time" if batch > 1 else ""
        out.print(f"\nPrompts of {length:,} tokens{many}")
        columns = [
            ("prompt", [_seconds(r["prefill_s"], 1, "s") for r in results]),
            ("against", [f"{r['against']['prefill']:.3f}x" for r in results]),
            ("compressing", [_compressing(r) for r in results]),
            ("per token", [_seconds(r["step_s"], 1000, "ms") for r in results]),
            ("against", [f"{r['against']['step']:.2f}x" for r in results]),
            ("tokens/s", [f"{r['tokens_per_s']['median']:,.1f}" for r in results]),
            ("KV cache", [format_bytes(r["kv_bytes"]) for r in results]),
            ("peak", [format_bytes(r["peak_bytes"]) for r in results]),
        ]
        for table in display.wide_tables([r["arm"] for r in results], columns, out.width):
            out.print(table, crop=False)


def _groups(
    results: list[dict[str, Any]],
) -> Iterator[tuple[tuple[int, int], list[dict[str, Any]]]]:
    """Yield what was measured of each length and batch."""
    sizes = dict.fromkeys((result["length"], result["batch"]) for result in results)
    for size in sizes:
        yield size, [result for result in results if (result["length"], result["batch"]) == size]


def _seconds(spread: dict[str, float], factor: int, unit: str) -> str:
    median, low, high = (factor * spread[name] for name in ("median", "low", "high"))
    return f"{median:.4g} {unit} ({low:.4g} to {high:.4g})"


def _compressing(result: dict[str, Any]) -> str:
    if result["compression"] is None:
        return "-"
    milliseconds = 1000 * result["compress_s"]["median"]
    return f"{milliseconds:.4g} ms, {100 * result['compress_share']:.1f}%"
