"""The options that several commands share, each described once."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..compression import Compression, make_compression
from ..methods import get_method
from ..plugins import load_plugin
from ..schedule_profile import ScheduleProfile
from .inputs import InputError, head_budgets, layer_budgets, named_methods, whole_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = Annotated[str, typer.Option(help="Hub id, model folder or GGUF file.")]
MethodName = Annotated[
    str | None, typer.Option(help="See `pyramidkv methods`; pyramidkv if none is given.")
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin", metavar="FILE", help="A Python file with methods of your own; repeatable."
    ),
]
Budget = Annotated[
    int | None, typer.Option(help="Tokens kept per layer on average, sinks and window included.")
]
CompressionRatio = Annotated[
    float | None,
    typer.Option(help="Fraction of the prompt removed, instead of a budget: 0.9 keeps 10%."),
]
DecodeBudget = Annotated[
    int | None,
    typer.Option(help="Bound on the tokens kept per layer on average, generated ones included."),
]
DecodeInterval = Annotated[
    int | None,
    typer.Option(help="Tokens after which the cache is brought back to the decode budget (32)."),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(help="Process the prompt in pieces of this many tokens, within bounded memory."),
]
WindowSize = Annotated[
    int | None, typer.Option(help="Last prompt tokens, always kept; their queries vote.")
]
SinkTokens = Annotated[int | None, typer.Option(help="First tokens, always kept.")]
PoolingKind = Annotated[str | None, typer.Option("--pooling", help="max or avg.")]
KernelSize = Annotated[int | None, typer.Option(help="Odd width of the pooling; 1 is none.")]
GroupReduce = Annotated[
    str | None, typer.Option(help="mean or max over query heads that share a KV head.")
]
WindowReduce = Annotated[str | None, typer.Option(help="mean or max over the window's queries.")]
ValueNorm = Annotated[
    bool | None,
    typer.Option("--value-norm/--no-value-norm", help="Weight scores by value norms."),
]
AllocationKind = Annotated[
    str | None, typer.Option("--allocation", help="uniform, pyramid, power, entropy or list.")
]
Schedule = Annotated[
    Path | None,
    typer.Option(
        "--schedule",
        help="Entropy shares, instead of the method's own, from `pyramidkv profile`.",
    ),
]
ShareTemperature = Annotated[
    float | None, typer.Option(help="Evenness of entropy shares: 1 is proportional.")
]
ShareFloor = Annotated[
    float | None, typer.Option(help="Least entropy share, as a fraction of an equal one (0.1).")
]
HeadFloor = Annotated[
    float | None,
    typer.Option(help="Share of its tokens that a KV head cannot lose to others, 0 to 1 (0.2)."),
]
Beta = Annotated[float | None, typer.Option(help="Steepness of the pyramid, from 1 (uniform).")]
Gamma = Annotated[float | None, typer.Option(help="Exponent of the power law.")]
CMax = Annotated[int | None, typer.Option(help="Lowest layer of the power law.")]
CMin = Annotated[int | None, typer.Option(help="Highest layer of the power law.")]
LayerBudgets = Annotated[
    str | None, typer.Option(help="Budgets layer by layer, such as 400,200,100.")
]
HeadBudgets = Annotated[
    Path | None,
    typer.Option(help="JSON file of budgets: for each layer a list, one for each KV head."),
]
Methods = Annotated[str, typer.Option(help="METHOD[:ALLOCATION], separated by commas.")]
Budgets = Annotated[str, typer.Option(help="Tokens kept per layer on average, such as 64,128.")]
MaxNewTokens = Annotated[int, typer.Option(help="Where to stop at the latest.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 samples.")]
Seed = Annotated[int, typer.Option(help="Seed for sampling.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0.")]
DeviceMap = Annotated[str | None, typer.Option(help="Such as auto, to spread layers over devices.")]
AttnImplementation = Annotated[str | None, typer.Option(help="sdpa, eager or flash_attention_2.")]
UseChat = Annotated[
    bool | None,
    typer.Option("--chat/--no-chat", help="Use the chat template (by default if there is one)."),
]
Output = Annotated[Path | None, typer.Option(help="Write the record as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Draw a picture: a .png, .svg or .pdf file.")]
ContextFile = Annotated[
    Path | None, typer.Option("--context", help="A UTF-8 file with the document; - is stdin.")
]
Load = Annotated[
    Path | None, typer.Option("--load", help="A context saved before, instead of a document.")
]


@dataclass(frozen=True)
class Group:
    """Options that belong together: by name, what typer is told and the default."""

    title: str
    options: dict[str, tuple[Any, Any]]

    def parameters(self) -> list[inspect.Parameter]:
        """Return them as parameters of a command, shown under the group's title."""
        result = []
        for name, (annotation, default) in self.options.items():
            shown = copy.copy(annotation.__metadata__[0])
            shown.rich_help_panel = self.title
            kind = inspect.Parameter.KEYWORD_ONLY
            told = Annotated[annotation.__origin__, shown]  # type: ignore[name-defined]
            result.append(inspect.Parameter(name, kind, default=default, annotation=told))
        return result


