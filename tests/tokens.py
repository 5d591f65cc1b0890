"""Ways to count the tokens of a prompt, as evaluation needs them."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

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
