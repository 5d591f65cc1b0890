"""`pyramidkv eval`: every method judged on the same samples, at the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..evaluation.sample import Sample
from ..plugins import describe_plugins
from ..records import format_bytes
from . import display, inputs, options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.folders import Shard

Measure = Callable[[str, str, str], int]
"""Tokens of a prompt, from its context, question and answer prefix."""

METHODS = "full,streamingllm,h2o,snapkv,pyramidkv"

eval_app = typer.Typer(
    name="eval",
    help="Judge methods on the same samples, with the same number of tokens kept.",
    no_args_is_help=True,
)

Lengths = Annotated[str, typer.Option(help="Tokens of prompt and answer, such as 2048,4096.")]
Folder = Annotated[Path, typer.Option("--output", help="The run's folder; goes on if it has one.")]
Agnostic = Annotated[
    bool, typer.Option("--agnostic", help="Compress each context before its question is known.")
]
Part = Annotated[str, typer.Option("--shard", help="I/N answers every N-th sample from the I-th.")]
HaystackName = Annotated[
    str, typer.Option("--haystack", help="noise, constitution or a folder of .txt files.")
]
_SHARED = options.Group(
    "What is judged",
    {
        "methods": (options.Methods, METHODS),
        "plugin": (options.Plugins, None),
        "budgets": (options.Budgets, "64,128,256,512"),
        "agnostic": (Agnostic, False),
        "shard": (Part, "1/1"),
        "window_size": (options.WindowSize, None),
        "sink_tokens": (options.SinkTokens, None),
    },
)
_taking = options.taking(_SHARED, options.MODEL)


@eval_app.command()
@_taking
def needle(
    model: options.Model,
    output: Folder,
    lengths: Lengths = "2048,4096",
    depths: Annotated[str, typer.Option(help="Where it stands, in percent.")] = "0,25,50,75,100",
    kinds: Annotated[str, typer.Option(help="digits, words, code16, code32, uuids.")] = "digits",
    form: Annotated[
        str, typer.Option(help="single, multi-key, multi-value or multi-query.")
    ] = "single",
    samples: Annotated[int, typer.Option(help="Of each length, depth and kind.")] = 4,
    haystack: HaystackName = "constitution",
    seed: options.Seed = 0,
    **given: Any,
) -> None:
    """Find needles in a haystack."""
    from ..evaluation.haystacks import find_haystack
    from ..evaluation.needles import needle_samples

    sizes = inputs.whole_numbers(lengths, "--lengths")
    places = inputs.whole_numbers(depths, "--depths")
    chosen = inputs.names(kinds, "--kinds", "digits,words")
    settings = {
        "lengths": sizes,
        "depths": places,
        "kinds": chosen,
        "form": form,
        "samples": samples,
        "seed": seed,
        "haystack": haystack,
    }
    text = find_haystack(haystack)

    def make(measure: Measure) -> list[Sample]:
        return needle_samples(
            measure, sizes, places, chosen, form, samples=samples, seed=seed, haystack=text
        )

    _evaluate(model, output, make, {"benchmark": "needle", **settings}, given)


@eval_app.command()
@_taking
def ruler(
    context: typer.Context,
    model: options.Model,
    output: Folder,
    tasks: Annotated[
        str, typer.Option(help="Of RULER's, separated by commas.")
    ] = "niah_single_2,niah_multikey_1,niah_multivalue,vt",
    lengths: Lengths = "2048,4096",
    samples: Annotated[
        int | None,
        typer.Option(help="Of each task and length, 20 by default; with --data the first ones."),
    ] = None,
    haystack: HaystackName = "constitution",
    squad: Annotated[
        Path | None, typer.Option(help="A file of SQuAD, such as dev-v2.0.json, for qa_1.")
    ] = None,
    hotpotqa: Annotated[
        Path | None,
        typer.Option(help="A file of HotpotQA, such as hotpot_dev_distractor_v1.json, for qa_2."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Files RULER's generator wrote, instead of tasks."),
    ] = None,
    seed: options.Seed = 0,
    **given: Any,
) -> None:
    """RULER's tasks, generated here, or from its generator's files."""
    from ..evaluation.data_files import load_ruler
    from ..evaluation.haystacks import find_haystack
    from ..evaluation.question_files import read_hotpotqa, read_squad
    from ..evaluation.ruler import make_samples

    if data is not None:
        made = ("tasks", "lengths", "haystack", "squad", "hotpotqa", "seed")
        _refuse_unused(context, made, "a file of --data has its samples made already")
        loaded = [sample for path in data for sample in load_ruler(path, samples)]
        told = {"benchmark": "ruler", "data": [str(path) for path in data], "samples": samples}
        _evaluate(model, output, lambda measure: loaded, told, given)
        return
    count = 20 if samples is None else samples
    sizes = inputs.whole_numbers(lengths, "--lengths")
    chosen = inputs.names(tasks, "--tasks", "niah_single_2,vt")
    settings: dict[str, Any] = {
        "tasks": chosen,
        "lengths": sizes,
        "samples": count,
        "seed": seed,
        "haystack": haystack,
    }
    text = find_haystack(haystack)
    asked = {}
    for option, task, file, read in (
        ("squad", "qa_1", squad, read_squad),
        ("hotpotqa", "qa_2", hotpotqa, read_hotpotqa),
    ):
        if file is not None and task not in chosen:
            raise inputs.InputError(f"--{option} is for {task}, which is not among the --tasks")
        if file is None and task in chosen:
            raise inputs.InputError(f"{task} takes its questions from a file; give --{option} FILE")
        if file is not None:
            asked[task] = read(file)
            settings[option] = str(file)

    def make(measure: Measure) -> list[Sample]:
        return [
            sample
            for task in chosen
            for length in sizes
            for sample in make_samples(
                task, measure, length, count, seed, text, questions=asked.get(task)
            )
        ]

    _evaluate(model, output, make, {"benchmark": "ruler", **settings}, given)


@eval_app.command()
@_taking
def longbench(
    model: options.Model,
    output: Folder,
    tasks: Annotated[str, typer.Option(help="Of LongBench's, separated by commas.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where its JSONL files are, one for each task; by default the hub."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Of each task, the first ones.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer; more are cut from the middle."),
    ] = None,
    **given: Any,
) -> None:
    """LongBench, from its files or from the hub."""
    from ..evaluation.longbench import load_longbench, open_archive

    chosen = inputs.names(tasks, "--tasks", "multi_news,trec")
    place = open_archive() if folder is None else folder
    loaded = [s for task in chosen for s in load_longbench(place, task, samples)]
    settings = {"benchmark": "longbench", "tasks": chosen, "samples": samples}
    _evaluate(model, output, lambda measure: loaded, settings, given, limit)


@eval_app.command()
@_taking
def own(
    model: options.Model,
    output: Folder,
    data: Annotated[
        list[Path],
        typer.Option("--data", help="JSONL with question, context and answers in each line."),
    ],
    samples: Annotated[int | None, typer.Option(help="Of each file, the first ones.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Most tokens of prompt and answer; more are cut from the middle."),
    ] = None,
    **given: Any,
) -> None:
    """Questions of your own."""
    from ..evaluation.data_files import load_own

    loaded = [sample for path in data for sample in load_own(path, samples)]
    settings = {"benchmark": "own", "data": [str(path) for path in data], "samples": samples}
    _evaluate(model, output, lambda measure: loaded, settings, given, limit)


def _refuse_unused(context: typer.Context, names: Sequence[str], reason: str) -> None:
    """Refuse options that were given and would have no effect."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise inputs.InputError(f"--{name} has no effect here: {reason}; leave it out")


