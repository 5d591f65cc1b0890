"""What a report tells about runs: their samples put together, figures, and the worst losses.

Like `folders.py` this imports no torch; the page itself is made in `report_page.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any

from ..compression import without_amount
from .folders import EvaluationError, read_all_settings, read_places, sample_key
from .summary import FULL, asked_length, summarise

WORST = 10
"""Losses that are shown at most."""

_FIGURES = (
    "score",
    "kept_tokens",
    "kept_bytes",
    "compressed_tokens",
    "full_tokens",
    "footprint",
)
_MAY_DIFFER = ("agnostic", "arms")
"""What two sections of one page may differ in."""


@dataclass(frozen=True)
class Section:
    """One run, however many folders and shards it was cut into.

    Attributes:
        asked: what was asked for: see `runner.run`.
        circumstances: versions and machines of its shards, each once.
        lines: of the samples that are done, each once, in the run's order; of a sample that was
            answered twice, the first.
        repeated: lines left out because their sample had one already.
        summary: see `summary.summarise`.
    """

    asked: dict[str, Any]
    circumstances: list[dict[str, Any]]
    lines: list[dict[str, Any]]
    repeated: int
    summary: dict[str, Any]

    @property
    def arms(self) -> dict[str, dict[str, Any]]:
        """Parameters of each arm's compression, by its name."""
        arms: dict[str, dict[str, Any]] = self.asked["arms"]
        return arms

    @property
    def tasks(self) -> list[str]:
        """Tasks of the samples, in the run's order."""
        return list(dict.fromkeys(line["task"] for line in self.lines))


@dataclass(frozen=True)
class Loss:
    """A sample that the full cache answered better than an arm."""

    line: dict[str, Any]
    arm: str
    amount: float


def read_sections(folders: Iterable[Path]) -> list[Section]:
    """Return the run that these folders hold, or a query-aware and a query-agnostic one of it.

    Raises:
        EvaluationError: a folder has no run, or none of its samples is done, or they are of
            different runs.
    """
    given = list({folder.resolve(): folder for folder in folders}.values())
    settings = {folder: _read_settings(folder) for folder in given}
    first = given[0]
    of_kind: dict[bool, list[Path]] = {}
    for folder in given:
        asked = settings[folder][0]["asked"]
        _refuse_other(folder, first, settings, _MAY_DIFFER)
        kind = of_kind.setdefault(asked["agnostic"], [])
        kind.append(folder)
        _refuse_other(folder, kind[0], settings, ())
    return [_section(of_kind[kind], settings) for kind in sorted(of_kind)]


def _read_settings(folder: Path) -> list[dict[str, Any]]:
    found = read_all_settings(folder)
    asked = found[0]["asked"]
    for name, kind in (("model", str), ("arms", dict), ("agnostic", bool), ("samples", int)):
        if not isinstance(asked.get(name), kind):
            raise EvaluationError(
                f"the run in {str(folder)!r} does not say its {name}, which a report needs; answer "
                "its samples again with `pyramidkv eval`"
            )
    return found


def _refuse_other(
    folder: Path, other: Path, settings: Mapping[Path, list[dict[str, Any]]], but: Sequence[str]
) -> None:
    one, two = (settings[path][0]["asked"] for path in (folder, other))
    names = sorted({*one, *two} - set(but))
    differing = [name for name in names if one.get(name) != two.get(name)]
    if differing:
        raise EvaluationError(
            f"{str(folder)!r} holds another run than {str(other)!r}: it differs in "
            f"{', '.join(differing)}; make a report of each"
        )


