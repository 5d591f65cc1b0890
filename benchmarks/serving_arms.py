"""Two servers for a comparison: stock vLLM and the plugin, with the same bytes for their caches."""

from __future__ import annotations

import argparse
import functools
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import common
import servers
import torch
from servers import PLUGIN, STOCK, Server, Start

from pyramidkv.loading import DEMO_MODEL
from pyramidkv.model_shape import ModelShape
from pyramidkv.model_source import find_model
from pyramidkv.records import format_bytes
from pyramidkv.vllm.settings import ServingSettings, read_settings

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every comparison of servers."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--model", default=DEMO_MODEL, help="hub id or folder, as vLLM takes it")
    result.add_argument("--dtype", default="float32", choices=VALUE_BYTES)
    result.add_argument("--method", default="pyramidkv")
    result.add_argument("--budget", type=int, default=256, help="tokens per layer, on average")
    result.add_argument("--groups", type=int, help="of layers; by default 4 to 8")
    result.add_argument("--block-size", type=int, default=32, help="tokens of a block")
    result.add_argument("--compile", action="store_true", help="have vLLM compile the model")
    result.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    result.add_argument("--repeats", type=int, default=3)
    result.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    result.add_argument("--logs", type=Path, help="folder that keeps the servers' logs")
    result.add_argument("--output", type=Path, help="write the figures as JSON")
    return result


@functools.cache
def shape_of(model: str) -> ModelShape:
    """Return a model's shape."""
    return find_model(model).shape


def settings_of(arguments: argparse.Namespace) -> ServingSettings:
    """Return the plugin's settings."""
    given = {name: getattr(arguments, name) for name in ("method", "budget", "groups")}
    return read_settings(given, len(shape_of(arguments.model).layers))


def plugin_options(arguments: argparse.Namespace) -> list[str]:
    """Return the plugin's settings as options of `pyramidkv serve`."""
    groups = settings_of(arguments).groups
    return [f"--method={arguments.method}", f"--budget={arguments.budget}", f"--groups={groups}"]


@contextmanager
def both(arguments: argparse.Namespace, longest: int, blocks: int) -> Iterator[dict[str, Server]]:
    """Start both servers, which live side by side and take turns, and yield them by name.

    Args:
        arguments: see `parser`.
        longest: tokens of the longest request, answer included.
        blocks: of the stock server's pool. A block of the plugin's holds the layers of one group
            only, so that the same bytes are as many times more blocks as there are groups.

    Raises:
        SystemExit: the pools' bytes are not the same.
    """
    servers.end_cleanly_when_told_to()
    groups = settings_of(arguments).groups
    eager = [] if arguments.compile else ["--enforce-eager"]
    environment = servers.environment(arguments.threads)
    size, dtype = arguments.block_size, arguments.dtype
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        starts = [
            Start(
                python,
                arguments.model,
                servers.options(arguments.model, dtype, longest, count, size) + eager + more,
                environment,
                folder / f"{arm}.log",
            )
            for arm, python, count, more in (
                ("stock", STOCK, blocks, []),
                ("plugin", PLUGIN, groups * blocks, plugin_options(arguments)),
            )
        ]
        print("starting both servers", flush=True)
        found = dict(
            zip(("stock", "plugin"), stack.enter_context(servers.running(*starts)), strict=True)
        )
        held = pool_bytes(found["stock"], arguments, 1)
        if pool_bytes(found["plugin"], arguments, groups) != held:
            raise SystemExit("the pools differ in bytes")
        print(f"pool of {format_bytes(held)} each: {blocks} blocks, {groups * blocks} blocks")
        yield found


def pool_bytes(server: Server, arguments: argparse.Namespace, groups: int) -> int:
    """Return the bytes of a server's blocks, by the model's shape and by vLLM's own log.

    Raises:
        SystemExit: the two differ.
    """
    values = shape_of(arguments.model).kv_values_per_token * VALUE_BYTES[arguments.dtype]
    per_block = values * arguments.block_size // groups
    blocks, fitting = server.blocks()
    if fitting != servers.SPACE_GIB * 2**30 // per_block:
        raise SystemExit(
            f"a block has {per_block:,} bytes by the model's shape, but vLLM's log says that "
            f"{fitting:,} fit into {servers.SPACE_GIB} GiB"
        )
    return blocks * per_block


def random_prompt(source: random.Random, arguments: argparse.Namespace, tokens: int) -> list[int]:
    """Return a prompt that shares no prefix with another one."""
    return source.choices(range(shape_of(arguments.model).vocab_size), k=tokens)


def report(
    arguments: argparse.Namespace, found: dict[str, Server], figures: dict[str, Any]
) -> None:
    """Print the figures' circumstances, and keep them with the servers' commands if asked."""
    torch.set_num_threads(arguments.threads)  # as the servers have it, for the record
    commands = {arm: server.command[1:] for arm, server in found.items()}
    versions = {"vllm": next(iter(found.values())).version()}
    common.report(arguments, {"servers": commands, **figures}, versions)


def ratio(runs: dict[str, list[Any]], name: str) -> tuple[float | None, str]:
    """Return plugin / stock of the medians, and it in words with those of single repeats.

    None, and a dash, if stock has a 0 somewhere.
    """
    pairs = [[run[name] for run in runs[arm]] for arm in ("plugin", "stock")]
    ours, stock = (common.median(values) for values in pairs)
    if not all(pairs[1]):
        return None, "-"
    single = [a / b for a, b in zip(*pairs, strict=True)]
    return ours / stock, f"{ours / stock:.2f} ({min(single):.2f} to {max(single):.2f})"
