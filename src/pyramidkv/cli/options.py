"""The options that several commands share, each described once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..compression import Compression, make_compression
from .inputs import InputError, layer_budgets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model = Annotated[str, typer.Option(help="Hub id, model folder or GGUF file.")]
MethodName = Annotated[
    str | None, typer.Option(help="See `pyramidkv methods`; pyramidkv if none is given.")
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
    str | None, typer.Option("--allocation", help="uniform, pyramid, power or list.")
]
Beta = Annotated[float | None, typer.Option(help="Steepness of the pyramid, from 1 (uniform).")]
Gamma = Annotated[float | None, typer.Option(help="Exponent of the power law.")]
CMax = Annotated[int | None, typer.Option(help="Lowest layer of the power law.")]
CMin = Annotated[int | None, typer.Option(help="Highest layer of the power law.")]
LayerBudgets = Annotated[
    str | None, typer.Option(help="Budgets layer by layer, such as 400,200,100.")
]
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
ContextFile = Annotated[
    Path | None, typer.Option("--context", help="A UTF-8 file with the document; - is stdin.")
]
Load = Annotated[
    Path | None, typer.Option("--load", help="A context saved before, instead of a document.")
]

COMPRESSION = (
    "method",
    "budget",
    "compression_ratio",
    "decode_budget",
    "decode_interval",
)
METHOD_OPTIONS = (
    "window_size",
    "sink_tokens",
    "pooling",
    "kernel_size",
    "group_reduce",
    "window_reduce",
    "value_norm",
    "allocation",
    "beta",
    "gamma",
    "c_max",
    "c_min",
    "layer_budgets",
)


def compression_from(given: dict[str, Any]) -> Compression:
    """Return the compression that a command's arguments describe."""
    chosen = {name: given[name] for name in METHOD_OPTIONS if given[name] is not None}
    if "layer_budgets" in chosen:
        chosen["layer_budgets"] = layer_budgets(chosen["layer_budgets"])
    amounts = {name: given[name] for name in COMPRESSION}
    compression = make_compression(amounts.pop("method") or "pyramidkv", **amounts, **chosen)
    if given["prefill_chunk"] is not None:
        compression.method.require("prefill chunks")
    return compression


def refuse_compression(given: dict[str, Any], why: str) -> None:
    """Refuse options about the compression where there is nothing left to choose.

    Raises:
        InputError: it names the options.
    """
    names = (*COMPRESSION, *METHOD_OPTIONS, "prefill_chunk", "chat")
    set_ones = [f"--{n.replace('_', '-')}" for n in names if given[n] is not None]
    if set_ones:
        raise InputError(f"{why}; leave out {', '.join(set_ones)}")


def load_model(given: dict[str, Any]) -> PreTrainedModel:
    """Load the model that a command's arguments name, with a note on stderr meanwhile."""
    from rich.markup import escape

    from .. import loading
    from . import display

    with display.console(stderr=True).status(escape(f"loading {given['model']}")):
        return loading.load_model(
            given["model"],
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
