"""The model runner of each vLLM in this process, whose batch the attention looks at."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

_runners: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def remember(vllm_config: Any, runner: Any) -> None:
    """Note whose batch belongs to a configuration."""
    _runners[id(vllm_config)] = weakref.ref(vllm_config), weakref.ref(runner)


def runner_of(vllm_config: Any) -> Any:
    """Return the runner that was noted for this very configuration.

    Raises:
        LookupError: there is none.
    """
    config, runner = _runners.get(id(vllm_config), (lambda: None, lambda: None))
    if config() is not vllm_config or runner() is None:
        raise LookupError("no model runner was noted for this configuration")
    return runner()


def rows_of(runner: Any, common: Any) -> tuple[list[int], list[int], list[int]]:
    """Return each row's prompt, tokens computed before this step, and tokens in it.

    All of it is on the host. With asynchronous scheduling and guessed tokens the host knows the
    computed tokens of decoding requests from above only (it takes every guess for right), which
    still tells that they are past their prompt; those of a prompt are exact.

    Args:
        runner: Model Runner V1 or V2.
        common: vLLM's `CommonAttentionMetadata`, whose rows may be padded for a CUDA graph.

    Returns:
        three lists of `common.num_reqs`; the prompt is 0 where a row is no request of this step
        (padding, and steps without requests that vLLM runs to warm up or to keep ranks together).
    """
    count = common.num_reqs
    new = [end - start for start, end in pairwise(common.query_start_loc_cpu[: count + 1].tolist())]
    lengths = common.seq_lens_cpu_upper_bound[:count].tolist()
    computed = [length - tokens for length, tokens in zip(lengths, new, strict=True)]
    prompts = _prompts(runner, common.req_idx, count)
    prefilling = common.is_prefilling.tolist()
    prompts = [
        0 if before < prompt and not ahead else prompt
        for prompt, before, ahead in zip(prompts, computed, prefilling, strict=False)
    ]
    return prompts + [0] * (count - len(prompts)), computed, new


def _prompts(runner: Any, slots: Sequence[int] | None, count: int) -> list[int]:
    """Return the tokens of the prompts of a batch's rows, without those that are padding."""
    states = getattr(runner, "req_states", None)
    if states is None:  # Model Runner V1: the rows of its batch are those of the step
        batch = runner.input_batch
        prompts: list[int] = batch.num_prompt_tokens_cpu_tensor[
            : min(count, batch.num_reqs)
        ].tolist()
        return prompts
    if slots is None:
        raise LookupError("Model Runner V2 did not tell which requests are in this step")
    known, lengths = states.index_to_req_id, states.prompt_len.np
    return [int(lengths[slot]) if int(slot) in known else 0 for slot in slots]