def _evaluate(
    model: str,
    folder: Path,
    make: Callable[[Measure], list[Sample]],
    settings: dict[str, Any],
    given: dict[str, Any],
    limit: int | None = None,
) -> None:
    """Answer the samples that `make` makes, given what measures a prompt, and show the summary."""
    plugins = options.load_plugins(given)
    compressions = options.compressions(given)
    if plugins:
        settings = {**settings, "plugins": describe_plugins(plugins)}
    options.quiet_transformers()
    from .. import loading
    from ..evaluation.folders import read_lines, read_settings
    from ..evaluation.runner import name_arms, run

    arms = name_arms(compressions)
    shard = _shard(given["shard"])
    tokenizer = loading.load_tokenizer(model)
    samples = make(lambda *texts: measure(tokenizer, *texts))
    loaded = options.load_model(model, given)
    with display.progress_with_time_left("samples") as on_sample:
        run(
            loaded,
            tokenizer,
            samples,
            arms,
            folder,
            agnostic=given["agnostic"],
            limit=limit,
            shard=shard,
            settings=settings,
            on_sample=on_sample,
        )
    show(list(read_lines(folder)), read_settings(folder))


def measure(
    tokenizer: PreTrainedTokenizerBase, context: str, question: str, answer_prefix: str
) -> int:
    """Return the tokens of a prompt in the model's chat template, the answer's prefix included."""
    from ..evaluation.answers import sample_ids

    sample = Sample("measured", 0, context, question, (), "match_all", 0, answer_prefix)
    return len(sample_ids(tokenizer, sample))


