"""`pyramidkv profile`: what a model's attention looks like on texts of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schedule_profile import ScheduleProfile
from . import display, inputs, options

if TYPE_CHECKING:
    from rich.table import Table


@options.taking(options.MODEL)
def profile(
    model: options.Model,
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILES]...", help="Further texts.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", help="A UTF-8 text; may be given several times, or FILES follow."),
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of a sample.")] = 2048,
    samples: Annotated[
        int | None, typer.Option(help="How many; one of each text if not given.")
    ] = None,
    all_queries: Annotated[
        bool, typer.Option("--all-queries", help="Measure all queries, not only the window's.")
    ] = False,
    window_size: Annotated[int, typer.Option(help="Last tokens, whose queries count.")] = 32,
    sink_tokens: Annotated[int, typer.Option(help="First tokens, counted as sinks.")] = 4,
    budgets: Annotated[
        str | None,
        typer.Option(help="Budgets of which the kept attention is told, such as 128,512."),
    ] = None,
    schedule: Annotated[
        Path | None,
        typer.Option(help="An earlier schedule, to see what it keeps of these texts."),
    ] = None,
    save_schedule: Annotated[
        Path | None, typer.Option(help="Write the schedule profile, for --schedule.")
    ] = None,
    output: options.Output = None,
    plot: options.Plot = None,
    **given: Any,
) -> None:
    """Measure how far attention spreads, by layer and head, and what budgets would keep of it."""
    paths = [*(text or []), *(more or [])]
    if not paths:
        raise inputs.InputError("give at least one text: --text FILE, or FILES")
    texts: dict[str, str] = {}
    for path in paths:
        if str(path) in texts:
            raise inputs.InputError(f"the text {str(path)!r} is given twice; give each once")
        texts[str(path)] = inputs.read_text(path)
    told = None if budgets is None else inputs.whole_numbers(budgets, "--budgets")
    written = {"--save-schedule": save_schedule, "--output": output, "--plot": plot}
    inputs.check_files(written, [*paths, schedule], model)
    earlier = None if schedule is None else ScheduleProfile.read(schedule)
    inputs.check_picture(plot)

    options.quiet_transformers()
    from .. import loading
    from ..profiling import profile_attention
    from ..support import full_attention_layers

    full_attention_layers(loading.load_config(model))
    tokenizer = loading.load_tokenizer(model)
    loaded = options.load_model(model, given)
    with display.progress("samples, layers done") as on_layer:
        measured = profile_attention(
            loaded,
            tokenizer,
            texts,
            length=length,
            samples=samples,
            all_queries=all_queries,
            window_size=window_size,
            sink_tokens=sink_tokens,
            budgets=told,
            schedule=earlier,
            on_layer=on_layer,
        )
    inputs.write_output(output, measured.record)
    if save_schedule is not None:
        measured.schedule.write(save_schedule)
    if plot is not None:
        from ..plots.profile import draw

        inputs.write_picture(plot, draw(measured.record))
    show(measured.record)


def show(record: dict[str, Any]) -> None:
    """Print a profile's record."""
    out = display.console()
    queries = (
        "all queries"
        if record["queries"] == "all"
        else (f"the last {record['window_size']} queries")
    )
    out.print(
        f"Attention of {queries}; samples of {record['length']:,} tokens: "
        f"{len(record['samples'])}. "
        "Entropy in bits and effective tokens (2^entropy), each the mean over heads and samples; "
        f"attention in % on the first {record['sink_tokens']} tokens, on the "
        f"{record['window_size']} up to each query, and on what each budget would keep.\n"
    )
    for table in _layers(record, out.width):
        out.print(table, crop=False)
    out.print("\nAttention kept on average, in %, by allocation:")
    out.print(_allocations(record))
    out.print(f"\nMost is kept by {most_kept(record['attention_kept'])}.")
    out.print(trend_in_words(record["trend"]))


def _layers(record: dict[str, Any], width: int) -> Iterator[Table]:
    layers = record["layers"]

    def percent(share: Callable[[dict[str, Any]], float]) -> list[str]:
        return [f"{100 * share(layer):.1f}" for layer in layers]

    columns = [
        ("entropy", [f"{layer['entropy_bits']:.2f}" for layer in layers]),
        ("effective", [f"{layer['effective_tokens']:,.1f}" for layer in layers]),
        ("sinks", percent(lambda layer: layer["sink_mass"])),
        ("recent", percent(lambda layer: layer["recent_mass"])),
    ]
    for budget in layers[0]["attention_kept"]:
        shares = [layer["attention_kept"][budget] for layer in layers]
        columns.append((budget, [f"{100 * share:.1f}" for share in shares]))
    return display.wide_tables([str(la["layer"]) for la in layers], columns, width, "layer")


def _allocations(record: dict[str, Any]) -> Table:
    table = display.plain_table("budget")
    kept = record["attention_kept"]
    for name in kept:
        table.add_column(name, justify="right")
    for budget in record["layers"][0]["attention_kept"]:
        table.add_row(budget, *(f"{100 * shares[budget]:.2f}" for shares in kept.values()))
    return table


def most_kept(kept: dict[str, dict[str, float]]) -> str:
    """Say which allocation keeps most of the attention at which budgets."""
    best: dict[str, list[str]] = {}
    for budget in kept["uniform"]:
        shares = {name: by_budget[budget] for name, by_budget in kept.items()}
        best.setdefault(max(shares, key=shares.__getitem__), []).append(budget)
    return "; ".join(f"{name} at {', '.join(budgets)}" for name, budgets in best.items())


def trend_in_words(trend: dict[str, Any]) -> str:
    """Say in words whether attention narrows with depth."""
    means = ", ".join(f"{trend[part]:,.0f} in the {part}" for part in ("lower", "middle", "upper"))
    verdict = {
        "funnel": "Attention narrows with depth (a funnel)",
        "widens": "Attention widens with depth (no funnel)",
        "no trend": "Attention neither narrows nor widens with depth (no funnel)",
        "too few layers": "Too few layers to tell whether attention narrows with depth",
    }[trend["verdict"]]
    return (
        f"{verdict}: rank correlation of entropy and depth {_signed(trend['correlation'])} (a "
        f"funnel below -0.5), effective tokens {means} third of the layers."
    )


def _signed(value: float) -> str:
    rounded = round(value, 2)
    return f"{rounded:+.2f}" if rounded else "0.00"
