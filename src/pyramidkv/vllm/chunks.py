"""Where a chunk of a prompt may end."""

from __future__ import annotations


def end_chunk(computed: int, new: int, prompt: int, window: int) -> int:
    """Return how many of the next tokens to compute in one step.

    The queries of the last `window` prompt tokens choose what is kept, so they are computed
    together; and the step ends with the prompt, since what follows (a request that was preempted
    has generated tokens already) is to see the compressed prompt.

    Args:
        computed: tokens computed so far.
        new: those that vLLM would compute next.
        prompt: tokens of the prompt.
        window: its last tokens that belong together.

    Returns:
        from 0 (wait for a step with more room) to `new`.
    """
    end = computed + new
    if computed >= prompt or end == prompt:
        return new
    if end > prompt:
        return prompt - computed
    return max(0, min(end, prompt - window) - computed)
