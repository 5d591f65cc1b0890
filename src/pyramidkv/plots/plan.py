"""The picture of a plan: what each layer keeps, and what a request takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..compression import describe_method
from ..records import format_bytes
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(record: dict[str, Any]) -> Figure:
    """Return the picture of a `planning.plan_memory` record."""
    figure = style.new_figure(11, 4.8)
    kept, sizes = figure.subplots(1, 2, width_ratios=[3, 2])
    _draw_schedules(kept, record)
    _draw_bytes(sizes, record)
    deployment = record["deployment"]
    style.heading(
        figure,
        f"{style.short(record['model']['name'])}: {deployment['context']:,} tokens, cache in "
        f"{deployment['kv_dtype']}",
    )
    return figure


def _draw_schedules(axes: Axes, record: dict[str, Any]) -> None:
    style.label(axes, "layer (0 is the lowest)", "tokens kept per KV head")
    plans = record["plans"] or [record["full"]]
    layers = record["model"]["full_attention_layers"]
    for index, plan in enumerate(plans):
        text = f"{describe_method(plan['compression'])}: {plan['schedule_total']:,} in all"
        if plan["allowed_total"] not in (None, plan["schedule_total"]):
            text += f" ({plan['schedule_total'] / plan['allowed_total'] - 1:+.1%})"
        axes.plot(layers, plan["schedule"], label=text, **style.line(index, len(layers)))
    if plans[0]["schedule"]:
        axes.set_ylim(0, 1.05 * max(max(plan["schedule"]) for plan in plans))
    style.whole_ticks(axes)
    style.legend(axes, "kept of the prompt", columns=1)


def _draw_bytes(axes: Axes, record: dict[str, Any]) -> None:
    plans = [record["full"], *record["plans"]]
    values = [plan["kv_bytes_request"] for plan in plans]
    unit, size = next(
        (unit, size)
        for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))
        if max(values) >= size
    )
    bars = axes.barh(
        [describe_method(plan["compression"]) for plan in plans],
        [value / size for value in values],
        color="#b0c4de",
        edgecolor="black",
        height=0.6,
    )
    axes.bar_label(
        bars, [format_bytes(value) for value in values], padding=3, fontsize=style.TEXT_SIZE - 1
    )
    axes.set_xlim(0, 1.25 * max(values) / size)
    axes.invert_yaxis()
    axes.set_xlabel(f"KV cache per request ({unit})", fontsize=style.TEXT_SIZE)
    axes.tick_params(labelsize=style.TEXT_SIZE - 1)
