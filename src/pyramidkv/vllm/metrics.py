"""What is counted on vLLM's own `/metrics`.

The scheduler counts prompts and blocks, one worker of each engine the seconds. They are processes
of their own: see `server` for how the page comes to know of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Counter
from vllm.distributed import get_tensor_model_parallel_rank

PROMPT_TOKENS = Counter(
    "pyramidkv:prompt_tokens", "Prompt tokens that were processed to their prompt's end."
)
KEPT_TOKENS = Counter(
    "pyramidkv:kept_prompt_tokens", "Tokens kept of these prompts, averaged over the layers."
)
FREED_BLOCKS = Counter("pyramidkv:freed_blocks", "Cache blocks freed at the end of prompts.")
COMPACTION_SECONDS = Counter(
    "pyramidkv:compaction_seconds", "Seconds spent choosing and moving the tokens that are kept."
)


def count_prompt(tokens: int, kept: list[int], freed: int) -> None:
    """Count a prompt that is complete.

    Args:
        tokens: of the prompt.
        kept: of it, by each group of layers.
        freed: blocks, of all groups.
    """
    PROMPT_TOKENS.inc(tokens)
    KEPT_TOKENS.inc(sum(kept) / len(kept))
    FREED_BLOCKS.inc(freed)


@contextmanager
def counting_seconds() -> Iterator[None]:
    """Count the time spent inside, once for all ranks that work side by side."""
    start = time.perf_counter()
    yield
    if get_tensor_model_parallel_rank() == 0:
        COMPACTION_SECONDS.inc(time.perf_counter() - start)
