"""Tables and progress, all made from records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..budgets import whole
from ..compression import describe_method
from ..records import format_bytes


def console(stderr: bool = False) -> Console:
    """Return a console for results, or for everything that is not the result."""
    return Console(stderr=stderr, highlight=False)


def plain_table(*columns: str) -> Table:
    """Return an empty table; the first column names the rows."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def wide_tables(
    first: Sequence[str], columns: Sequence[tuple[str, Sequence[str]]], width: int, corner: str = ""
) -> Iterator[Table]:
    """Yield a table, or several that stand below each other, so that no figure is cut off.

    Args:
        first: the rows' names.
        columns: title and cells of each column.
        width: characters that a line may have.
        corner: title of the rows' names.
    """
    gap = 2
    names = max(len(corner), *map(len, first))
    waiting = list(columns)
    while waiting:
        left = width - names
        taken: list[tuple[str, Sequence[str]]] = []
        while waiting:
            title, cells = waiting[0]
            left -= gap + max(len(title), *map(len, cells))
            if taken and left < 0:
                break
            taken.append(waiting.pop(0))
        table = plain_table(corner)
        table.columns[0].min_width = names
        for title, cells in taken:
            least = max(len(title), *map(len, cells))
            table.add_column(title, justify="right", no_wrap=True, min_width=least)
        for name, *cells in zip(first, *(cells for _, cells in taken), strict=True):
            table.add_row(name, *cells)
        yield table


def results_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one column per run, from their records."""
    table = plain_table("")
    for record in records:
        table.add_column(describe_method(record["compression"]), justify="right")

    def row(name: str, value: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(name, *(value(record) for record in records))

    row("prompt tokens", lambda r: f"{r['prompt_tokens']:,}")
    row("kept, first layer", lambda r: _tokens(r["kept_lengths"][0]))
    row("kept, last layer", lambda r: _tokens(r["kept_lengths"][-1]))
    row(
        "kept in all / full",
        lambda r: f"{_tokens(whole(sum(r['kept_lengths'])))} / {_tokens(r['full_total'])}",
    )
    row("KV cache / full", lambda r: _bytes_share(r["kv_bytes"], r["kv_bytes_full"]))
    row("smaller by", lambda r: f"{r['kv_bytes_full'] / r['kv_bytes']:.1f}x")
    row("time to first token", lambda r: f"{r['time_to_first_token_s']:.2f} s")
    row("time per token", lambda r: _milliseconds(r["time_per_output_token_s"]))
    return table


def _tokens(count: float) -> str:
    """Format tokens per head, which are no whole number where heads of a layer differ."""
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` of the numbers below `count`, at even steps, first and last included."""
    steps = min(count, most)
    return [round(i * (count - 1) / max(steps - 1, 1)) for i in range(steps)]


def schedule_lines(schedule: Sequence[int], layers: Sequence[int]) -> Iterator[str]:
    """Yield a schedule as a bar chart, one line per layer; `layers` are their numbers."""
    for layer, line in zip(layers, bars(schedule, "{:,}"), strict=True):
        yield f"  layer {layer:>3}  {line}"


def bars(values: Sequence[float], form: str) -> Iterator[str]:
    """Yield each value, formatted, with a bar as long as the value is large, from 0."""
    widest = max(values) or 1
    for value in values:
        yield f"{form.format(value):>8}  {'#' * max(1, round(40 * value / widest))}"


@contextmanager
def progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr while the block runs; yields the function that reports it."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if done == total:
                bar.stop()

        yield report


LOG_SECONDS = 60
"""Between two lines about progress where there is no terminal to draw a bar in."""


@contextmanager
def progress_with_time_left(description: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress and an estimate of the time left on stderr, in lines if it is no terminal.

    Yields the function that reports it. What it reports first is what had been done before.
    """
    out = console(stderr=True)
    started = told = time.monotonic()
    before: int | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TextColumn("{task.fields[left]}"), console=out, transient=True,
        disable=not out.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(description, total=None, left="")

        def report(done: int, total: int) -> None:
            nonlocal before, started, told
            now = time.monotonic()
            if before is None:
                before, started = done, now
            left = ""
            if before < done < total:
                left = f"{_duration((now - started) / (done - before) * (total - done))} left"
            bar.update(task, completed=done, total=total, left=left)
            if not out.is_terminal and left and now - told >= LOG_SECONDS:
                told = now
                out.print(f"{done:,} of {total:,} {description}, {left}")

        yield report


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 99.5 else f"{minutes // 60} h {minutes % 60:02} min"


def _bytes_share(part: int, whole: int) -> str:
    return f"{format_bytes(part)} / {format_bytes(whole)}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