PLUGINS = Group("What is kept", {"plugin": (Plugins, None)})
AMOUNTS = Group(
    "How much is kept",
    {
        "method": (MethodName, None),
        "budget": (Budget, None),
        "compression_ratio": (CompressionRatio, None),
        "decode_budget": (DecodeBudget, None),
        "decode_interval": (DecodeInterval, None),
        "prefill_chunk": (PrefillChunk, None),
    },
)
METHOD_OPTIONS = Group(
    "What is kept",
    {
        "window_size": (WindowSize, None),
        "sink_tokens": (SinkTokens, None),
        "pooling": (PoolingKind, None),
        "kernel_size": (KernelSize, None),
        "group_reduce": (GroupReduce, None),
        "window_reduce": (WindowReduce, None),
        "value_norm": (ValueNorm, None),
        "allocation": (AllocationKind, None),
        "beta": (Beta, None),
        "gamma": (Gamma, None),
        "c_max": (CMax, None),
        "c_min": (CMin, None),
        "schedule": (Schedule, None),
        "share_temperature": (ShareTemperature, None),
        "share_floor": (ShareFloor, None),
        "head_floor": (HeadFloor, None),
        "layer_budgets": (LayerBudgets, None),
        "head_budgets": (HeadBudgets, None),
    },
)
_NOT_SERVED = ("schedule", "share_temperature", "share_floor", "head_floor", "head_budgets")
SERVED_OPTIONS = Group(
    METHOD_OPTIONS.title,
    {name: told for name, told in METHOD_OPTIONS.options.items() if name not in _NOT_SERVED},
)
GENERATION = Group(
    "Generation",
    {
        "max_new_tokens": (MaxNewTokens, 128),
        "temperature": (Temperature, 0.0),
        "seed": (Seed, 0),
        "chat": (UseChat, None),
    },
)
MODEL = Group(
    "Model",
    {
        "dtype": (Dtype, "auto"),
        "device": (Device, None),
        "device_map": (DeviceMap, None),
        "attn_implementation": (AttnImplementation, None),
    },
)


def taking(*groups: Group, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of some groups, in place of its `**given`.

    Args:
        groups: whose options the command takes, too.
        defaults: other default values than the groups'.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        shared = [parameter for group in groups for parameter in group.parameters()]
        shared = [p.replace(default=defaults.get(p.name, p.default)) for p in shared]
        every = [*own, *shared]

        @functools.wraps(command)
        def wrapper(**given: Any) -> None:
            command(**given)

        wrapper.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        del wrapper.__wrapped__  # its hints are not the wrapper's
        return wrapper

    return decorate


def method_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return the method's options among a command's arguments, those that were given."""
    chosen = {n: given[n] for n in METHOD_OPTIONS.options if given.get(n) is not None}
    if "layer_budgets" in chosen:
        chosen["layer_budgets"] = layer_budgets(chosen["layer_budgets"])
    if "head_budgets" in chosen:
        chosen["head_budgets"] = head_budgets(chosen["head_budgets"])
    if "schedule" in chosen:
        chosen["profile"] = ScheduleProfile.read(chosen.pop("schedule"))
    return chosen


def compressions(given: dict[str, Any]) -> list[Compression]:
    """Return every method of `methods` with every budget of `budgets`, lists a command was given.

    Raises:
        InputError, MethodError, BudgetError: they are none, or do not fit one another.
    """
    budgets = whole_numbers(given["budgets"], "--budgets")
    shared = {
        name: given[name] for name in ("window_size", "sink_tokens") if given[name] is not None
    }
    result = []
    for name, own in named_methods(given["methods"], "--methods"):
        if not get_method(name).evicts:
            result.append(make_compression(name))
            continue
        result += [make_compression(name, budget, **shared, **own) for budget in budgets]
    return result


def files_read(given: dict[str, Any]) -> list[Path | None]:
    """Return the files that the method's options name, not to be written over."""
    return [given["schedule"], given["head_budgets"]]


def load_plugins(given: dict[str, Any]) -> list[Path]:
    """Register the methods of a command's plugin files, before a method is named; return the files.

    Raises:
        PluginError: a file cannot be used.
    """
    files = list(given["plugin"] or ())
    for path in files:
        load_plugin(path)
    return files


def compression_from(given: dict[str, Any]) -> Compression:
    """Return the compression that a command's arguments describe."""
    amounts = {name: given[name] for name in AMOUNTS.options}
    chunk = amounts.pop("prefill_chunk")
    method = amounts.pop("method") or "pyramidkv"
    compression = make_compression(method, **amounts, **method_options(given))
    if chunk is not None:
        compression.method.require("prefill chunks")
    return compression


def refuse_compression(given: dict[str, Any], why: str) -> None:
    """Refuse options about the compression where there is nothing left to choose.

    Raises:
        InputError: it names the options.
    """
    names = (*AMOUNTS.options, *METHOD_OPTIONS.options, "chat")
    set_ones = [f"--{n.replace('_', '-')}" for n in names if given[n] is not None]
    if set_ones:
        raise InputError(f"{why}; leave out {', '.join(set_ones)}")


def load_model(name: str, given: dict[str, Any]) -> PreTrainedModel:
    """Load a model as a command's arguments say, with a note on stderr meanwhile."""
    from rich.markup import escape

    from .. import loading
    from . import display

    with display.console(stderr=True).status(escape(f"loading {name}")):
        return loading.load_model(
            name,
            dtype=given["dtype"],
            device=given["device"],
            device_map=given["device_map"],
            attn_implementation=given["attn_implementation"],
        )


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice out of the output; before its import."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
