"""A run's folder: which files it has and what they say.

`run.json` (or `run-2-of-5.json`, of a shard) says what was asked for; beside it `samples.jsonl` has
a line for each sample that is done. This module imports no torch, so that reports start quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PyramidKVError
from ..records import parse_json, read_json_object

MAX_SETTINGS_BYTES = 64 * 2**20
_SHARD_FILE = re.compile(r"samples-([0-9]+)-of-([0-9]+)\.jsonl")


class EvaluationError(PyramidKVError):
    """A run that cannot be made, gone on with or read; the message says why."""


@dataclass(frozen=True)
class Shard:
    """Every `count`-th sample, from number `number` (1 is the first) on."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise EvaluationError(
                f"the shard is {self.number}/{self.count}; give I/N with I from 1 to N"
            )

    def has(self, place: int) -> bool:
        """Say whether the sample at this place of the whole run, from 0, belongs to the shard."""
        return place % self.count == self.number - 1

    def file(self, name: str) -> str:
        """Return a file's name, with the shard in it if there are several."""
        stem, _, suffix = name.partition(".")
        return name if self.count == 1 else f"{stem}-{self.number}-of-{self.count}.{suffix}"


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's folder, of all its shards; those cut off are left out.

    They come in the order of the run's samples, however many shards it was cut into.

    Raises:
        EvaluationError: there is no run in it, or a line is not JSON.
    """
    for _, line in sorted(read_places(folder), key=lambda placed: placed[0]):
        yield line


def read_places(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a run's folder, each with its sample's place in the run, from 0.

    A shard is answered in order, so that a line's number in its file tells the place.

    Raises:
        EvaluationError: there is no run in it, or a line is not JSON.
    """
    files = sorted(folder.glob("samples*.jsonl"))
    if not files:
        raise EvaluationError(f"there is no run in {str(folder)!r}: it has no samples.jsonl")
    for file in files:
        found = _SHARD_FILE.fullmatch(file.name)
        number, count = (int(found[1]), int(found[2])) if found else (1, 1)
        for row, line in enumerate(read_file(file)):
            yield row * count + number - 1, line


def read_file(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of one file, up to one that was cut off at its end.

    Raises:
        EvaluationError: it cannot be read, or a line is no JSON object.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    return  # cut off
                yield _object(raw, path, number)
    except OSError as error:
        raise EvaluationError(f"cannot read {str(path)!r}: {error.strerror}") from None


def _object(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        line = parse_json(raw)
    except ValueError as error:
        raise EvaluationError(
            f"line {number:,} of {str(path)!r} {error}; take it out, and its sample will be "
            "answered again"
        ) from None
    if not isinstance(line, dict):
        raise EvaluationError(
            f"line {number:,} of {str(path)!r} holds a JSON {type(line).__name__}, not an object; "
            "take it out, and its sample will be answered again"
        )
    return line


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what a run's folder was asked for, and the circumstances of its first shard.

    Raises:
        EvaluationError: there is no run in it, or its shards are of different runs.
    """
    return read_all_settings(folder)[0]


def read_all_settings(folder: Path) -> list[dict[str, Any]]:
    """Return the settings of all shards of a run's folder.

    Raises:
        EvaluationError: there is no run in it, or its shards are of different runs.
    """
    files = sorted(folder.glob("run*.json"))
    if not files:
        raise EvaluationError(f"there is no run in {str(folder)!r}: it has no run.json")
    found = [read_settings_file(file) for file in files]
    for file, other in zip(files, found, strict=True):
        if other["asked"] != found[0]["asked"]:
            raise EvaluationError(f"{str(file)!r} and {str(files[0])!r} are of different runs")
    return found


def read_settings_file(path: Path) -> dict[str, Any]:
    """Return what a shard's file says.

    Raises:
        EvaluationError: it cannot be read, or does not say what was asked for.
    """
    try:
        value = read_json_object(path, MAX_SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{str(path)!r} cannot be used: {error}") from None
    if not isinstance(value.get("asked"), dict):
        raise EvaluationError(f"{str(path)!r} does not say what was asked for")
    return value


def sample_key(line: Mapping[str, Any]) -> str:
    """Return what tells samples of a run apart."""
    return json.dumps([line["task"], line["index"], line["facts"]], sort_keys=True)
