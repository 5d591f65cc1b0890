"""The picture of a simulation: what was assumed on the left, what was kept on the right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(record: dict[str, Any]) -> Figure:
    """Return the figure of a record of `simulation.simulate`.

    Raises:
        PlotError: matplotlib is missing.
    """
    figure = style.new_figure(10, 5)
    assumed, kept = figure.subplots(1, 2)
    model = record["model"]
    style.heading(
        figure,
        f"Simulated attention, not measured: {model['layers']:,} layers, {model['length']:,} "
        f"tokens, {record['budget']:,} kept per layer on average",
    )
    _draw_attention(assumed, record)
    _draw_schedules(kept, record)
    for axes in (assumed, kept):
        style.whole_ticks(axes)
    return figure


def _draw_attention(axes: Axes, record: dict[str, Any]) -> None:
    entropies = record["entropy_bits_by_layer"]
    layers = range(len(entropies))
    style.label(axes, "layer (0 is the lowest)", "entropy of attention (bits)")
    drawn = axes.plot(layers, entropies, label="entropy", **style.line(0, len(layers)))
    axes.set_ylim(0, 1.05 * max(*entropies, 1))
    needles = axes.twinx()
    needles.set_ylabel("needles looked for", fontsize=style.TEXT_SIZE)
    needles.tick_params(labelsize=style.TEXT_SIZE - 1)
    drawn += needles.plot(
        layers,
        record["needles_by_layer"],
        label=f"needles looked for, of {record['model']['needles']:,} (right)",
        **style.line(1, len(layers)),
    )
    needles.set_ylim(0, 1.05 * record["model"]["needles"])
    style.legend(axes, "assumed attention", handles=drawn)


def _draw_schedules(axes: Axes, record: dict[str, Any]) -> None:
    style.label(axes, "layer (0 is the lowest)", "tokens kept")
    highest = 0
    for index, (name, result) in enumerate(record["allocations"].items()):
        schedule = result["schedule"]
        highest = max(highest, *schedule)
        error = result["recall_se"]
        spread = "" if error is None else f" \N{PLUS-MINUS SIGN} {100 * error:.1f}"
        name = f"{name} (control)" if result["control"] else name
        text = f"{name}: {100 * result['recall']:.1f}{spread}"
        axes.plot(schedule, label=text, **style.line(index, len(schedule)))
    axes.set_ylim(0, 1.05 * highest)
    style.legend(axes, "allocation: needles kept (%)")
