"""`pyramidkv plan`: what a method saves on a model and a machine, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import Compression, describe_method, make_compression
from ..deployment import UTILIZATION, WEIGHT_BYTES, Deployment
from ..methods import get_method
from ..model_source import find_model, preset_names
from ..planning import plan_memory
from ..records import format_both, format_bytes
from . import display, inputs, options

if TYPE_CHECKING:
    from rich.table import Table


@options.taking(options.AMOUNTS, options.METHOD_OPTIONS, options.PLUGINS)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL-OR-CONFIG",
            help="A config.json, a model folder, a hub id or a preset; `presets` lists those.",
        ),
    ],
    context: Annotated[int | None, typer.Option(help="Prompt tokens of a request.")] = None,
    batch: Annotated[int, typer.Option(help="Requests processed together.")] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens generated for each request, counted too.")
    ] = 0,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of each GPU, such as 80GB or 80GiB.")
    ] = None,
    gpu_utilization: Annotated[
        float | None, typer.Option(help=f"Fraction of it that may be used ({UTILIZATION}).")
    ] = None,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the cache on all GPUs, instead: such as 40GB.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share each layer.")] = 1,
    bandwidth: Annotated[
        str | None, typer.Option(help="What each GPU reads from memory, such as 3.35TB/s.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Of the weights: {', '.join(WEIGHT_BYTES)}.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Of the cache: float32, bfloat16, float16, fp8 or int8.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="METHOD[:ALLOCATION] side by side, such as snapkv,pyramidkv,h2o:power."),
    ] = None,
    output: options.Output = None,
    plot: options.Plot = None,
    **given: Any,
) -> None:
    """Show memory, schedule and decoding limits from a model's config.json; runs nothing."""
    if model == "presets" and context is None:
        typer.echo("\n".join(preset_names()))
        return
    if context is None:
        raise inputs.InputError("give the length of a prompt with --context, in tokens")
    if gpu_utilization is not None and gpu_memory is None:
        raise inputs.InputError("--gpu-utilization is a fraction of --gpu-memory; give that too")
    deployment = Deployment(
        context=context,
        batch=batch,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        gpu_memory=inputs.byte_count(gpu_memory, "--gpu-memory"),
        utilization=UTILIZATION if gpu_utilization is None else gpu_utilization,
        kv_memory=inputs.byte_count(kv_memory, "--kv-memory"),
        bandwidth=inputs.bytes_per_second(bandwidth, "--bandwidth"),
        prefill_chunk=given["prefill_chunk"],
    )
    plugins = options.load_plugins(given)
    compressions = _compressions(given, compare)
    read = [*options.files_read(given), *plugins]
    inputs.check_files({"--output": output, "--plot": plot}, read, model)
    inputs.check_picture(plot)
    source = find_model(model)
    record = plan_memory(source.shape, deployment, compressions, source.weight_bytes)
    record["notes"] += source.notes
    record["model"]["found"] = source.where
    inputs.write_output(output, record)
    if plot is not None:
        from ..plots.plan import draw

        inputs.write_picture(plot, draw(record))
    show(record)


def _compressions(given: dict[str, Any], compare: str | None) -> list[Compression]:
    """Return what stands beside the full cache: nothing, if no method and no amount is given."""
    amounts = {name: given[name] for name in options.AMOUNTS.options}
    amounts.pop("prefill_chunk")
    method = amounts.pop("method")
    if compare is not None:
        if method is not None:
            raise inputs.InputError("give one --method or several to --compare; both given")
        return _compared(compare, amounts, options.method_options(given))
    names = (*amounts, *options.METHOD_OPTIONS.options)
    if method is None and all(given[name] is None for name in names):
        return []
    compression = options.compression_from(given)
    return [compression] if compression.method.evicts else []


def _compared(compare: str, amounts: dict[str, Any], chosen: dict[str, Any]) -> list[Compression]:
    """Return the methods to compare; each takes those options that mean something to it."""
    result = []
    unused = set(chosen)
    for name, asked in inputs.named_methods(compare, "--compare"):
        method = get_method(name)
        own = {**chosen, **asked}
        allocation = own.get("allocation", method.options.allocation)
        own = {key: own[key] for key in own if method.takes(key, allocation)}
        unused -= set(own)
        own_amounts = amounts if method.evicts else {}
        result.append(make_compression(name, **own_amounts, **own))
    if unused:
        option = sorted(unused)[0].replace("profile", "schedule").replace("_", "-")
        raise inputs.InputError(
            f"none of the methods compared takes --{option}; a method can be given an allocation, "
            "such as snapkv:entropy for --schedule"
        )
    return [compression for compression in result if compression.method.evicts]


_LEGEND = (
    "together: all prompts of the batch are processed at once, and each layer is compressed before "
    "the next one runs (pyramidkv with transformers; its room to grow is counted); one by one: a "
    "prompt lies uncompressed in all layers until it is complete, beside the others (serving)"
)
MOST_LINES = 40
"""Layers of a schedule that are shown; of a deeper model, some are left out."""


def show(record: dict[str, Any]) -> None:
    """Print a plan's record."""
    out = display.console()
    for line in _heading(record):
        out.print(line, soft_wrap=True)
    for table in _tables(record, out.width):
        out.print()
        out.print(table, crop=False)
    out.print(f"\n{_LEGEND}")
    for note in record["notes"]:
        out.print(f"note: {note}")
    if record["plans"]:
        _show_schedules(record)


