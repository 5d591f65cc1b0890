"""Runs of an evaluation: every sample answered by every arm, written as it comes, resumable.

A run is a folder. `run.json` (or `run-2-of-5.json`, of a shard) says what was asked for; beside it
`samples.jsonl` has a line for each sample that is done, with the answers of all arms. A line is
written whole or, if the machine stops, cut off at the end of the file: the next start drops it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..compression import Compression, describe_method
from ..errors import PyramidKVError
from ..measure import machine, versions
from ..prompts import context_length
from ..records import read_json_object, write_json
from .answers import Answer, answer_sample, encode_sample
from .metrics import score_sample
from .sample import Sample

MAX_SETTINGS_BYTES = 64 * 2**20


class EvaluationError(PyramidKVError):
    """A run that cannot be made or gone on with; the message says why."""


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


def name_arms(compressions: Sequence[Compression]) -> dict[str, Compression]:
    """Return compressions by what reports call them.

    Raises:
        EvaluationError: two have the same name.
    """
    arms: dict[str, Compression] = {}
    for compression in compressions:
        name = describe_method(compression.parameters())
        if name in arms:
            raise EvaluationError(f"{name} is given twice; give each method and budget once")
        arms[name] = compression
    return arms


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    arms: Mapping[str, Compression],
    folder: Path,
    *,
    agnostic: bool = False,
    limit: int | None = None,
    shard: Shard | None = None,
    settings: Mapping[str, Any] | None = None,
    on_sample: Callable[[int, int], None] | None = None,
) -> None:
    """Answer every sample with every arm; what the folder has already is not done again.

    Args:
        model, tokenizer: from transformers.
        samples: all of the run, in an order that is always the same.
        arms: by name: see `name_arms`.
        folder: made if it is not there.
        agnostic: compress each context before its question is known.
        limit: the most tokens of a prompt and its answer; by default the model's context.
        shard: the part of the samples to answer; by default all.
        settings: what else the samples depend on, for the record; plain values.
        on_sample: called with (samples done, samples of this shard).

    Raises:
        EvaluationError: the folder holds another run, or cannot be written.
        PyramidKVError: a sample does not fit the model.
    """
    shard = shard or Shard()
    limit = context_length(model.config) if limit is None else limit
    asked = {
        "model": model.config._name_or_path,
        "dtype": str(model.dtype).removeprefix("torch."),
        "arms": {name: compression.parameters() for name, compression in arms.items()},
        "agnostic": agnostic,
        "limit": limit,
        "samples": len(samples),
        "content": _content(samples),
        "settings": dict(settings or {}),
    }
    _settle(folder, shard, asked, {"versions": versions(), "machine": machine(model.device)})
    path = folder / shard.file("samples.jsonl")
    done = {_key(line) for line in _repair(path)}
    mine = [sample for place, sample in enumerate(samples) if shard.has(place)]
    finished = 0
    with path.open("a", encoding="utf-8") as file:
        for sample in mine:
            if _key(asdict(sample)) not in done:
                line = answer(model, tokenizer, sample, arms, agnostic, limit)
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            finished += 1
            if on_sample is not None:
                on_sample(finished, len(mine))


def answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sample: Sample,
    arms: Mapping[str, Compression],
    agnostic: bool,
    limit: int | None,
) -> dict[str, Any]:
    """Answer one sample with every arm; returns its line as plain values."""
    prompt = encode_sample(tokenizer, sample, limit)
    answers = answer_sample(
        model,
        tokenizer,
        prompt,
        list(arms.values()),
        sample.max_new_tokens,
        agnostic=agnostic,
    )
    return {
        "task": sample.task,
        "index": sample.index,
        "facts": sample.facts,
        "question": sample.question,
        "answers": list(sample.answers),
        "metric": sample.metric,
        "prompt_tokens": len(prompt.ids),
        "context_tokens": prompt.context_tokens,
        "dropped_tokens": prompt.dropped,
        "arms": {name: _describe(given, sample) for name, given in zip(arms, answers, strict=True)},
    }


def _describe(given: Answer, sample: Sample) -> dict[str, Any]:
    return {
        "text": given.text,
        "score": score_sample(sample, given.text),
        "generated_tokens": len(given.token_ids),
        "kept_tokens": sum(given.kept),
        "kept_bytes": given.kept_bytes,
        "compressed_tokens": given.prompt_tokens,
        "full_tokens": given.prompt_tokens * len(given.kept),
        "footprint": given.footprint,
    }


def read_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's folder, of all its shards; those cut off are left out.

    Raises:
        EvaluationError: there is no run in it.
    """
    files = sorted(folder.glob("samples*.jsonl"))
    if not files:
        raise EvaluationError(f"there is no run in {str(folder)!r}: it has no samples.jsonl")
    for file in files:
        yield from _read(file)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what a run's folder was asked for.

    Raises:
        EvaluationError: there is no run in it, or its shards are of different runs.
    """
    files = sorted(folder.glob("run*.json"))
    if not files:
        raise EvaluationError(f"there is no run in {str(folder)!r}: it has no run.json")
    found = [_settings(file) for file in files]
    for file, other in zip(files, found, strict=True):
        if other["asked"] != found[0]["asked"]:
            raise EvaluationError(f"{str(file)!r} and {str(files[0])!r} are of different runs")
    return found[0]


def _settle(
    folder: Path, shard: Shard, asked: dict[str, Any], circumstances: dict[str, Any]
) -> None:
    """Note what is asked for, or check that it is what the folder is about."""
    asked = json.loads(json.dumps(asked))
    path = folder / shard.file("run.json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"cannot make {str(folder)!r}: {error.strerror}") from None
    others = [file for file in sorted(folder.glob("run*.json")) if file != path]
    for file in [path, *others] if path.exists() else others:
        known = _settings(file)["asked"]
        differing = sorted(key for key in asked if known.get(key) != asked[key])
        if differing:
            raise EvaluationError(
                f"{str(folder)!r} holds another run: it differs in {', '.join(differing)}; go on "
                "with the same settings, or name another folder"
            )
    if not path.exists():
        try:
            write_json(path, {"asked": asked, **circumstances})
        except OSError as error:
            raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _settings(path: Path) -> dict[str, Any]:
    try:
        value = read_json_object(path, MAX_SETTINGS_BYTES)
    except (OSError, ValueError) as error:
        raise EvaluationError(f"{str(path)!r} cannot be used: {error}") from None
    if not isinstance(value.get("asked"), dict):
        raise EvaluationError(f"{str(path)!r} does not say what was asked for")
    return value


def _content(samples: Sequence[Sample]) -> str:
    """Return what tells different samples apart."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True).encode())
    return digest.hexdigest()


def _key(line: Mapping[str, Any]) -> str:
    """Return what tells samples of a run apart."""
    return json.dumps([line["task"], line["index"], line["facts"]], sort_keys=True)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                return  # cut off
            yield json.loads(raw)


def _repair(path: Path) -> list[dict[str, Any]]:
    """Return a file's lines, after dropping one that was cut off at its end."""
    if not path.exists():
        return []
    lines = list(_read(path))
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return lines
