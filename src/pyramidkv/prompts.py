"""From texts to the tokens a model was trained on: chat templates, turns, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from .errors import PromptError

SMALLEST_TEMPERATURE = 1e-6
"""Below it, logits divided by the temperature overflow."""

_PROBES = ("What", "1", "é", "我")
"""Beginnings of questions that fall into different classes of every tokenizer's rules."""


@dataclass(frozen=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class PromptFormat:
    """How texts become tokens: through a chat template or as they are.

    Attributes:
        separator: what stands between a context and the question behind it.

    Raises:
        PromptError: a template is asked for and the tokenizer has none.
    """

    tokenizer: PreTrainedTokenizerBase
    chat: bool
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        if self.chat and self.tokenizer.chat_template is None:
            raise PromptError("this model's tokenizer has no chat template; use --no-chat")

    @classmethod
    def choose(cls, tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> PromptFormat:
        """Return the format that is asked for; None: a chat template if there is one."""
        check_tokenizer(tokenizer)
        if chat is not None and type(chat) is not bool:
            raise PromptError(f"chat is {chat!r}; it is True, False or None")
        return cls(tokenizer, tokenizer.chat_template is not None if chat is None else chat)

    def encode(self, question: str, context: str = "", turns: Sequence[Turn] = ()) -> list[int]:
        """Return the tokens of a conversation that ends with a question.

        The context stands before the first question, in the same message.
        """
        return list(self._tokenize(self._render(question, context, turns))["input_ids"])

    def encode_context(self, context: str) -> list[int]:
        """Return the tokens that every conversation about a context begins with.

        A token may span the place where the question begins, and how the context's end is cut
        may depend on what follows: these are the tokens that different questions have in common.
        """
        texts = [self._render(probe, context) for probe in _PROBES]
        fast = self.tokenizer.is_fast
        encoded = self._tokenize(texts[0], return_offsets_mapping=fast)
        first = list(encoded["input_ids"])
        others = [list(self._tokenize(text)["input_ids"]) for text in texts[1:]]
        count = min(common_prefix(first, other) for other in others)
        if fast:  # different probes may all be the same unknown token
            shared = min(common_prefix(texts[0], text) for text in texts[1:])
            ends = [end for _, end in encoded["offset_mapping"]]
            while count and ends[count - 1] > shared:
                count -= 1
        return first[:count]

    def _render(self, question: str, context: str, turns: Sequence[Turn] = ()) -> str:
        texts = [text for turn in turns for text in (turn.question, turn.answer)] + [question]
        if context:
            texts[0] = f"{context}{self.separator}{texts[0]}"
        if not self.chat:
            return "\n\n".join(texts)
        messages = [
            {"role": "assistant" if index % 2 else "user", "content": text}
            for index, text in enumerate(texts)
        ]
        rendered: str = self.tokenizer.apply_chat_template(  # type: ignore[assignment]
            messages, add_generation_prompt=True, tokenize=False
        )
        return rendered

    def _tokenize(self, text: str, **options: Any) -> Any:
        return self.tokenizer(text, add_special_tokens=not self.chat, verbose=False, **options)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    chat: bool | None = None,
    context_length: int | None = None,
    max_new_tokens: int = 0,
) -> Tensor:
    """Return the prompt's token ids, `[1, tokens]`.

    Args:
        prompt: the user's text.
        chat: put it into the model's chat template; by default if the tokenizer has one.
        context_length: the most tokens the model takes, generated ones included.
        max_new_tokens: tokens that are to be generated.

    Raises:
        PromptError: the prompt is empty or too long, or there is no chat template.
    """
    check_text(prompt, "prompt")
    ids = PromptFormat.choose(tokenizer, chat).encode(prompt)
    check_length(len(ids), context_length, max_new_tokens)
    return torch.tensor([ids])


def check_tokenizer(tokenizer: object) -> None:
    """Raise `PromptError` if this is no tokenizer."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise PromptError(
            f"the tokenizer is a {type(tokenizer).__name__}; give one loaded by transformers"
        )


def check_text(text: str, what: str) -> None:
    """Raise `PromptError` if a text is empty or cannot be encoded."""
    if not isinstance(text, str):
        raise PromptError(f"the {what} is a {type(text).__name__}; give a text")
    if not text.strip():
        raise PromptError(f"the {what} is empty; give some text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the {what} is no valid text (character {error.start}); give it in UTF-8"
        ) from None


def check_length(tokens: int, context_length: int | None, max_new_tokens: int) -> None:
    """Raise `PromptError` if a prompt and what is to be generated exceed the model's context."""
    if context_length is not None and tokens + max_new_tokens > context_length:
        raise PromptError(
            f"the prompt has {tokens:,} tokens and {max_new_tokens:,} are to be generated, "
            f"but this model's context is {context_length:,} tokens; shorten the prompt or "
            "generate less"
        )


def check_settings(max_new_tokens: int, temperature: float) -> None:
    """Raise `PromptError` if nothing is to be generated or the temperature is none."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise PromptError(f"max_new_tokens is {max_new_tokens!r}; it must be at least 1")
    if type(temperature) not in (int, float) or not (
        temperature == 0 or SMALLEST_TEMPERATURE <= temperature < float("inf")
    ):
        raise PromptError(
            f"temperature is {temperature!r}; it must be 0 or a positive number of at least "
            f"{SMALLEST_TEMPERATURE}"
        )


def check_chunk(prefill_chunk: int | None) -> None:
    """Raise `PromptError` if a prompt cannot be processed in pieces of this many tokens."""
    if prefill_chunk is not None and (type(prefill_chunk) is not int or prefill_chunk < 1):
        raise PromptError(f"prefill_chunk is {prefill_chunk!r}; it must be at least 1 token")


def context_length(config: PreTrainedConfig) -> int | None:
    """Return the most tokens a model takes, or None if its configuration does not say."""
    length = getattr(config, "max_position_embeddings", None)
    return None if length is None else int(length)


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return after how many items two lists or texts part; the shorter's length if they do not."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is much faster than a loop over items
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
