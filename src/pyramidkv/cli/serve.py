"""`pyramidkv serve`: vLLM's server with compressed caches."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from ..model_source import find_model
from ..vllm.settings import (
    ASYNC_SCHEDULER,
    BACKEND,
    KEY,
    SCHEDULER,
    WORKERS,
    Device,
    ServingError,
    ServingSettings,
    find_device,
    read_settings,
)
from . import options

MODULE = "pyramidkv.vllm.server"
_OURS = ("--worker-cls", "--scheduler-cls", "--attention-backend")


@options.taking(options.SERVED_OPTIONS)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="As vLLM takes it: a hub id or a folder.")],
    budget: Annotated[
        int | None, typer.Option(help="Tokens kept per layer and KV head, on average.")
    ] = None,
    method: Annotated[str, typer.Option(help="pyramidkv, snapkv or streamingllm.")] = "pyramidkv",
    groups: Annotated[
        int | None, typer.Option(help="Groups of layers with one budget each; by default 4 to 8.")
    ] = None,
    min_prompt: Annotated[
        int, typer.Option(help="Prompt tokens under which nothing is evicted.")
    ] = 0,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default what vLLM's build and the driver say."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the command and the plan, and start nothing.")
    ] = False,
    **given: Any,
) -> None:
    """Start vLLM's OpenAI-compatible server; options that are not listed go to vLLM."""
    asked = {"method": method, "budget": budget, "groups": groups, "min_prompt": min_prompt}
    asked |= options.method_options(given)
    asked = {name: value for name, value in asked.items() if value is not None}
    settings = read_settings(asked, len(find_model(model).shape.compressible))
    where = _device(device)
    arguments = [MODULE, "--model", model, *_vllm_arguments(context.args, asked, where)]
    for line in _plan(settings):
        typer.echo(line, err=True)
    if dry_run:
        typer.echo(shlex.join(["python", "-m", *arguments]))
        return
    if find_spec("vllm") is None:
        raise ServingError("vLLM is not installed; pip install 'pyramidkv[vllm]'")
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", *arguments])


def _device(given: str | None) -> Device:
    """Return the device asked for, or found.

    Raises:
        ServingError: there is none of that name.
    """
    if given is None:
        return find_device()
    for known in WORKERS:
        if given == known:
            return known
    raise ServingError(f"device is {given!r}; give one of {', '.join(WORKERS)}")


def _classes(device: Device, extra: list[str]) -> list[str]:
    """Return the arguments by which vLLM takes our classes."""
    ours = ["--worker-cls", WORKERS[device]]
    if device == "cpu":
        return [*ours, "--scheduler-cls", SCHEDULER]
    waits = any(part.replace("_", "-") == "--no-async-scheduling" for part in extra)
    scheduler = SCHEDULER if waits else ASYNC_SCHEDULER
    return [*ours, "--scheduler-cls", scheduler, "--attention-backend", BACKEND]


def _vllm_arguments(extra: list[str], asked: dict[str, Any], device: Device) -> list[str]:
    """Return vLLM's arguments: the user's, and what makes it ours."""
    rest: list[str] = []
    others: Any = {}
    waiting = iter(extra)
    for part in waiting:
        name, _, value = part.partition("=")
        if name.replace("_", "-") in _OURS:
            raise ServingError(f"{name} is set by pyramidkv serve; leave it out")
        if name.replace("_", "-") != "--additional-config":
            rest.append(part)
            continue
        try:
            others = json.loads(value or next(waiting, ""))
        except ValueError:
            others = None
        if not isinstance(others, dict) or KEY in others:
            raise ServingError(f"--additional-config must be a JSON object without {KEY!r}")
    config = json.dumps({**others, KEY: asked})
    return [*_classes(device, extra), "--additional-config", config, *rest]


def _plan(settings: ServingSettings) -> list[str]:
    """Return the budgets of the groups for a long prompt."""
    budgets = settings.compression.schedule(settings.groups, 10**6)
    shares = ", ".join(f"{budget:,}" for budget in budgets)
    return [f"groups of layers, lowest first, keep {shares} tokens of a long prompt"]
