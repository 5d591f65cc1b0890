"""Scores from outside of this package: what they return is checked before anything is chosen by it.

One with the wrong shape would keep the wrong tokens, one with NaN none that mean anything. The
check for NaN waits for the device, each time a layer is scored; this package's own scores go
unchecked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import scores
from .errors import PyramidKVError, raised_in
from .method_options import Options
from .scores import AccumulatingScore, Score


class ScoreError(PyramidKVError):
    """A score of the user's own that fails or does not return scores; the message says how."""


def build_score(method: str, make: Callable[[Options], Score], options: Options) -> Score:
    """Return a method's score, wrapped unless it is one of this package.

    Raises:
        ScoreError: it cannot be made, or cannot be used as a score.
    """
    with _told(method, "make_score", make):
        score = make(options)
    if type(score).__module__ == scores.__name__:
        return score
    if not callable(score) or not callable(getattr(score, "query_count", None)):
        raise ScoreError(
            f"make_score of {method} returned {score!r}; return a score, which has query_count and "
            "__call__"
        )
    try:
        hash(score)
    except TypeError:
        raise ScoreError(
            f"the score of {method} has no hash, by which equal scores are known; make its class a "
            "@dataclass(frozen=True) whose values have one"
        ) from None
    if isinstance(score, AccumulatingScore):
        return CheckedAccumulatingScore(score, method)
    return CheckedScore(score, method)


@dataclass(frozen=True)
class CheckedScore:
    """A score that is checked, equal to another one if what it wraps is.

    Attributes:
        score: from outside of this package.
        method: the name errors tell.
    """

    score: Score
    method: str = field(compare=False)

    def query_count(self, prompt_length: int) -> int:
        with _told(self.method, "query_count", self.score):
            count = self.score.query_count(prompt_length)
        if type(count) is not int or not 0 <= count <= prompt_length:
            raise ScoreError(
                f"query_count of {self.method} returned {count!r} for a prompt of {prompt_length} "
                "tokens; return a whole number from 0 to as many"
            )
        return count

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
    ) -> Tensor:
        with _told(self.method, "the score", self.score):
            result = self.score(queries, keys, values, valid, scale, softcap)
        return _checked(result, f"the score of {self.method}", tuple(keys.shape[:3]), keys.device)


@dataclass(frozen=True)
class CheckedAccumulatingScore(CheckedScore):
    """The same for a score made from sums over queries."""

    score: AccumulatingScore

    def accumulate(
        self,
        queries: Tensor,
        keys: Tensor,
        valid: Tensor | None,
        scale: float,
        softcap: float | None = None,
        earlier: Tensor | None = None,
    ) -> Tensor:
        with _told(self.method, "accumulate", self.score):
            result = self.score.accumulate(queries, keys, valid, scale, softcap, earlier)
        batch, kv_heads, tokens, _ = keys.shape
        shape = (batch, kv_heads, queries.shape[1] // kv_heads, tokens)
        return _checked(result, f"accumulate of {self.method}", shape, keys.device)

    def reduce(self, sums: Tensor) -> Tensor:
        with _told(self.method, "reduce", self.score):
            result = self.score.reduce(sums)
        shape = (*sums.shape[:2], sums.shape[3])
        return _checked(result, f"reduce of {self.method}", shape, sums.device)


@contextmanager
def _told(method: str, what: str, made_by: object) -> Iterator[None]:
    """Tell an error of the user's code in a sentence."""
    try:
        yield
    except (PyramidKVError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        home = made_by if hasattr(made_by, "__qualname__") else type(made_by)
        module = sys.modules.get(getattr(home, "__module__", ""))
        where = raised_in(error, getattr(module, "__file__", None))
        raise ScoreError(f"{what} of {method} raised {where}") from error


def _checked(result: Any, what: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if not isinstance(result, Tensor):
        raise ScoreError(f"{what} returned a {type(result).__name__}; return a float32 tensor")
    if tuple(result.shape) != shape:
        raise ScoreError(
            f"{what} returned the shape {tuple(result.shape)}; return {shape}, one number for each "
            "KV head and token"
        )
    if result.dtype != torch.float32 or result.device != device:
        got = f"{str(result.dtype).removeprefix('torch.')} on {result.device}"
        raise ScoreError(f"{what} returned {got}; return float32 on {device}")
    if bool(result.isnan().any()):
        raise ScoreError(
            f"{what} returned NaN; return numbers, such as minus infinity for what is not to stay"
        )
    return result
