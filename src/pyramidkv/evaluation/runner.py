"""Runs of an evaluation: every sample answered by every arm, written as it comes, resumable.

A run is a folder (see `folders.py`) with a line for each sample that is done, which has the answers
of all arms. A line is written whole or, if the machine stops, cut off at the end of the file: the
next start drops it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..budgets import whole
from ..compression import Compression, describe_method
from ..measure import machine, versions
from ..prompts import context_length
from ..records import write_json
from .answers import Answer, answer_sample, encode_sample
from .folders import EvaluationError, Shard, read_file, read_settings_file, sample_key
from .metrics import score_sample
from .sample import Sample


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
        on_sample: called with (samples done, samples of this shard): once at the start, then after
            each that is answered.

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
    done = {sample_key(line) for line in _repair(path)}
    mine = [sample for place, sample in enumerate(samples) if shard.has(place)]
    waiting = [sample for sample in mine if sample_key(asdict(sample)) not in done]
    on_sample = on_sample or (lambda *counts: None)
    on_sample(len(mine) - len(waiting), len(mine))
    with path.open("a", encoding="utf-8") as file:
        for left, sample in zip(reversed(range(len(waiting))), waiting, strict=True):
            line = answer(model, tokenizer, sample, arms, agnostic, limit)
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
            on_sample(len(mine) - left, len(mine))


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
        "kept_tokens": whole(sum(given.kept)),
        "kept_bytes": given.kept_bytes,
        "compressed_tokens": given.prompt_tokens,
        "full_tokens": given.prompt_tokens * len(given.kept),
        "footprint": given.footprint,
    }


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
        known = read_settings_file(file)["asked"]
        if differing := _differing(known, asked):
            raise EvaluationError(
                f"{str(folder)!r} holds another run: it differs in {', '.join(differing)}; go on "
                "with the same settings, or name another folder"
            )
    if not path.exists():
        try:
            write_json(path, {"asked": asked, **circumstances})
        except OSError as error:
            raise EvaluationError(f"cannot write {str(path)!r}: {error.strerror}") from None


def _differing(known: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Name what is asked for otherwise than before; of the settings, each that is."""
    names = sorted(key for key in asked if known.get(key) != asked[key])
    if "settings" in names and isinstance(known.get("settings"), dict):
        old, new = known["settings"], asked["settings"]
        absent = object()
        inner = sorted(k for k in {*old, *new} if old.get(k, absent) != new.get(k, absent))
        names[names.index("settings")] = f"settings ({', '.join(inner)})"
    return names


def _content(samples: Sequence[Sample]) -> str:
    """Return what tells different samples apart."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(asdict(sample), sort_keys=True).encode())
    return digest.hexdigest()


def _repair(path: Path) -> list[dict[str, Any]]:
    """Return a file's lines, after dropping one that was cut off at its end."""
    if not path.exists():
        return []
    lines = list(read_file(path))
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return lines
