"""A conversation about one document, on a copy of its compressed cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .context import answer, stream
from .errors import CacheStateError
from .prompts import Turn, check_settings, common_prefix

if TYPE_CHECKING:
    from .cache import CompressedCache
    from .context import CompressedContext
    from .generation import Generation


class Chat:
    """A conversation: every question sees the document and all turns before it.

    Its tokens are those of a normal conversation: if a template writes an answer otherwise than
    the model produced it, the cache goes back to where they part.

    Attributes:
        context: the document; it stays as it is.
        turns: questions and answers so far.
    """

    def __init__(self, context: CompressedContext):
        self.context = context
        self.turns: list[Turn] = list(context.turns)
        self._cache: CompressedCache | None = None
        self._seen: list[int] = []  # the tokens the cache has seen
        self._answering = threading.Lock()

    def ask(
        self,
        question: str,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Generation:
        """Answer the next question and keep the turn; see `CompressedContext.ask`.

        If the answer fails, the conversation is as it was before.

        Raises:
            PromptError: the question is empty or too long.
            CacheStateError: another answer of this conversation is under way.
        """
        if not self._answering.acquire(blocking=False):
            raise CacheStateError("this chat is answering already; wait, or use a chat of its own")
        try:
            return self._ask(question, max_new_tokens, temperature, on_text, stop)
        finally:
            self._answering.release()

    def _ask(
        self,
        question: str,
        max_new_tokens: int,
        temperature: float,
        on_text: Callable[[str], None] | None,
        stop: Callable[[], bool] | None,
    ) -> Generation:
        started = time.perf_counter()
        check_settings(max_new_tokens, temperature)
        ids = self.context.encode(question, self.turns, max_new_tokens)
        cache = self._continued(ids)
        self._cache = None  # unless all goes well, the next question starts from the document
        result = answer(
            self.context, cache, ids, max_new_tokens, temperature, on_text, stop, started
        )
        self._seen = (ids + result.token_ids)[: cache.tokens_seen]
        self._cache = cache
        self.turns.append(Turn(question.strip(), result.text))
        return result

    def stream(self, question: str, **settings: Any) -> Iterator[str]:
        """Answer the next question and yield its text as it is produced.

        Closing the iterator ends the answer; what was produced is kept as the turn's.
        """
        return stream(self.ask, question, **settings)

    def reset(self) -> None:
        """Forget the turns; the document stays."""
        self.turns, self._cache, self._seen = [], None, []

    def save(self, path: str | Path) -> None:
        """Write the document's compressed cache together with the conversation so far."""
        self.context.save(path, self.turns)

    @property
    def cache(self) -> CompressedCache:
        """The conversation's cache; the document's own before the first answer."""
        return self.context.cache if self._cache is None else self._cache

    def _continued(self, ids: list[int]) -> CompressedCache:
        """Return a cache that has seen a beginning of `ids`, the longest that can be had."""
        if self._cache is not None:
            common = min(common_prefix(self._seen, ids), len(ids) - 1)
            try:
                if common < len(self._seen):
                    self._cache.crop(common - len(self._seen))
                return self._cache
            except CacheStateError:  # evicted or dropped tokens cannot come back
                pass
        return self.context.fork()
