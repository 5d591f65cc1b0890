"""`pyramidkv methods`: what there is to choose from."""

from __future__ import annotations

from typing import get_args

import typer

from ..methods import METHODS, Capability, Method

_CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


def methods() -> None:
    """List the compression methods: what each keeps, its settings and its options."""
    for method in METHODS.values():
        typer.secho(method.name, bold=True)
        typer.echo(f"  {method.summary}")
        if not method.evicts:
            continue
        typer.echo(f"  {_settings(method)}")
        typer.echo(f"  options: {_options(method)}")
        if missing := [name for name in _CAPABILITIES if name not in method.supports]:
            typer.echo(f"  without: {', '.join(missing)}")
        typer.echo(f"  source: {method.source}")
    typer.echo(
        "\nAll of them support left-padded batches, sampling, beam search, further turns, and saved"
        "\ncontexts; a prompt in pieces (--prefill-chunk), eviction while decoding"
        "\n(--decode-budget) and budgets measured on the prompt itself (--allocation entropy)"
        "\nwhere nothing else is said. None gives heads of one layer different budgets."
        "\n\nscore options: --group-reduce, --window-reduce, --value-norm, --pooling, --kernel-size"
        "\nbudget options: --allocation, --beta, --gamma, --c-max, --c-min, --schedule,"
        "\n--share-temperature, --share-floor, --layer-budgets"
    )


def _settings(method: Method) -> str:
    options = method.options
    exact = "not exact" if options.allocation == "official" else "exact"
    parts = [f"{options.allocation} budgets, {exact}", f"{options.sink_tokens} sinks"]
    if options.window_size:
        parts.append(f"window {options.window_size}")
    if options.kernel_size > 1:
        parts.append(f"{options.pooling}-pool {options.kernel_size}")
    if method.needs_window:
        parts.append(f"{options.group_reduce} over the group")
    return "; ".join(parts)


def _options(method: Method) -> str:
    words = ["--window-size, --sink-tokens"]
    if method.needs_window:
        words.append("score options")
    elif "pooling" in method.settable:
        words.append("--group-reduce, --pooling, --kernel-size")
    words.append("budget options" if "allocation" in method.settable else "--beta")
    return ", ".join(words)
