"""`pyramidkv methods`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import typer

from ..methods import METHODS, Capability, Method
from . import options

_CAPABILITIES: tuple[Capability, ...] = get_args(Capability)
_OF_SCORES = ("group_reduce", "window_reduce", "value_norm", "pooling", "kernel_size")


@options.taking(options.PLUGINS)
def methods(**given: Any) -> None:
    """List the compression methods: what each keeps, its settings and its options."""
    options.load_plugins(given)
    for method in METHODS.values():
        typer.secho(method.name, bold=True)
        typer.echo(f"  {method.summary}")
        if not method.evicts:
            continue
        typer.echo(f"  {_settings(method)}")
        typer.echo(f"  options: {_options(method)}")
        if missing := [name for name in _CAPABILITIES if not method.can(name)]:
            typer.echo(f"  without: {', '.join(missing)}")
        typer.echo(f"  source: {method.source}")
    typer.echo(
        "\nAll of them support left-padded batches, sampling, beam search, further turns, and saved"
        "\ncontexts; a prompt in pieces (--prefill-chunk), eviction while decoding"
        "\n(--decode-budget) and budgets measured on the prompt itself (--allocation entropy)"
        "\nwhere nothing else is said. Where there is --head-floor, the heads of a layer keep"
        "\ndifferent numbers of tokens; elsewhere each keeps as many."
        "\n\nscore options: --group-reduce, --window-reduce, --value-norm, --pooling, --kernel-size"
        "\nbudget options: --allocation, --beta, --gamma, --c-max, --c-min, --schedule,"
        "\n--share-temperature, --share-floor, --layer-budgets"
    )


def _settings(method: Method) -> str:
    own = method.options
    exact = "not exact" if own.allocation == "official" else "exact"
    parts = [f"{own.allocation} budgets, {exact}", f"{own.sink_tokens} sinks"]
    if own.window_size:
        parts.append(f"window {own.window_size}")
    if own.kernel_size > 1:
        parts.append(f"{own.pooling}-pool {own.kernel_size}")
    if method.needs_window:
        parts.append(f"{own.group_reduce} over the group")
    return "; ".join(parts)


def _options(method: Method) -> str:
    groups = [
        _flags(method, ("window_size", "sink_tokens")),
        "score options" if set(_OF_SCORES) <= method.settable else _flags(method, _OF_SCORES),
        "budget options" if "allocation" in method.settable else _flags(method, ("beta",)),
        _flags(method, ("head_floor", "head_budgets")),
    ]
    return ", ".join(group for group in groups if group) or "none"


def _flags(method: Method, names: Iterable[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if name in method.settable)
