"""Compressions that may not keep certain tokens: to show that answers come from the kept ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..compression import Compression
from ..errors import PromptError
from ..method_options import MethodError
from ..methods import Method
from ..scores import Score

_SENTENCE_END = re.compile(r"[.!?;\n]")


@dataclass(frozen=True)
class Excluding:
    """A method's pooled scores, with some tokens behind all others.

    Pooled here, since neighbours would bring the tokens back if it were done afterwards.
    """

    method: Method
    score: Score
    tokens: tuple[int, ...]

    def query_count(self, prompt_length: int) -> int:
        return self.score.query_count(prompt_length)

    def __call__(self, queries: Tensor, keys: Tensor, *rest: Any, **more: Any) -> Tensor:
        scores, options = self.score(queries, keys, *rest, **more), self.method.options
        evictable = scores[..., options.sink_tokens : keys.shape[2] - options.window_size]
        evictable.copy_(options.make_pooling()(evictable))
        scores[..., list(self.tokens)] = float("-inf")
        return scores


def exclude(compression: Compression, tokens: Iterable[int], prompt_tokens: int) -> Compression:
    """Return the same compression, but which evicts these tokens of a prompt before all others.

    Args:
        compression: one that evicts, without a decode budget.
        tokens: their places in the prompt.
        prompt_tokens: how many the prompt has.

    Raises:
        MethodError: the method keeps every token, or there is a decode budget.
        PromptError: a token is always kept, since it is among the sinks or in the window.
    """
    method, places = compression.method, tuple(sorted(set(tokens)))
    score, options = method.build_score(), method.options
    if score is None:
        raise MethodError(f"{method.name} keeps every token, so none can be excluded")
    evictable = range(options.sink_tokens, prompt_tokens - options.window_size)
    for place in places:
        if place not in evictable:
            raise PromptError(
                f"token {place} cannot be excluded: the first {options.sink_tokens} and the last "
                f"{options.window_size} of {prompt_tokens} are always kept"
            )
    excluding = Excluding(method, score, places)
    unpooled = dataclasses.replace(options, kernel_size=1)
    changed = dataclasses.replace(
        method,
        options=unpooled,
        make_score=lambda _: excluding,
        supports=method.supports & {"measured budgets"},  # places are those of the whole prompt
    )
    return dataclasses.replace(compression, method=changed)


def sentence_tokens(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], value: str
) -> list[int]:
    """Return where the tokens of the sentence with a value's first occurrence stand in a prompt.

    Raises:
        PromptError: the value does not occur.
    """
    ids = list(ids)
    ends = [len(str(tokenizer.decode(ids[: count + 1]))) for count in range(len(ids))]
    text = str(tokenizer.decode(ids))
    if value not in text:
        raise PromptError(f"the prompt does not contain {value!r}")
    place = text.index(value)
    begin = max((end.end() for end in _SENTENCE_END.finditer(text, 0, place)), default=0)
    following = _SENTENCE_END.search(text, place)
    end = following.end() if following else len(text)
    starts = [0, *ends[:-1]]
    return [i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a < end and b > begin]
