"""What a run's answers amount to: means with paired bootstrap intervals, and critical footprints.

All arms answered the same samples, so that differences are taken sample by sample: they are much
surer than the means themselves. Samples that were generated at several lengths ask the same about
the same needles; they are drawn together. This module needs numpy, not torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compression import without_amount

RESAMPLES = 2_000
CONFIDENCE = 0.95
SUFFICIENT = 0.9
"""Part of the full cache's score that a method must keep for its footprint to be critical."""

FULL = "full"


def summarise(
    lines: Iterable[Mapping[str, Any]], arms: Mapping[str, Mapping[str, Any]], seed: int = 0
) -> dict[str, Any]:
    """Return the summary of a run.

    Args:
        lines: of the run's samples: see `runner.read_lines`.
        arms: parameters of each arm's compression, by its name.
        seed: of the bootstrap.

    Returns:
        plain values: `groups`, one for all samples and one for each task (and length, where samples
        have one), each with `samples`, and for every arm `score`, its `interval`, `kept_tokens`
        (per layer and KV head), `kept_bytes`, `footprint`, and against the full cache, if that is
        an arm, `difference` with its `difference_interval`; `pairs`, which compares methods of the
        same budget; and `critical_footprint` by method.
    """
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        for name in _groups_of(line):
            grouped.setdefault(name, []).append(line)
    return {name: _summarise(group, arms, seed) for name, group in grouped.items()}


def _groups_of(line: Mapping[str, Any]) -> list[str]:
    names = ["all", line["task"]]
    length = asked_length(line)
    if length is not None:
        names.append(f"{line['task']}, {length:,} tokens")
    return list(dict.fromkeys(names))


def asked_length(line: Mapping[str, Any]) -> int | None:
    """Return the length that a sample was generated at, if it was generated."""
    facts = line["facts"]
    return facts["length"] if "tokens" in facts and "length" in facts else None


def _summarise(
    lines: Sequence[Mapping[str, Any]], arms: Mapping[str, Mapping[str, Any]], seed: int
) -> dict[str, Any]:
    chosen = _Resamples.of(lines, seed)
    scores = {name: _column(lines, name, "score") for name in arms}
    described = {}
    for name in arms:
        layers = _column(lines, name, "full_tokens") / _prompts(lines, name)
        described[name] = {
            "score": float(scores[name].mean()),
            "interval": _interval(scores[name], chosen),
            "kept_tokens": float((_column(lines, name, "kept_tokens") / layers).mean()),
            "kept_bytes": float(_column(lines, name, "kept_bytes").mean()),
            "footprint": float(_column(lines, name, "footprint").mean()),
        }
        if FULL in arms and name != FULL:
            change = scores[name] - scores[FULL]
            described[name] |= {
                "difference": float(change.mean()),
                "difference_interval": _interval(change, chosen),
            }
    return {
        "samples": len(lines),
        "arms": described,
        "pairs": _pairs(scores, arms, chosen),
        "critical_footprint": _critical(described, arms),
    }


def _column(lines: Sequence[Mapping[str, Any]], arm: str, what: str) -> NDArray[np.float64]:
    return np.array([line["arms"][arm][what] for line in lines], dtype=np.float64)


def _prompts(lines: Sequence[Mapping[str, Any]], arm: str) -> NDArray[np.float64]:
    """Return the tokens that were compressed of each sample."""
    return np.array([line["arms"][arm]["compressed_tokens"] for line in lines], dtype=np.float64)


@dataclass(frozen=True)
class _Resamples:
    """What each repetition of the bootstrap draws, the same for all arms.

    Attributes:
        draw: int64 `[samples]`, which independent draw each sample belongs to.
        chosen: int64 `[repetitions, draws]`.
    """

    draw: NDArray[np.int64]
    chosen: NDArray[np.int64]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], seed: int) -> _Resamples:
        numbers: dict[Any, int] = {}
        draw = [numbers.setdefault(key, len(numbers)) for key in _draws(lines)]
        size = (RESAMPLES, len(numbers))
        return cls(np.array(draw), np.random.default_rng(seed).integers(0, len(numbers), size))

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the mean of each repetition's samples."""
        sums = np.bincount(self.draw, weights=values)[self.chosen].sum(axis=1)
        means: NDArray[np.float64] = sums / self._samples
        return means

    @cached_property
    def _samples(self) -> NDArray[np.int64]:
        """How many samples each repetition has."""
        samples: NDArray[np.int64] = np.bincount(self.draw)[self.chosen].sum(axis=1)
        return samples


def _draws(lines: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield for each sample what it has in common with those that differ in length alone."""
    seen: Counter[Any] = Counter()
    for number, line in enumerate(lines):
        length = asked_length(line)
        if length is None:
            yield number
            continue
        asked = (line["task"], line["question"], *line["answers"])
        yield asked, seen[length, asked]  # of the same length, the same words are another sample
        seen[length, asked] += 1


def _interval(values: NDArray[np.float64], chosen: _Resamples) -> list[float]:
    """Return the percentile interval of the mean."""
    means = chosen.means(values)
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [outside, 1 - outside])
    return [float(low), float(high)]


def _pairs(
    scores: Mapping[str, NDArray[np.float64]],
    arms: Mapping[str, Mapping[str, Any]],
    chosen: _Resamples,
) -> list[dict[str, Any]]:
    """Compare arms of the same budget or ratio, each pair once."""
    result = []
    names = [name for name in arms if name != FULL]
    for place, first in enumerate(names):
        for second in names[place + 1 :]:
            amounts = [(arms[n]["budget"], arms[n]["compression_ratio"]) for n in (first, second)]
            if amounts[0] != amounts[1]:
                continue
            change = scores[first] - scores[second]
            result.append(
                {
                    "first": first,
                    "second": second,
                    "difference": float(change.mean()),
                    "difference_interval": _interval(change, chosen),
                }
            )
    return result


def differences_of(group: Mapping[str, Any], arm: str) -> dict[str, dict[str, Any]]:
    """Return how an arm differs from each it was paired with: the other arm's pairs turned round.

    Args:
        group: of a summary.
        arm: whose differences are wanted.

    Returns:
        by the other arm's name, `difference` and `interval`; positive where `arm` is better.
    """
    result: dict[str, dict[str, Any]] = {}
    for pair in group["pairs"]:
        value, (low, high) = pair["difference"], pair["difference_interval"]
        if pair["first"] == arm:
            result[pair["second"]] = {"difference": value, "interval": (low, high)}
        elif pair["second"] == arm:
            result[pair["first"]] = {"difference": -value, "interval": (-high, -low)}
    return result


def _critical(
    described: Mapping[str, Mapping[str, Any]], arms: Mapping[str, Mapping[str, Any]]
) -> dict[str, float | None]:
    """Return each method's smallest footprint that keeps enough of the full cache's score.

    None: no budget of the run is enough, or the full cache itself was not an arm or has no score.
    """
    if FULL not in arms:
        return {}
    wanted = SUFFICIENT * described[FULL]["score"]
    result: dict[str, float | None] = {}
    for name, parameters in arms.items():
        if name == FULL:
            continue
        method = without_amount(name, parameters)
        enough = wanted > 0 and described[name]["score"] >= wanted
        best = result.setdefault(method, None)
        if enough and (best is None or described[name]["footprint"] < best):
            result[method] = float(described[name]["footprint"])
    return result
