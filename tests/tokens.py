"""Prompts of evaluations: ways to count their tokens, and whether they read as RULER's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pyramidkv.evaluation.data_files import load_ruler
from pyramidkv.evaluation.sample import Sample
from pyramidkv.prompts import PromptFormat


def count_words(context: str, question: str, answer_prefix: str) -> int:
    """A tokenizer of whole words, without a tokenizer."""
    return len(f"{context} {question} {answer_prefix}".split())


def measure_with(
    tokenizer: PreTrainedTokenizerBase, chat: bool | None = None
) -> Callable[[str, str, str], int]:
    """Count what a model is given: through the chat template, the answer begun."""
    form = PromptFormat.choose(tokenizer, chat)

    def measure(context: str, question: str, answer_prefix: str) -> int:
        begun = form.encode(question, context)
        return len(begun) + len(tokenizer(answer_prefix, add_special_tokens=False)["input_ids"])

    return measure


def check_reads_as_official(sample: Sample, folder: Path) -> None:
    """Written as a file of RULER's generator, a sample must be taken apart at the same places."""
    line = {
        "input": sample.context + sample.question,
        "answer_prefix": sample.answer_prefix,
        "outputs": list(sample.answers),
        "length": sample.facts["length"],
    }
    path = folder / f"{sample.task}.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (read,) = load_ruler(path)
    assert (read.context, read.question) == (sample.context, sample.question)
    assert read.answer_prefix == sample.answer_prefix
    assert (read.metric, read.max_new_tokens) == (sample.metric, sample.max_new_tokens)
    assert read.answers == sample.answers
