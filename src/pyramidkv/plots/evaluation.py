"""The pictures of an evaluation: scores against kept memory, and where needles are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FULL = "full"
APART = 1.03
"""Factor between points of the same budget, so that their intervals do not hide each other."""

STYLES = (1, 2, 3, 5, 4, 0)
"""Order in which methods get the shared lines."""

SHADES = 20
"""Shades of a heat map: steps of 5%; so few that SVG files have them as areas, not as an image."""

Cells = Mapping[tuple[float, float], float]


def draw_scores(group: Mapping[str, Any], series: Mapping[str, Sequence[str]], name: str) -> Figure:
    """Return scores against kept memory, with their intervals.

    Args:
        group: of a summary: see `summary.summarise`.
        series: arms by the line that joins them.
        name: of the group.

    Raises:
        PlotError: matplotlib is missing.
    """
    figure = style.new_figure(6.6, 4.9)
    style.heading(figure, f"{style.drawable(name)}: {group['samples']:,} samples")
    axes = figure.subplots()
    style.label(axes, "KV memory kept (% of the full cache's)", "score (%)")
    arms = group["arms"]
    if FULL in arms:
        axes.axhline(100 * arms[FULL]["score"], color="#000000", linewidth=2.4, label=FULL)
    for index, (label, names) in enumerate(series.items()):
        points = sorted((arms[arm] for arm in names), key=lambda arm: arm["footprint"])
        shift = APART ** (index - (len(series) - 1) / 2)
        scores = [100 * arm["score"] for arm in points]
        bounds = [[100 * bound for bound in arm["interval"]] for arm in points]
        axes.errorbar(
            [100 * arm["footprint"] * shift for arm in points],
            scores,
            yerr=[
                [max(0.0, score - low) for score, (low, _) in zip(scores, bounds, strict=True)],
                [max(0.0, high - score) for score, (_, high) in zip(scores, bounds, strict=True)],
            ],
            label=style.drawable(label),
            elinewidth=1,
            capsize=2.5,
            **_line(index),
        )
    _footprint_axis(axes, [100 * arm["footprint"] for arm in arms.values()])
    shown = [100 * bound for arm in arms.values() for bound in arm["interval"]]
    axes.set_ylim(max(-2, min(shown) - 6), min(103, max(shown) + 6))
    style.legend(axes, "", columns=3)
    return figure


def _line(index: int) -> dict[str, Any]:
    """Return how to draw the line of this index; hollow markers once all styles are used.

    The first style comes last, since it looks like the line of the full cache.
    """
    again = index >= len(style.LINES)
    chosen = {**style.line(STYLES[index % len(STYLES)], 1), "markevery": None, "linewidth": 1.4}
    return {**chosen, "markerfacecolor": "#ffffff"} if again else chosen


def _footprint_axis(axes: Axes, shown: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = min(shown), max(shown)
    room = 1.15 if high > 2 * low else 1.5
    axes.set_xlim(low / room, high * room)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_needles(
    means: Mapping[str, Cells],
    series: Mapping[str, Sequence[str]],
    amounts: Mapping[str, str],
) -> Figure:
    """Return where each arm finds needles: one panel per method (columns) and budget (rows).

    Args:
        means: mean scores by arm, then by (depth in % of the context, length in tokens).
        series: arms by the column they stand in.
        amounts: what each arm keeps, in words, by arm: its row.

    Raises:
        PlotError: matplotlib is missing.
    """
    rows = list(dict.fromkeys(amounts[arm] for arms in series.values() for arm in arms))
    columns = [name for name in (FULL, *series) if name != FULL or FULL in means]
    depths, lengths = _steps(means)
    widest = max(len(style.drawable(arm)) for arm in means)
    panel = max(0.9 + 0.42 * len(lengths), 0.6 + 0.085 * widest)  # inches; a title fits above it
    width = 1.2 + len(columns) * panel
    height = 1.6 + max(1, len(rows)) * (0.6 + 0.3 * len(depths))
    figure = style.new_figure(max(5.5, width), height)
    grid = figure.subplots(max(1, len(rows)), len(columns), squeeze=False)
    drawn: Any = None
    for x, column in enumerate(columns):
        for y in range(len(grid)):
            arm = FULL if column == FULL else _arm(series[column], amounts, rows[y])
            axes = grid[y][x]
            if arm is None or (column == FULL and y):
                axes.set_axis_off()
                continue
            drawn = _draw_panel(axes, means[arm], depths, lengths)
            axes.set_title(style.drawable(arm), fontsize=style.TEXT_SIZE - 1, parse_math=False)
    figure.supxlabel("length (tokens)", fontsize=style.TEXT_SIZE)
    figure.supylabel("depth of the needle (% of the context)", fontsize=style.TEXT_SIZE)
    bar = figure.colorbar(drawn, ax=grid.ravel().tolist(), shrink=0.8, pad=0.02)
    bar.set_label("score (%)", fontsize=style.TEXT_SIZE)
    return figure


def _arm(arms: Sequence[str], amounts: Mapping[str, str], amount: str) -> str | None:
    return next((arm for arm in arms if amounts[arm] == amount), None)


def _steps(means: Mapping[str, Cells]) -> tuple[list[float], list[float]]:
    places = next(iter(means.values()))
    return sorted({depth for depth, _ in places}), sorted({length for _, length in places})


def _draw_panel(axes: Axes, cells: Cells, depths: Sequence[float], lengths: Sequence[float]) -> Any:
    import matplotlib

    values = [[100 * cells.get((d, n), float("nan")) for n in lengths] for d in depths]
    shades = matplotlib.colormaps["cividis"].resampled(SHADES)
    image = axes.pcolormesh(values, cmap=shades, vmin=0, vmax=100, edgecolor="#ffffff", lw=0.5)
    axes.invert_yaxis()  # the start of the context is above
    axes.set_xticks(
        [x + 0.5 for x in range(len(lengths))],
        [f"{n:,g}" for n in lengths],
        rotation=45,
        ha="right",
    )
    axes.set_yticks([y + 0.5 for y in range(len(depths))], [f"{d:,g}" for d in depths])
    axes.tick_params(labelsize=style.TEXT_SIZE - 2.5)
    if len(lengths) > 12 or len(depths) > 12:
        return image  # no room for figures
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            if value == value:  # there is such a sample
                colour = "#000000" if value > 55 else "#ffffff"
                size = style.TEXT_SIZE - 3
                place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
                axes.text(x + 0.5, y + 0.5, f"{value:.0f}", color=colour, **place)
    return image
