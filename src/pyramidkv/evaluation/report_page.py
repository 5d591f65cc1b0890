"""The page of a report: pictures, tables and the worst losses of one or two runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from ..plots import style
from ..plots.evaluation import draw_needles, draw_scores
from ..records import format_bytes
from . import html
from .report import Loss, Section, needle_means, series, worst_losses
from .summary import FULL, SUFFICIENT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"


@dataclass(frozen=True)
class Picture:
    """A figure of a section.

    Attributes:
        name: of its files, without a suffix.
        figure: what is drawn.
        label: what it shows, in words.
        caption: what stands below it.
        widest: pixels of width below which it is not shrunk; 0: it is.
    """

    name: str
    figure: Figure
    label: str
    caption: str = ""
    widest: int = 0


def make_pictures(sections: Sequence[Section]) -> list[list[Picture]]:
    """Return the pictures of each section: scores of all samples, of each task, and needles.

    Raises:
        PlotError: matplotlib is missing.
    """
    taken: set[str] = set()
    return [list(_pictures(section, taken)) for section in sections]


def _pictures(section: Section, taken: set[str]) -> Iterator[Picture]:
    lines = series(section.arms)
    tasks = section.tasks
    for name in [ALL, *(tasks if len(tasks) > 1 else [])]:
        of = "all samples" if name == ALL else f"the task {name}"
        group = section.summary[name]
        yield Picture(
            _file(section, f"scores-{name}", taken),
            draw_scores(group, lines, "all tasks" if name == ALL else name),
            f"Score against kept memory for {of}; the table of {of} has the figures.",
        )
    means = needle_means(section.lines, section.arms)
    if means:
        panels = len(lines) + (FULL in section.arms)
        yield Picture(
            _file(section, "needles", taken),
            draw_needles(means, lines, {arm: _amount(p) for arm, p in section.arms.items()}),
            "Mean score by depth and length of the needle, one panel for each method and budget.",
            "Mean score in % of the samples that have a depth and a length; dark is lost, light "
            "is found.",
            min(900, 150 * panels),
        )


def _amount(parameters: Mapping[str, Any]) -> str:
    if parameters["budget"] is not None:
        return f"{parameters['budget']:,} tokens"
    ratio = parameters["compression_ratio"]
    return "" if ratio is None else f"{ratio:.0%} off"


def _file(section: Section, name: str, taken: set[str]) -> str:
    """Return a name that every file system takes and no other picture has."""
    prefix = "agnostic-" if section.asked["agnostic"] else ""
    stem = prefix + (re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:60] or "picture")
    number, result = 1, stem
    while result.lower() in taken:
        number += 1
        result = f"{stem}-{number}"
    taken.add(result.lower())
    return result


def make_page(sections: Sequence[Section], pictures: Sequence[Sequence[Picture]]) -> str:
    """Return the report as HTML that stands alone.

    Args:
        sections: see `report.read_sections`.
        pictures: of each section: see `make_pictures`.
    """
    asked = sections[0].asked
    model = asked["model"] or "a model without a name"
    title = f"Evaluation of {style.short(model)}: {_count(sections)}"
    parts = [f'<p class="note">Model: {html.text(model)}</p>', _READING]
    number = 0
    for section, drawn in zip(sections, pictures, strict=True):
        shown = []
        for one in drawn:
            number += 1
            svg = style.to_svg(one.figure)
            shown.append(html.picture(svg, number, one.label, one.caption, one.widest))
        parts += _section(section, shown, any(one.widest for one in drawn))
    css = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return html.page(title, css, "\n".join(parts))


def _count(sections: Sequence[Section]) -> str:
    told = [_done(section) for section in sections]
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(
        f"{_kind(section)} {done}" for section, done in zip(sections, told, strict=True)
    )


def _kind(section: Section) -> str:
    return "query-agnostic" if section.asked["agnostic"] else "query-aware"


def _done(section: Section) -> str:
    done, wanted = len(section.lines), section.asked["samples"]
    noun = "sample" if wanted == 1 else "samples"
    return f"{done:,} {noun}" if done == wanted else f"partial: {done:,} of {wanted:,} {noun}"


_READING = (
    "<p>Every method answered the same samples. Intervals are 95% intervals of paired bootstraps "
    "over the samples, those that differ in length alone drawn together; differences are taken "
    "sample by sample, in points (percent of the best score). KV memory is that of the cache while "
    "answering, in percent of the full cache&#x27;s.</p>"
)


def _section(section: Section, shown: Sequence[str], needles: bool) -> list[str]:
    agnostic = section.asked["agnostic"]
    kind = _kind(section).capitalize()
    how = (
        "each context was compressed before its question was known"
        if agnostic
        else "each prompt was compressed with its question in it"
    )
    repeated = (
        f" {section.repeated:,} further answers to samples that had one already are left out."
        if section.repeated
        else ""
    )
    small = shown[1:-1] if needles else shown[1:]
    parts = [
        f"<h2>{kind}: {html.text(how)}</h2>",
        f"<p>{html.text(_done(section))}.{repeated}</p>",
        "<h3>Score against kept memory</h3>",
        shown[0],
        '<p class="note">Points of the same budget are drawn side by side, 3% apart, so that '
        "their intervals can be told apart.</p>",
    ]
    if small:
        parts += ['<div class="pictures">', *small, "</div>"]
    if needles:
        parts += ["<h3>Needles by depth and length</h3>", shown[-1]]
    parts += ["<h3>Scores</h3>", *_groups(section)]
    critical = _critical(section)
    if critical:
        parts += ["<h3>Critical footprints</h3>", critical]
    parts += ["<h3>Worst losses</h3>", *_losses(worst_losses(section))]
    parts += ["<h3>How it was run</h3>", html.details("Every parameter", *_parameters(section))]
    return parts


def _groups(section: Section) -> Iterator[str]:
    """Yield the tables of all samples, and folded up those of each task and length."""
    single = len(section.summary) == 2  # one task without lengths: the same samples again
    for name, group in section.summary.items():
        if name == ALL:
            yield _scores(group, f"all samples ({group['samples']:,})")
            pairs = _pairs(group, "all samples")
            if pairs:
                yield html.details("Methods of the same budget, in pairs", pairs, opened=True)
        elif not single:
            told = f"{name} ({group['samples']:,} samples)"
            yield html.details(told, _scores(group, told), _pairs(group, name))


def _scores(group: Mapping[str, Any], name: str) -> str:
    rows = [
        [
            arm,
            _percent(told, "score", "interval"),
            _difference(told) if "difference" in told else "\N{EN DASH}",
            f"{told['kept_tokens']:,.1f}",
            format_bytes(round(told["kept_bytes"])),
            f"{100 * told['footprint']:.1f}",
        ]
        for arm, told in group["arms"].items()
    ]
    head = [
        "method and budget",
        "score in % (interval)",
        "difference to full in points (interval)",
        "tokens kept per layer",
        "their size",
        "KV memory in % of full",
    ]
    return html.table(f"Scores of {name}", head, rows)


def _pairs(group: Mapping[str, Any], name: str) -> str:
    pairs = group["pairs"]
    if not pairs:
        return ""
    clear = [not pair["difference_interval"][0] <= 0 <= pair["difference_interval"][1]
             for pair in pairs]  # fmt: skip
    rows = [
        [f"{pair['first']} \N{MINUS SIGN} {pair['second']}", _difference(pair),
         "excludes 0" if sure else "includes 0"]
        for pair, sure in zip(pairs, clear, strict=True)
    ]  # fmt: skip
    head = ["first minus second", "difference in points (interval)", "the interval"]
    note = (
        f"Marked: {sum(clear):,} of {len(pairs):,} intervals exclude 0; of methods that are "
        "equally good, one in 20 would by chance."
    )
    table = html.table(f"Pairs of methods with the same budget, {name}", head, rows, clear=clear)
    return f'{table}\n<p class="note">{html.text(note)}</p>'


def _critical(section: Section) -> str:
    groups = {
        name: group["critical_footprint"]
        for name, group in section.summary.items()
        if name in (ALL, *section.tasks)
    }
    methods = list(groups[ALL])
    if not methods:
        return ""
    rows = [
        [
            "all samples" if name == ALL else name,
            *("none" if found[one] is None else f"{100 * found[one]:.1f}" for one in methods),
        ]
        for name, found in groups.items()
    ]
    caption = (
        f"Smallest KV memory, in % of the full cache's, with {SUFFICIENT:.0%} of its score; "
        "none: no budget of this run has it"
    )
    return html.table(caption, ["samples", *methods], rows)


def _losses(losses: Sequence[Loss]) -> Iterator[str]:
    if not losses:
        yield "<p>No sample was answered better with the full cache than with another.</p>"
        return
    yield (
        f"<p>The {len(losses):,} samples that lost most against the full cache, each with the "
        "method that lost most on it; at the same loss, the one that kept most.</p>"
    )
    for loss in losses:
        line = loss.line
        facts = ", ".join(f"{name} {html.plain(value)}" for name, value in line["facts"].items())
        head = f"{line['task']}, sample {html.plain(line['index'])}" + (facts and f" ({facts})")
        right = "".join(html.said(answer) for answer in line["answers"]) or html.said("")
        yield (
            f'<article class="loss"><h4>{html.text(head)}: '
            f"{_points(-loss.amount)} points</h4>\n<dl>"
            f"<dt>question</dt><dd>{html.said(line['question'].strip())}</dd>\n"
            f"<dt>right answers</dt><dd>{right}</dd></dl>\n"
            f'<div class="sides">{_side(line, FULL)}\n{_side(line, loss.arm)}</div></article>'
        )


def _side(line: Mapping[str, Any], arm: str) -> str:
    given = line["arms"][arm]
    told = f"{arm}: score {100 * given['score']:.1f}%"
    return f"<dl><dt>{html.text(told)}</dt><dd>{html.said(given['text'])}</dd></dl>"


def _parameters(section: Section) -> Iterator[str]:
    asked = {name: value for name, value in section.asked.items() if name != "arms"}
    settings = asked.pop("settings", {})
    rows = [[name, _value(value)] for name, value in asked.items()]
    if isinstance(settings, dict):
        rows += [[f"settings: {name}", _value(value)] for name, value in settings.items()]
    yield html.table("What was asked for", ["parameter", "value"], rows, words=True)
    for number, told in enumerate(section.circumstances, 1):
        rows = []
        for name, value in told.items():
            inner = value if isinstance(value, dict) else {"": value}
            rows += [[f"{name}: {key}".rstrip(": "), _value(one)] for key, one in inner.items()]
        of = f", {number} of {len(section.circumstances)}" if len(section.circumstances) > 1 else ""
        yield html.table(f"Versions and machine{of}", ["parameter", "value"], rows, words=True)
    names = list(dict.fromkeys(name for p in section.arms.values() for name in p))
    rows = [
        [arm, *(_value(parameters.get(name)) for name in names)]
        for arm, parameters in section.arms.items()
    ]
    yield html.table("Methods with all their options", ["name", *names], rows)


def _value(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else html.plain(value)


def _percent(told: Mapping[str, Any], value: str, interval: str) -> str:
    low, high = told[interval]
    return f"{100 * told[value]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _difference(told: Mapping[str, Any]) -> str:
    low, high = told["difference_interval"]
    return f"{_points(told['difference'])} ({_points(low)} to {_points(high)})"


def _points(value: float) -> str:
    """Format a difference in points, with its sign unless it is 0."""
    told = f"{100 * value:+z.1f}"
    return told if float(told) else "0.0"
