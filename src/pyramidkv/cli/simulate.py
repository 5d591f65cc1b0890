"""`pyramidkv simulate`: which allocation pays if attention has an assumed shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from . import display, inputs, options

if TYPE_CHECKING:
    from rich.table import Table

    from ..simulation import Profile

BAR_LINES = 16


def simulate(
    layers: Annotated[int, typer.Option(help="Layers that share the budget.")] = 32,
    length: Annotated[int, typer.Option(help="Prompt tokens.")] = 4096,
    needles: Annotated[int, typer.Option(help="Tokens that matter.")] = 64,
    budget: Annotated[
        int, typer.Option(help="Tokens kept per layer on average, sinks and window included.")
    ] = 512,
    seed: Annotated[int, typer.Option(help="Seed for everything that is drawn.")] = 0,
    trials: Annotated[
        int, typer.Option(help="Independent repetitions; standard errors need 2.")
    ] = 8,
    needle_depth_profile: Annotated[
        str,
        typer.Option(help="Needles looked for, from the lowest layer up: falling, flat, rising."),
    ] = "falling",
    concentration_depth_profile: Annotated[
        str,
        typer.Option(help="How narrow attention is, from the lowest layer up: the same words."),
    ] = "rising",
    needle_strength: Annotated[
        float,
        typer.Option(help="How relevant needles are, in standard deviations of other tokens."),
    ] = 2.0,
    beta: Annotated[float, typer.Option(help="Steepness of the pyramid, from 1 (uniform).")] = 20.0,
    gamma: Annotated[float, typer.Option(help="Exponent of the power law.")] = 1.0,
    window_size: Annotated[int, typer.Option(help="Last tokens, always kept.")] = 32,
    sink_tokens: Annotated[int, typer.Option(help="First tokens, always kept.")] = 4,
    output: options.Output = None,
    plot: options.Plot = None,
) -> None:
    """Compare allocations on simulated attention, whose shape over depth is assumed.

    No language model runs and nothing is measured; needs no GPU.
    """
    inputs.check_seed(seed)
    inputs.check_files({"--output": output, "--plot": plot})
    inputs.check_picture(plot)

    # From here on numpy is needed.
    from .. import simulation

    model = simulation.AttentionModel(
        layers=layers,
        length=length,
        needles=needles,
        needle_strength=needle_strength,
        needle_depth_profile=cast("Profile", needle_depth_profile),
        concentration_depth_profile=cast("Profile", concentration_depth_profile),
        sink_tokens=sink_tokens,
        window_size=window_size,
    )
    with display.progress("simulated layers") as on_layer:
        record = simulation.simulate(model, budget, seed, trials, beta, gamma, on_layer)
    inputs.write_output(output, record)
    if plot is not None:
        from ..plots.simulation import draw

        inputs.write_picture(plot, draw(record))
    show(record)  # last: its reader may be gone before its end


def show(record: dict[str, Any]) -> None:
    """Print a simulation's record."""
    model = record["model"]
    out = display.console()
    out.print(
        f"Simulated attention: {model['layers']:,} layers, {model['length']:,} tokens, "
        f"{model['needles']:,} needles ({model['needle_depth_profile']} with depth), budget "
        f"{record['budget']:,}, {record['trials']:,} trials, seed {record['seed']}.\n"
        "Kept: tokens in the first layer, in the last and in all; needles looked for, in % with "
        "standard error, and against uniform in points; attention, in %.\n",
        soft_wrap=True,
    )
    if record["budget"] >= model["length"]:
        out.print("The budget holds the whole prompt, so every allocation keeps everything.\n")
    out.print(_table(record))
    out.print("\n* a control: the pyramid upside down, which no method uses", soft_wrap=True)
    most = record["entropy_bits_most"]
    out.print(f"\nEntropy of attention by layer, bits (without any concentration {most:.2f}):")
    for line in _entropy_lines(record["entropy_bits_by_layer"]):
        out.print(line)
    out.print()
    if record["budget"] < model["length"]:
        out.print(describe_winner(record), soft_wrap=True)
    out.print(
        "This is a model of attention, not a measurement: which allocation is best depends on the "
        f"curves that are assumed (needles {model['needle_depth_profile']}, concentration "
        f"{model['concentration_depth_profile']} with depth).",
        soft_wrap=True,
    )


def describe_winner(record: dict[str, Any]) -> str:
    """Say in one sentence which allocation kept most needles, and how sure that is."""
    winner = record["winner"]
    best, level = winner["allocation"], winner["level_with"]
    if winner["clear"]:
        ahead = _percent(winner["ahead_by"], winner["ahead_by_se"])
        return f"Best: {best}, ahead of {winner['next']} by {ahead} points."
    if record["trials"] == 1:
        return f"No clear winner: one trial has no standard error ({best} kept most needles)."
    others = " and ".join(filter(None, (", ".join(level[:-1]), level[-1])))
    sentence = f"No clear winner: {best} is less than 2 standard errors ahead of {others}"
    if "uniform" not in (best, *level):
        result = record["allocations"][best]
        ahead = _percent(result["versus_uniform"], result["versus_uniform_se"])
        sentence += f", but ahead of uniform by {ahead} points"
    return f"{sentence}."


def _table(record: dict[str, Any]) -> Table:
    table = display.plain_table("allocation")
    for column in ("first", "last", "total", "needles, %", "vs uniform", "attention, %"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in record["allocations"].items():
        against = _percent(result["versus_uniform"], result["versus_uniform_se"], "+")
        table.add_row(
            f"{name} *" if result["control"] else name,
            f"{result['schedule'][0]:,}",
            f"{result['schedule'][-1]:,}",
            f"{result['sum']:,}",
            _percent(result["recall"], result["recall_se"]),
            "-" if name == "uniform" else against,
            f"{100 * result['attention_kept']:.1f}",
        )
    return table


def _entropy_lines(entropies: list[float]) -> list[str]:
    """Return at most 16 bars, at even steps from the lowest layer to the highest."""
    shown = display.spread(len(entropies), BAR_LINES)
    lines = display.bars([entropies[layer] for layer in shown], "{:.2f}")
    return [f"  layer {layer:>3}  {line}" for layer, line in zip(shown, lines, strict=True)]


def _percent(value: float, error: float | None, sign: str = "") -> str:
    """Format a fraction in percent or points, with its standard error if there is one."""
    spread = "" if error is None else f" +- {100 * error:.1f}"
    return f"{100 * value:{sign}.1f}{spread}"
