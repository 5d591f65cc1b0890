"""The picture of an attention profile: entropy by layer with its spread, and head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREYS = "cividis"  # as light as it is large, so that it can be read in grey


def draw(record: dict[str, Any]) -> Figure:
    """Return the picture of a `profiling.profile_attention` record."""
    figure = style.new_figure(15, 5.2)
    spread, heads, kept = figure.subplots(1, 3, width_ratios=[4, 4, 3])
    _draw_spread(spread, record)
    _draw_heads(heads, record)
    _draw_kept(kept, record)
    queries = (
        "all queries" if record["queries"] == "all" else (f"last {record['window_size']} queries")
    )
    samples = len(record["samples"])
    style.heading(
        figure,
        f"{style.short(record['model']['name'])}: attention of the {queries}, {samples} "
        f"{'sample' if samples == 1 else 'samples'} of {record['length']:,} tokens",
    )
    return figure


def _draw_spread(axes: Axes, record: dict[str, Any]) -> None:
    layers = [layer["layer"] for layer in record["layers"]]
    least, low, middle, high, most = zip(
        *(layer["entropy_quartiles"] for layer in record["layers"]), strict=True
    )
    style.label(axes, "layer (0 is the lowest)", "attention entropy (bits)")
    axes.fill_between(layers, least, most, color="#e3e3e3", label="all heads and samples")
    axes.fill_between(layers, low, high, color="#b5b5b5", label="middle half of them")
    axes.plot(layers, middle, label="median", **style.line(1, len(layers)))
    mean = [layer["entropy_bits"] for layer in record["layers"]]
    axes.plot(layers, mean, label="mean", **style.line(0, len(layers)))
    axes.set_ylim(0, 1.05 * max(*most, 1))
    axes.margins(x=0.02)
    style.whole_ticks(axes)
    style.legend(axes, "entropy by layer", columns=2)


def _draw_heads(axes: Axes, record: dict[str, Any]) -> None:
    layers = [layer["layer"] for layer in record["layers"]]
    table = [layer["entropy_by_head"] for layer in record["layers"]]
    image = axes.imshow(
        table, aspect="auto", cmap=GREYS, origin="lower", vmin=0, interpolation="nearest"
    )
    axes.set_xlabel("query head", fontsize=style.TEXT_SIZE)
    axes.set_ylabel("layer (0 is the lowest)", fontsize=style.TEXT_SIZE)
    axes.tick_params(labelsize=style.TEXT_SIZE - 1)
    step = max(1, -(-len(layers) // 12))
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    style.whole_ticks(axes)
    bar = axes.figure.colorbar(image, ax=axes)
    bar.set_label("attention entropy (bits), mean over samples", fontsize=style.TEXT_SIZE)
    bar.ax.tick_params(labelsize=style.TEXT_SIZE - 1)


def _draw_kept(axes: Axes, record: dict[str, Any]) -> None:
    style.label(axes, "budget (tokens per layer on average)", "attention kept (%)")
    budgets = [int(budget) for budget in record["attention_kept"]["uniform"]]
    for index, (name, shares) in enumerate(record["attention_kept"].items()):
        look = {**style.line(index, len(budgets)), "markevery": 1}
        axes.plot(budgets, [100 * share for share in shares.values()], label=name, **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    axes.minorticks_off()
    style.legend(axes, "mean over layers, by allocation", columns=2)
