"""One document, many questions: a context is compressed once and answers from there."""

from __future__ import annotations

import copy
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .cache import CompressedCache
from .errors import CacheStateError, PromptError
from .generation import (
    Generation,
    MeasuringStream,
    decode,
    describe_run,
    measure_cache,
    plan_pieces,
    process,
    stop_tokens,
    until_stop,
)
from .methods import Method
from .prompts import (
    PromptFormat,
    Turn,
    check_length,
    check_settings,
    check_text,
    context_length,
)
from .support import check_model

if TYPE_CHECKING:
    from .chat import Chat


def compress_context(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    method: str | Method = "pyramidkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    *,
    question: str | None = None,
    prefill_chunk: int | None = None,
    decode_budget: int | None = None,
    decode_interval: int | None = None,
    chat: bool | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    **options: Any,
) -> CompressedContext:
    """Process a text once and keep its compressed cache, for any number of questions.

    Args:
        model, tokenizer: from transformers.
        text: the document. With `chat` it begins the first message (default: if there is a chat
            template), so that context and question together are the tokens of a normal
            conversation.
        method, budget, compression_ratio, decode_budget, decode_interval, options: see
            `CompressedCache`. The budget counts tokens of the document.
        question: query-aware compression: the document is followed by this question, whose
            tokens vote on what is kept and are then dropped. Without one, the document's own end
            votes.
        prefill_chunk: process the document in pieces of this many tokens.
        on_layer: called with (layers done, layers) while the document is processed.

    Raises:
        PyramidKVError: the text, the method or the model does not fit.
    """
    check_model(model)
    check_text(text, "context")
    form = PromptFormat.choose(tokenizer, chat)
    ids = form.encode_context(text)
    length = len(ids)
    if not length:
        raise PromptError(
            "the chat template puts nothing of the context before the question; use chat=False"
        )
    if question is not None:
        question = _checked(question)
        ids = _beginning_with(ids, form.encode(question, text))
    check_length(len(ids), context_length(model.config), 1)
    own_implementation = model.config._attn_implementation
    cache = CompressedCache(
        model,
        method,
        budget,
        compression_ratio,
        decode_budget=decode_budget,
        decode_interval=decode_interval,
        on_layer=on_layer,
        **options,
    )
    voting = len(ids) - length
    pieces = plan_pieces(len(ids), prefill_chunk, cache.compression, voting)
    prompt = torch.tensor([ids], device=model.device)
    mask = torch.ones_like(prompt)
    started = time.perf_counter()
    cache.expect_prompt(mask, voting)
    process(model, cache, prompt, mask, pieces)
    cache.end_prompt()
    record = {
        **describe_run(model, cache, own_implementation),
        "context_tokens": length,
        "question": question,
        "prefill_chunk": prefill_chunk,
        "chat": form.chat,
        "prompt_seconds": time.perf_counter() - started,
        **measure_cache(cache),
    }
    return CompressedContext(model, form, cache, text, ids[:length], record)