def _section(folders: Sequence[Path], settings: Mapping[Path, list[dict[str, Any]]]) -> Section:
    asked = settings[folders[0]][0]["asked"]
    circumstances: list[dict[str, Any]] = []
    for folder in folders:
        for found in settings[folder]:
            told = {name: value for name, value in found.items() if name != "asked"}
            if told not in circumstances:
                circumstances.append(told)
    placed: list[tuple[int, dict[str, Any]]] = []
    for folder in folders:
        for place, line in read_places(folder):
            _check_line(line, asked["arms"], folder)
            placed.append((place, line))
    placed.sort(key=lambda one: one[0])
    first: dict[str, dict[str, Any]] = {}
    for _, line in placed:
        first.setdefault(sample_key(line), line)
    lines = list(first.values())
    if not lines:
        raise EvaluationError(
            f"none of the samples of the run in {str(folders[0])!r} is done yet; let "
            "`pyramidkv eval` answer some first"
        )
    repeated = len(placed) - len(lines)
    return Section(asked, circumstances, lines, repeated, summarise(lines, asked["arms"]))


def _check_line(line: Mapping[str, Any], arms: Iterable[str], folder: Path) -> None:
    """Refuse a line that lacks what a report tells."""
    try:
        given = line["arms"]
        texts = [line["task"], line["question"], *line["answers"]]
        texts += [given[arm]["text"] for arm in arms]
        figures = [given[arm][name] for arm in arms for name in _FIGURES]
        whole = isinstance(line["facts"], dict) and "index" in line
    except (KeyError, TypeError, IndexError) as error:
        raise _unusable(folder, f"it lacks {error}") from None
    if not (whole and all(isinstance(text, str) for text in texts)):
        raise _unusable(folder, "its texts or facts are none")
    if not all(isinstance(figure, Real) for figure in figures):
        raise _unusable(folder, "its figures are none")


def _unusable(folder: Path, why: str) -> EvaluationError:
    return EvaluationError(
        f"a sample of the run in {str(folder)!r} cannot be used: {why}; answer it again with "
        "`pyramidkv eval`"
    )


def series(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the arms of each method and allocation but the full cache, whatever they keep."""
    result: dict[str, list[str]] = {}
    for arm, parameters in arms.items():
        if arm != FULL:
            result.setdefault(without_amount(arm, parameters), []).append(arm)
    return result


def needle_means(
    lines: Iterable[Mapping[str, Any]], arms: Iterable[str]
) -> dict[str, dict[tuple[float, float], float]]:
    """Return each arm's mean score by (depth, length), of the samples that have both.

    Returns:
        nothing, if no sample has both.
    """
    cells: dict[Any, list[Mapping[str, Any]]] = {}
    for line in lines:
        place = line["facts"].get("depth"), asked_length(line)
        if all(isinstance(value, Real) for value in place):
            cells.setdefault(place, []).append(line["arms"])
    if not cells:
        return {}
    return {
        arm: {
            place: sum(given[arm]["score"] for given in found) / len(found)
            for place, found in sorted(cells.items())
        }
        for arm in arms
    }


def worst_losses(section: Section, most: int = WORST) -> list[Loss]:
    """Return the samples that lost most against the full cache, each with its worst arm.

    Of arms that lost the same it is the one that kept most; of samples that lost the same, those
    whose arm kept most come first, and of the tasks in turn.
    """
    if FULL not in section.arms:
        return []
    found = [loss for line in section.lines if (loss := _worst(line, section.arms)) is not None]
    found.sort(key=_severity)
    result: list[Loss] = []
    for _, level in groupby(found, key=_severity):
        result += _in_turn(list(level))
    return result[:most]


def _severity(loss: Loss) -> tuple[float, float]:
    return -loss.amount, -loss.line["arms"][loss.arm]["footprint"]


def _worst(line: dict[str, Any], arms: Iterable[str]) -> Loss | None:
    best = line["arms"][FULL]["score"]
    losses = [Loss(line, arm, best - line["arms"][arm]["score"]) for arm in arms if arm != FULL]
    worst = min(losses, key=_severity, default=None)
    return worst if worst is not None and worst.amount > 0 else None


def _in_turn(losses: Sequence[Loss]) -> list[Loss]:
    """Return these losses with one of each task before a second one of any."""
    seen: dict[str, int] = {}
    turns = []
    for loss in losses:
        task = loss.line["task"]
        turns.append(seen.get(task, 0))
        seen[task] = turns[-1] + 1
    order = sorted(range(len(losses)), key=lambda index: turns[index])
    return [losses[index] for index in order]
