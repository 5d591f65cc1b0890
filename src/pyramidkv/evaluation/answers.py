"""Answers to one sample from many compressions of its prompt, which is processed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..cache import CompressedCache
from ..compression import Compression
from ..errors import PromptError
from ..generation import decode, stop_tokens, until_stop
from ..many import competition, compress_many
from ..prompts import PromptFormat, common_prefix
from .sample import Sample

DONE_ROWS = 0.25
"""Share of a batch's answers that must be done before it goes on without them."""


@dataclass(frozen=True)
class Prompt:
    """A sample as tokens.

    Attributes:
        ids: all of them, the answer's prefix included.
        context_tokens: those that do not depend on the question: the first ones.
        dropped: tokens that were left out of the middle, because the prompt was too long.
    """

    ids: list[int]
    context_tokens: int
    dropped: int


@dataclass(frozen=True)
class Answer:
    """What one compression answered.

    Attributes:
        text: special tokens left out.
        token_ids: generated tokens, up to the one that ends the answer, which is included.
        prompt_tokens: tokens of the prompt that was compressed.
        kept: tokens kept of it, per full-attention layer, per head on average.
        kept_bytes: bytes of their keys and values, of this row alone.
        footprint: rows held in these layers summed over the generation, relative to the full
            cache's over the same steps.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    kept: list[float]
    kept_bytes: int
    footprint: float


def sample_ids(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Return a sample's tokens, its answer's prefix included, however many they are."""
    ids = _format(tokenizer, sample).encode(sample.question, sample.context)
    if sample.answer_prefix:
        prefix = tokenizer(sample.answer_prefix, add_special_tokens=False, verbose=False)
        ids += list(prefix["input_ids"])
    return ids


def _format(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> PromptFormat:
    return PromptFormat(tokenizer, sample.chat and tokenizer.chat_template is not None, "")


def encode_sample(tokenizer: PreTrainedTokenizerBase, sample: Sample, limit: int | None) -> Prompt:
    """Return a sample's tokens in the model's own chat template, if the task is put into one.

    Context and question are joined as they are, and the answer's prefix stands behind the template.

    A prompt that leaves no room for the answer loses tokens from its middle, as in LongBench: it is
    the tokens that are cut, not a text that is decoded and encoded again.

    Args:
        limit: the most tokens that prompt and answer may have together.

    Raises:
        PromptError: not even the question fits.
    """
    form = _format(tokenizer, sample)
    ids = sample_ids(tokenizer, sample)
    space = sample.question[: len(sample.question) - len(sample.question.lstrip())]
    fixed = common_prefix(ids, form.encode_context(sample.context + space))
    most = len(ids) if limit is None else limit - sample.max_new_tokens
    dropped = max(0, len(ids) - most)
    behind = len(ids) - fixed
    if dropped and most - most // 2 <= behind:
        raise PromptError(
            f"the question of sample {sample.index} of {sample.task} has {behind:,} tokens, which "
            f"leaves no room for its context in {most:,}; give a longer limit"
        )
    if dropped:
        first = most // 2
        ids = ids[:first] + ids[first + dropped :]
        fixed -= dropped
    return Prompt(ids, fixed, dropped)


def answer_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    compressions: Sequence[Compression],
    max_new_tokens: int,
    *,
    agnostic: bool = False,
) -> list[Answer]:
    """Answer from each of several compressions of a prompt, greedily.

    Args:
        prompt: see `encode_sample`.
        compressions: see `many.compress_many`. Those that evict go on as one batch, those whose
            heads compete as another, and so does the full cache, since its rows are much longer.
        max_new_tokens: where an answer ends at the latest.
        agnostic: compress the context before the question is known; else with the question in it.
    """
    groups = _groups(compressions)
    count = prompt.context_tokens if agnostic else len(prompt.ids)
    device = model.device
    ids = torch.tensor([prompt.ids], device=device)
    branched = compress_many(
        model, ids[:, :count], [[compressions[i] for i in group] for group in groups]
    )
    if not agnostic:
        ids = torch.cat([ids, branched.logits.argmax().view(1, 1)], dim=1)
    answers: dict[int, Answer] = {}
    for group, cache in zip(groups, branched.caches, strict=True):
        schedules = cache.schedules
        generated = _generate(
            model, tokenizer, cache, ids, len(group), len(prompt.ids), max_new_tokens
        )
        for index, tokens, kept in zip(group, generated, schedules, strict=True):
            text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            later = len(prompt.ids) - count
            share = _footprint(kept, count, later, len(tokens))
            size = _row_bytes(cache, kept)
            answers[index] = Answer(text, tokens, count, kept, size, share)
    return [answers[index] for index in range(len(compressions))]


def _groups(compressions: Sequence[Compression]) -> list[list[int]]:
    """Return which compressions go on together: those whose rows are alike."""
    full = [i for i, one in enumerate(compressions) if not one.method.evicts]
    alike: dict[str, list[int]] = {}
    for i, one in enumerate(compressions):
        if i not in full:
            alike.setdefault(competition(one), []).append(i)
    return [*alike.values(), full] if full else list(alike.values())


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: CompressedCache,
    ids: Tensor,
    rows: int,
    prompt_tokens: int,
    max_new_tokens: int,
) -> list[list[int]]:
    """Return the tokens that each row generates behind the prompt's, the one that ends it too.

    Rows that are done leave the batch from time to time, since each costs as long as it is there.
    """
    stops = set(stop_tokens(model, tokenizer) or [])
    begun = ids[0, prompt_tokens:].tolist()  # the first token, if the prompt gave it
    if max_new_tokens <= len(begun) or not stops.isdisjoint(begun):
        return [list(begun) for _ in range(rows)]
    whole, going_on, answers = ids.expand(rows, -1), list(range(rows)), {}
    while going_on:

        def enough(seen: Tensor, start: int = whole.shape[1]) -> bool:
            ended = sum(not stops.isdisjoint(row) for row in seen[:, start:].tolist())
            return ended >= DONE_ROWS * len(seen)

        more = prompt_tokens + max_new_tokens - whole.shape[1]
        new = decode(
            model, tokenizer, cache, whole, torch.ones_like(whole), None, more, 0.0, enough
        )
        whole = torch.cat([whole, new], dim=1)
        full = new.shape[1] == more
        left = []
        for place, (row, tokens) in enumerate(zip(going_on, new.tolist(), strict=True)):
            if full or not stops.isdisjoint(tokens):
                answers[row] = until_stop(whole[place, prompt_tokens:].tolist(), stops)
            else:
                left.append(place)
        going_on = [going_on[place] for place in left]
        if going_on:
            chosen = torch.tensor(left, device=ids.device)
            cache.reorder_cache(chosen)
            whole = whole[chosen]
    return [answers[row] for row in range(rows)]


def _row_bytes(cache: CompressedCache, kept: Sequence[float]) -> int:
    """Return the bytes of what a row keeps, read off the tensors' shapes and type."""
    layers = zip(cache.compressed_layers, kept, strict=True)
    return round(sum(layer.token_bytes * tokens for layer, tokens in layers))


def _footprint(kept: Sequence[float], prompt: int, later: int, generated: int) -> float:
    """Return rows held over the generation's steps, relative to those of the full cache.

    Step t of G holds what is kept of the prompt, `later` tokens that came behind it, and t - 1
    generated ones.
    """
    steps = max(1, generated)
    grown = later + (steps - 1) / 2
    mean = sum(kept) / len(kept)
    return (mean + grown) / (prompt + grown)