@dataclass(eq=False)
class CompressedContext:
    """A document's compressed cache. Every question starts from it and leaves it untouched.

    Make one with `compress_context` or `CompressedContext.load`.

    Attributes:
        model: the model it was made with.
        form: how texts become tokens.
        cache: the compressed cache; copies of it are generated from.
        text: the document.
        token_ids: the tokens the cache has seen: those all conversations about it begin with.
        record: how it was made and what it holds; plain values, ready for JSON.
        turns: a conversation that `chat` goes on with, if one was saved.
    """

    model: PreTrainedModel
    form: PromptFormat
    cache: CompressedCache
    text: str
    token_ids: list[int]
    record: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Generation:
        """Answer one question.

        Args:
            question: the user's text.
            max_new_tokens: where to stop at the latest.
            temperature: 0 decodes greedily; above 0 samples.
            on_text: called with each piece of text as it is produced.
            stop: asked after each token; True ends the answer.

        Raises:
            PromptError: the question is empty or too long.
        """
        started = time.perf_counter()
        check_settings(max_new_tokens, temperature)
        ids = self.encode(question, [], max_new_tokens)
        cache = self.fork()
        return answer(self, cache, ids, max_new_tokens, temperature, on_text, stop, started)

    def stream(self, question: str, **settings: Any) -> Iterator[str]:
        """Answer one question and yield its text as it is produced; see `ask` for settings.

        Closing the iterator ends the answer.
        """
        return stream(self.ask, question, **settings)

    def ask_batch(
        self, questions: Sequence[str], *, max_new_tokens: int = 128, temperature: float = 0.0
    ) -> list[Generation]:
        """Answer several questions at once, as rows of one batch; each as by `ask`.

        With a decode budget, and on models with layers that are no full attention, only questions
        of equal length are taken together: padding between context and question would count there.
        """
        check_settings(max_new_tokens, temperature)
        if isinstance(questions, str):
            raise PromptError("ask_batch takes a list of questions; a single text was given")
        questions = list(questions)
        encoded = [self.encode(question, [], max_new_tokens) for question in questions]
        only_full = len(self.cache.compressed_layers) == len(self.cache.layers)
        any_length = only_full and self.cache.compression.decode_budget is None
        groups: dict[int, list[int]] = {}
        for index, ids in enumerate(encoded):
            groups.setdefault(0 if any_length else len(ids), []).append(index)
        answers: dict[int, Generation] = {}
        for members in groups.values():
            rows = [encoded[index] for index in members]
            results = self._answer_rows(rows, max_new_tokens, temperature)
            answers.update(zip(members, results, strict=True))
        return [answers[index] for index in range(len(questions))]

    def chat(self) -> Chat:
        """Begin a conversation about the document that keeps its turns."""
        from .chat import Chat

        return Chat(self)

    def save(self, path: str | Path, turns: Sequence[Turn] | None = None) -> None:
        """Write the context to one safetensors file, whole or not at all.

        Args:
            path: replaced if it exists.
            turns: a conversation to keep with it; by default the one it was loaded with.

        Raises:
            ContextFileError: it cannot be written, or its method is not one of the registry's.
            CacheStateError: the model has layers that cannot be saved.
        """
        from .context_file import save

        save(self, Path(path), self.turns if turns is None else list(turns))

    @classmethod
    def load(
        cls, path: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
    ) -> CompressedContext:
        """Read a context that was saved; memory is mapped and no prompt is processed.

        Raises:
            ContextFileError: the file is damaged, none of ours, of a newer version, or was made
                with another model or tokenizer.
        """
        from .context_file import load

        return load(Path(path), model, tokenizer)

    @property
    def tokens_seen(self) -> int:
        """Tokens of the document, with what the chat template puts before it."""
        return len(self.token_ids)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return self.cache.kv_bytes

    def fork(self) -> CompressedCache:
        """Return a copy of the cache to generate from.

        Raises:
            CacheStateError: the context's own cache was generated from.
        """
        if self.cache.tokens_seen != self.tokens_seen:
            raise CacheStateError(
                "the context's own cache was used directly, so it no longer holds the document "
                "alone; make or load the context again, and generate from context.fork()"
            )
        return copy.deepcopy(self.cache)

    def encode(self, question: str, turns: Sequence[Turn], max_new_tokens: int) -> list[int]:
        """Return the tokens of a conversation about the document that ends with a question.

        Raises:
            PromptError: the question is empty, or all of it is too long for the model.
        """
        whole = self.form.encode(_checked(question), self.text, turns)
        ids = _beginning_with(self.token_ids, whole)
        check_length(len(ids), context_length(self.model.config), max_new_tokens)
        return ids

    def _answer_rows(
        self, rows: list[list[int]], max_new_tokens: int, temperature: float
    ) -> list[Generation]:
        seen, longest = self.tokens_seen, max(len(ids) for ids in rows)
        tokenizer = self.form.tokenizer
        fill = self.token_ids[0]  # masked
        padded = [ids[:seen] + [fill] * (longest - len(ids)) + ids[seen:] for ids in rows]
        mask = torch.ones((len(rows), longest), dtype=torch.long)
        for row, ids in enumerate(rows):
            mask[row, seen : seen + longest - len(ids)] = 0
        device = self.model.device
        cache = self.fork()
        cache.batch_repeat_interleave(len(rows))
        started = time.perf_counter()
        new = decode(
            self.model,
            tokenizer,
            cache,
            torch.tensor(padded, device=device),
            mask.to(device),
            None,
            max_new_tokens,
            temperature,
        )
        seconds = time.perf_counter() - started
        stops = stop_tokens(self.model, tokenizer) or []
        results = []
        for row, ids in enumerate(rows):
            own = until_stop(new[row].tolist(), stops)
            facts = {"batch": len(rows), "batch_seconds": seconds, "kv_bytes": cache.kv_bytes}
            results.append(_generation(self, len(ids), own, max_new_tokens, temperature, facts))
        return results


def answer(
    context: CompressedContext,
    cache: CompressedCache,
    ids: list[int],
    max_new_tokens: int,
    temperature: float,
    on_text: Callable[[str], None] | None,
    stop: Callable[[], bool] | None,
    started: float,
) -> Generation:
    """Generate from a cache that has seen the first of `ids`, and go on with that cache.

    Times count from `started`, of `time.perf_counter`.
    """
    tokenizer = context.form.tokenizer
    measuring = MeasuringStream(tokenizer, cache, on_text, started)
    prompt = torch.tensor([ids], device=context.model.device)
    new: Tensor = decode(
        context.model,
        tokenizer,
        cache,
        prompt,
        torch.ones_like(prompt),
        measuring,
        max_new_tokens,
        temperature,
        None if stop is None else lambda ids: stop(),
    )
    facts = {**measuring.times(), "kv_bytes": cache.kv_bytes}
    return _generation(context, len(ids), new[0].tolist(), max_new_tokens, temperature, facts)


def stream(ask: Callable[..., Generation], question: str, **settings: Any) -> Iterator[str]:
    """Yield the text of an answer while `ask` produces it in a thread of its own."""
    pieces: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
    closed = threading.Event()
    asked = settings.pop("stop", None)

    def stopped() -> bool:
        return closed.is_set() or (asked is not None and asked())

    def produce() -> None:
        try:
            ask(question, on_text=pieces.put, stop=stopped, **settings)
            pieces.put(None)
        except BaseException as error:
            pieces.put(error)

    def consume() -> Iterator[str]:
        thread = threading.Thread(target=produce, daemon=True)
        thread.start()
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            closed.set()
            thread.join()

    return consume()


def _generation(
    context: CompressedContext,
    prompt_tokens: int,
    new_ids: list[int],
    max_new_tokens: int,
    temperature: float,
    facts: dict[str, Any],
) -> Generation:
    text: str = context.form.tokenizer.decode(  # type: ignore[assignment]
        new_ids, skip_special_tokens=True
    )
    record = {
        "prompt_tokens": prompt_tokens,
        "question_tokens": prompt_tokens - context.tokens_seen,
        "generated_tokens": len(new_ids),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        **facts,
        "token_ids": new_ids,
        "text": text,
    }
    return Generation(text, new_ids, record)


def _checked(question: str) -> str:
    check_text(question, "question")
    return question.strip()


def _beginning_with(context_ids: list[int], ids: list[int]) -> list[int]:
    if ids[: len(context_ids)] != context_ids:
        raise PromptError(
            "the tokenizer merges the beginning of this question with the end of the context; "
            "begin the question with a letter"
        )
    return ids