def _show_schedules(record: dict[str, Any]) -> None:
    out = display.console()
    plans, layers = record["plans"], record["model"]["full_attention_layers"]
    shown = display.spread(len(layers), MOST_LINES)
    some = f", {len(shown)} of {len(layers)} layers (--output has all)"
    numbers = [layers[i] for i in shown]
    titles = [describe_method(plan["compression"]) for plan in plans]
    schedules = [[plan["schedule"][i] for i in shown] for plan in plans]
    of = titles[0] if len(plans) == 1 else "methods"
    out.print(f"\n{of}: tokens kept per layer{some if len(shown) < len(layers) else ''}")
    if len(plans) == 1:
        for line in display.schedule_lines(schedules[0], numbers):
            out.print(line)
        return
    columns = [
        (title, [f"{kept:,}" for kept in schedule])
        for title, schedule in zip(titles, schedules, strict=True)
    ]
    for table in display.wide_tables(list(map(str, numbers)), columns, out.width, "layer"):
        out.print(table, crop=False)


def _heading(record: dict[str, Any]) -> list[str]:
    model, deployment = record["model"], record["deployment"]
    shape, weights = model["shape"], record["weights"]
    kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in model["layer_kinds"].items())
    per_token = f"{record['kv_bytes_per_token']:,} bytes per token in {deployment['kv_dtype']}"
    if model["sliding_window"] is not None:
        per_token += f", until {model['sliding_window']:,} tokens fill the sliding windows"
    gpus = deployment["tensor_parallel"]
    free = record["kv_room_per_gpu"]
    room = "" if free is None else format_both(free)
    request = f"{deployment['context']:,} tokens"
    if deployment["max_new_tokens"]:
        request += f" and {deployment['max_new_tokens']:,} generated"
    return [
        f"{model['name']}: {shape['model_type']}, {kinds} layers, {shape['query_heads']} query and "
        f"{shape['kv_heads']} KV heads x {shape['head_dim']}, context {model['context_length']:,}",
        f"Weights: {weights['parameters']:,} parameters, {_weights(weights)}",
        f"KV cache: {per_token}",
        f"Requests: {request}; batch {deployment['batch']:,}"
        + (f"; {gpus} GPUs share each layer" if gpus > 1 else ""),
        *([f"Room for caches: {room} on each GPU"] if room else []),
    ]


_KINDS = {
    "full": "full-attention",
    "sliding": "sliding-window",
    "state": "fixed-state",
    "latent": "latent-attention",
}


def _weights(weights: dict[str, Any]) -> str:
    size = format_both(weights["bytes"])
    if weights["counted_from"] == "configuration":
        return f"{size} {'quantised' if weights['dtype'] is None else 'in ' + weights['dtype']}"
    return f"{size} stored, {weights['bytes'] / weights['parameters']:.2f} bytes per parameter"


def _tables(record: dict[str, Any], width: int) -> Iterator[Table]:
    deployment = record["deployment"]
    plans = [record["full"], *record["plans"]]
    full = record["full"]
    size = format_both if len(plans) <= 2 else format_bytes
    rows: dict[str, list[str]] = {}

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> None:
        rows[name] = [value(plan) for plan in plans]

    if full["schedule"]:
        row("kept, first layer", lambda p: f"{p['schedule'][0]:,}")
        row("kept, last layer", lambda p: f"{p['schedule'][-1]:,}")
        row("kept in all", lambda p: f"{p['schedule_total']:,}")
        row("against the budget", _against_budget)
    row("KV cache, request", lambda p: size(p["kv_bytes_request"]))
    if record["plans"]:
        row("smaller by", lambda p: f"{full['kv_bytes_request'] / p['kv_bytes_request']:.1f}x")
    if full["state_bytes_request"]:
        row("states beside it", lambda p: size(p["state_bytes_request"]))
    if deployment["max_new_tokens"]:
        row("at the end", lambda p: size(p["kv_bytes_request_at_end"]))
    if deployment["batch"] > 1:
        row("of the batch", lambda p: size(p["kv_bytes_batch"]))
    if deployment["tensor_parallel"] > 1:
        row("of batch, per GPU", lambda p: size(p["bytes_batch_per_gpu"]))
    row("peak, together", lambda p: size(p["peak_bytes_together"]))
    row("peak, one by one", lambda p: size(p["peak_bytes_one_by_one"]))
    if record["kv_room_per_gpu"] is not None:
        row("fit, together", lambda p: f"{p['requests_together']:,}")
        row("fit, one by one", lambda p: f"{p['requests_one_by_one']:,}")
    row("step reads, weights", lambda p: size(p["decode_weight_bytes"]))
    row("step reads, cache", lambda p: size(p["decode_kv_bytes"]))
    if deployment["bandwidth"] is not None:
        row("tokens/s at most", lambda p: _speed(p, deployment["batch"]))
        if record["kv_room_per_gpu"] is not None:
            row("of all that fit", lambda p: _number(p["tokens_per_second_of_all_that_fit"]))
    columns = [
        (describe_method(plan["compression"]), [cells[i] for cells in rows.values()])
        for i, plan in enumerate(plans)
    ]
    return display.wide_tables(list(rows), columns, width)


def _speed(described: dict[str, Any], batch: int) -> str:
    fit = described["requests_one_by_one"]
    if fit is not None and fit < batch:
        return "does not fit"
    return _number(described["tokens_per_second_at_most"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _against_budget(described: dict[str, Any]) -> str:
    allowed = described["allowed_total"]
    if allowed is None:
        return "-"
    return (
        "exact"
        if described["schedule_total"] == allowed
        else (f"{described['schedule_total'] / allowed - 1:+.1%}")
    )
