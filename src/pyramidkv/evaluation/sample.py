"""What is asked and what counts as right, whatever the benchmark it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One question about one context.

    Attributes:
        task: such as `niah_single_1` or `multi_news`.
        index: its number within the task.
        context: the long text, instructions that stand before it included.
        question: what stands behind the context, instructions and the space before it included.
        answers: what counts as right; what several answers mean is up to the metric.
        metric: a name in `metrics.METRICS`.
        max_new_tokens: where an answer ends at the latest.
        answer_prefix: how the answer begins: given to the model, not scored.
        chat: whether the model's chat template is to be used (few-shot tasks are not put into one).
        classes: all possible answers of a classification task.
        stop_at_newline: only the answer's first line is scored.
        facts: what reports group by, such as length and depth; plain values.
    """

    task: str
    index: int
    context: str
    question: str
    answers: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    chat: bool = True
    classes: tuple[str, ...] = ()
    stop_at_newline: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
