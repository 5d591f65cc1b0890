"""The picture of a bench: time per token and bytes by prompt length, tokens per second by batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(record: dict[str, Any]) -> Figure:
    """Return the picture of a `benchmarking.run_bench` record."""
    results = record["results"]
    batches = sorted({result["batch"] for result in results})
    longest = max(result["length"] for result in results)
    by_batch = len(batches) > 1
    figure = style.new_figure(16 if by_batch else 11, 4.8)
    axes = figure.subplots(1, 3 if by_batch else 2)
    first = [result for result in results if result["batch"] == batches[0]]
    some = f", {batches[0]} at a time" if batches[0] > 1 else ""
    _lines(axes[0], first, "length", lambda r: 1000 * r["step_s"]["median"])
    style.label(axes[0], f"prompt tokens{some}", "time per token (ms)")
    _lines(axes[1], first, "length", lambda r: r["kv_bytes"] / 1e6)
    style.label(axes[1], f"prompt tokens{some}", "KV cache after the prompt (MB)")
    if by_batch:
        at_longest = [result for result in results if result["length"] == longest]
        _lines(axes[2], at_longest, "batch", lambda r: r["tokens_per_s"]["median"])
        style.label(axes[2], f"prompts of {longest:,} tokens together", "tokens per second")
    for each in axes:
        each.set_ylim(bottom=0)
    machine = record["machine"]
    style.heading(
        figure,
        f"{style.short(record['model']['name'])}, {record['model']['dtype']}, "
        f"{machine['device_name'] or machine['processor']}",
    )
    return figure


def _lines(
    axes: Axes,
    results: list[dict[str, Any]],
    along: str,
    value: Callable[[dict[str, Any]], float],
) -> None:
    arms = list(dict.fromkeys(result["arm"] for result in results))
    for index, arm in enumerate(arms):
        own = sorted((r for r in results if r["arm"] == arm), key=lambda r: r[along])
        places = [r[along] for r in own]
        axes.plot(places, [value(r) for r in own], label=arm, **style.line(index, len(own)))
    ticks = sorted({r[along] for r in results})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    style.legend(axes, "", columns=1)
