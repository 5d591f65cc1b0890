"""`pyramidkv plan`: what a method saves on a model and a machine, before anything is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import Compression, make_compression
from ..deployment import CACHE_BYTES, UTILIZATION, WEIGHT_BYTES, Deployment
from ..model_source import find_model, preset_names
from ..planning import plan_memory
from ..records import format_both, format_bytes, method_title
from . import display, inputs, options

if TYPE_CHECKING:
    from rich.table import Table


@options.taking(options.AMOUNTS, options.METHOD_OPTIONS)
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
        float, typer.Option(help="Fraction of a GPU's memory that may be used.")
    ] = UTILIZATION,
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
        str | None, typer.Option(help=f"Of the cache: {', '.join(CACHE_BYTES)}.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Methods side by side, such as snapkv,pyramidkv,pyramidkv-official."),
    ] = None,
    output: options.Output = None,
    plot: options.Plot = None,
    **given: Any,
) -> None:
    """Show memory, schedule and decoding limits from a model's config.json; runs nothing."""
    if model == "presets":
        typer.echo("\n".join(preset_names()))
        return
    if context is None:
        raise inputs.InputError("give the length of a prompt with --context, in tokens")
    deployment = Deployment(
        context=context,
        batch=batch,
        max_new_tokens=max_new_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        gpu_memory=inputs.byte_count(gpu_memory, "--gpu-memory"),
        utilization=gpu_utilization,
        kv_memory=inputs.byte_count(kv_memory, "--kv-memory"),
        bandwidth=inputs.bytes_per_second(bandwidth, "--bandwidth"),
        prefill_chunk=given["prefill_chunk"],
    )
    compressions = _compressions(given, compare)
    inputs.check_output(output)
    inputs.check_picture(plot, output)
    inputs.check_spares_model(model, output, plot)
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
    """Return what to compare with the full cache: nothing, if no method and no amount is given."""
    chosen = options.method_options(given)
    amounts = {name: given[name] for name in options.AMOUNTS.options}
    amounts.pop("prefill_chunk")
    method = amounts.pop("method")
    if compare is not None:
        if method is not None:
            raise inputs.InputError("give one --method or several to --compare; both given")
        listed = inputs.names(compare)
        if not listed:
            raise inputs.InputError("--compare names no method; give such as snapkv,pyramidkv")
    elif method is None and not chosen and all(value is None for value in amounts.values()):
        return []
    else:
        listed = [method or "pyramidkv"]
    return [make_compression(name, **amounts, **chosen) for name in listed]


_LEGEND = (
    "peak: most KV cache while a prompt is processed, if each layer is compressed before the next "
    "one runs (pyramidkv with transformers), or if all layers hold the prompt until it is complete "
    "(serving in chunks); fit: requests at once, one of them at its peak; step: one token for each "
    "request of the batch"
)


def show(record: dict[str, Any]) -> None:
    """Print a plan's record."""
    out = display.console()
    for line in _heading(record):
        out.print(line, soft_wrap=True)
    out.print()
    out.print(_table(record))
    out.print(f"\n{_LEGEND}", soft_wrap=True)
    for note in record["notes"]:
        out.print(f"note: {note}", soft_wrap=True)
    plans = record["plans"]
    if len(plans) == 1:
        out.print(f"\n{plans[0]['method']}, tokens kept per layer:")
        for line in display.schedule_lines(plans[0]["schedule"]):
            out.print(line)
    elif plans:
        out.print("\nTokens kept per layer:")
        out.print(_schedules(plans))


def _heading(record: dict[str, Any]) -> list[str]:
    model, deployment = record["model"], record["deployment"]
    shape, weights = model["shape"], record["weights"]
    kinds = ", ".join(f"{count} {_KINDS[kind]}" for kind, count in model["layer_kinds"].items())
    gpus = deployment["tensor_parallel"]
    request = f"{deployment['context']:,} tokens"
    if deployment["max_new_tokens"]:
        request += f" and {deployment['max_new_tokens']:,} generated"
    return [
        f"{model['name']}: {shape['model_type']}, {kinds} layers, {shape['query_heads']} query and "
        f"{shape['kv_heads']} KV heads x {shape['head_dim']}, context {model['context_length']:,}",
        f"Weights: {weights['parameters']:,} parameters, {format_both(weights['bytes'])} in "
        f"{deployment['dtype']}, from the {weights['counted_from']}",
        f"KV cache: {record['kv_bytes_per_token']:,} bytes per token in {deployment['kv_dtype']}",
        f"Requests: {request}; batch {deployment['batch']:,}"
        + (f"; {gpus} GPUs share each layer" if gpus > 1 else ""),
    ]


_KINDS = {
    "full": "full-attention",
    "sliding": "sliding-window",
    "state": "fixed-state",
    "latent": "latent-attention",
}


def _table(record: dict[str, Any]) -> Table:
    deployment = record["deployment"]
    plans = [record["full"], *record["plans"]]
    table = display.plain_table("")
    for described in plans:
        table.add_column(method_title(described["compression"]), justify="right")

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(value(described) for described in plans))

    full = record["full"]
    size = format_both if len(plans) <= 2 else format_bytes
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
    row("peak, layer by layer", lambda p: size(p["peak_bytes_layer_by_layer"]))
    row("peak, all layers", lambda p: size(p["peak_bytes_all_layers"]))
    if record["kv_room_per_gpu"] is not None:
        row("fit, layer by layer", lambda p: f"{p['requests_layer_by_layer']:,}")
        row("fit, all layers", lambda p: f"{p['requests_all_layers']:,}")
    row("step reads, weights", lambda p: size(p["decode_weight_bytes"]))
    row("step reads, cache", lambda p: size(p["decode_kv_bytes"]))
    if deployment["bandwidth"] is not None:
        row("tokens/s at most", lambda p: f"{p['tokens_per_second_at_most']:,.1f}")
    return table


def _against_budget(described: dict[str, Any]) -> str:
    allowed = described["allowed_total"]
    if allowed is None:
        return "-"
    return (
        "exact"
        if described["schedule_total"] == allowed
        else (f"{described['schedule_total'] / allowed - 1:+.1%}")
    )


def _schedules(plans: Sequence[dict[str, Any]]) -> Table:
    table = display.plain_table("layer")
    for described in plans:
        table.add_column(method_title(described["compression"]), justify="right")
    for layer, kept in enumerate(zip(*(p["schedule"] for p in plans), strict=True)):
        table.add_row(str(layer), *(f"{count:,}" for count in kept))
    return table