def _shard(text: str) -> Shard:
    from ..evaluation.folders import Shard

    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise inputs.InputError(f"--shard is {text!r}; give I/N, such as 1/4")
    return Shard(int(number), int(count))


def show(lines: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Print a run's summary."""
    from ..evaluation.summary import summarise

    out = display.console()
    asked = settings["asked"]
    arms = asked["arms"]
    summary = summarise(lines, arms)
    done = f"{len(lines):,} of {asked['samples']:,} samples"
    how = "before the question is known" if asked["agnostic"] else "with the question in the prompt"
    out.print(
        f"{done}, compressed {how}; scores in %, with 95% intervals of paired bootstraps; the best "
        "is that of the methods with the same budget."
    )
    for name, group in distinct(summary).items():
        described = group["arms"]
        rows = list(arms)
        columns = [
            ("score", [_percent(described[arm], "score", "interval") for arm in rows]),
            ("against full", [_against(described[arm]) for arm in rows]),
            ("against the best", [_against_best(group, arm) for arm in rows]),
            ("kept per layer", [f"{described[arm]['kept_tokens']:,.1f}" for arm in rows]),
            ("bytes", [format_bytes(described[arm]["kept_bytes"]) for arm in rows]),
            ("footprint", [f"{100 * described[arm]['footprint']:.1f}%" for arm in rows]),
        ]
        out.print(f"\n{name}: {group['samples']:,} samples")
        for table in display.wide_tables(rows, columns, out.width):
            out.print(table, crop=False)
        critical = {
            method: "none of these budgets" if share is None else f"{100 * share:.1f}%"
            for method, share in group["critical_footprint"].items()
        }
        if critical:
            told = ", ".join(f"{method} {share}" for method, share in critical.items())
            out.print(f"smallest footprint with 90% of the full cache's score: {told}")


def distinct(summary: dict[str, Any]) -> dict[str, Any]:
    """Leave out groups that have the samples of one before: all of one task, and of one length."""
    result: dict[str, Any] = {}
    for name, group in summary.items():
        if group not in result.values():
            result[name] = group
    return result


def _percent(described: dict[str, Any], value: str, interval: str, sign: str = "") -> str:
    low, high = (100 * bound for bound in described[interval])
    return f"{100 * described[value]:{sign}z.1f} ({low:{sign}z.1f} to {high:{sign}z.1f})"


def _against(described: dict[str, Any]) -> str:
    if "difference" not in described:
        return "-"
    return _percent(described, "difference", "difference_interval", "+")


def _against_best(group: dict[str, Any], arm: str) -> str:
    """Return the difference to the best method of the same budget, if that is another one."""
    from ..evaluation.summary import differences_of

    rivals = differences_of(group, arm)
    best = max([arm, *rivals], key=lambda name: group["arms"][name]["score"])
    return "-" if best == arm else _percent(rivals[best], "difference", "interval", "+")
