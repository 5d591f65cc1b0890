"""What cannot be served is refused at start-up, each in a sentence."""

from __future__ import annotations

import inspect
from typing import Any

from .settings import (
    ASYNC_SCHEDULER,
    BACKEND,
    KEY,
    SCHEDULER,
    WORKERS,
    ServingError,
    ServingSettings,
    read_settings,
)

TESTED = ("0.32.0",)
"""Releases of vLLM that the plugin was tested with."""


def settings_of(vllm_config: Any) -> ServingSettings:
    """Return the plugin's settings for vLLM's configuration.

    Raises:
        ServingError: there are none, or they do not fit the model.
    """
    given = vllm_config.additional_config
    if not isinstance(given, dict) or not isinstance(given.get(KEY), dict):
        raise ServingError(
            f'the plugin has no settings; give --additional-config \'{{"{KEY}": '
            '{"budget": 256}}\', or start with pyramidkv serve'
        )
    return read_settings(given[KEY], len(full_layers(vllm_config)))


def full_layers(vllm_config: Any) -> list[int]:
    """Return the numbers of the layers that share the budget: those with full attention."""
    model = vllm_config.model_config
    count = model.get_total_num_hidden_layers()
    kinds = getattr(model.hf_text_config, "layer_types", None) or ["full_attention"] * count
    return [number for number, kind in enumerate(kinds) if kind == "full_attention"]


def check_config(vllm_config: Any, settings: ServingSettings) -> None:
    """Refuse a configuration of vLLM with which blocks cannot be freed or prompts not compressed.

    Raises:
        ServingError: see above.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    cache, model = vllm_config.cache_config, vllm_config.model_config
    on_gpu = runs_on_gpu(vllm_config)
    if parallel.worker_cls not in WORKERS.values() or scheduler.scheduler_cls not in (
        (SCHEDULER, ASYNC_SCHEDULER) if on_gpu else (SCHEDULER,)
    ):
        raise ServingError(
            "worker and scheduler of pyramidkv need each other; give both --worker-cls "
            f"{WORKERS['cuda' if on_gpu else 'cpu']} and --scheduler-cls {SCHEDULER}, or start "
            "with pyramidkv serve"
        )
    speculative = vllm_config.speculative_config
    guesses = None if speculative is None else speculative.method
    context = max(
        parallel.decode_context_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1)
    )
    reasons = {
        "context parallelism, which spreads a prompt's tokens": context > 1,
        "pipeline parallelism (not tried yet)": parallel.pipeline_parallel_size > 1,
        "a KV connector or KV offloading, which copy blocks by their position": (
            vllm_config.kv_transfer_config is not None
            or getattr(cache, "kv_offloading_size", None) is not None
        ),
        f"a quantised KV cache ({cache.cache_dtype})": cache.cache_dtype
        not in ("auto", "float32", "bfloat16", "float16"),
        "multi-head latent attention, whose cache has no keys and values per head": model.use_mla,
        f"guesses by {guesses!r}, whose own layers have a cache (ngram is supported)": (
            guesses not in (None, "ngram")
        ),
        "a disabled hybrid KV cache manager, which has one budget for all layers": (
            bool(scheduler.disable_hybrid_kv_cache_manager) and settings.groups > 1
        ),
    }
    reasons |= _reasons_on_gpus(vllm_config) if on_gpu else _reasons_on_cpus(vllm_config)
    for reason, given in reasons.items():
        if given:
            raise ServingError(f"pyramidkv cannot serve with {reason}")


def runs_on_gpu(vllm_config: Any) -> bool:
    """Return whether vLLM is to start our worker for GPUs."""
    return bool(vllm_config.parallel_config.worker_cls == WORKERS["cuda"])


def _reasons_on_cpus(vllm_config: Any) -> dict[str, bool]:
    return {
        "Model Runner V2 (set VLLM_USE_V2_MODEL_RUNNER=0)": vllm_config.use_v2_model_runner,
        "asynchronous scheduling (give --no-async-scheduling)": bool(
            vllm_config.scheduler_config.async_scheduling
        ),
    }


def _reasons_on_gpus(vllm_config: Any) -> dict[str, bool]:
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    attention, size = vllm_config.attention_config, vllm_config.cache_config.block_size
    ahead, drafts = bool(scheduler.async_scheduling), _drafts(vllm_config)
    return {
        "asynchronous scheduling by this scheduler (give --scheduler-cls "
        f"{ASYNC_SCHEDULER}, or --no-async-scheduling)": (
            ahead and scheduler.scheduler_cls != ASYNC_SCHEDULER
        ),
        f"this scheduler while asynchronous scheduling is off (give --scheduler-cls {SCHEDULER}, "
        "or pyramidkv serve --no-async-scheduling)": (
            not ahead and scheduler.scheduler_cls != SCHEDULER
        ),
        f"another attention backend than its own (give --attention-backend {BACKEND})": (
            getattr(attention.backend, "name", None) != BACKEND
        ),
        "microbatches (--enable-dbo, --ubatch-size), which divide a batch's rows": (
            vllm_config.parallel_config.use_ubatching
        ),
        "attention to later tokens (use_non_causal)": attention.use_non_causal,
        "models that attend to a whole image at once, by its position": model.is_mm_prefix_lm,
        "a window that counts from the prompt's end (R-SWA)": model.rswa_window is not None,
        f"{drafts} guessed tokens for blocks of {size}; guess fewer than a block has": (
            drafts >= size
        ),
        "guesses by Model Runner V2, not tried yet (set VLLM_USE_V2_MODEL_RUNNER=0)": (
            drafts > 0 and vllm_config.use_v2_model_runner
        ),
    }


def _drafts(vllm_config: Any) -> int:
    """Return how many tokens are guessed ahead."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def last_tokens(vllm_config: Any, settings: ServingSettings) -> int:
    """Return how many of a prompt's last tokens are computed in one step, at least.

    The window; on GPUs also more than any decoding request has in a step, since a batch in which
    all have as many may be the replay of a CUDA graph, which compresses nothing.
    """
    decoding = 1 + _drafts(vllm_config)
    return max(settings.window, 1 + decoding if runs_on_gpu(vllm_config) else 0)


def check_scheduler(vllm_config: Any, settings: ServingSettings) -> None:
    """Refuse limits under which a prompt's last window might never fit into a step.

    Raises:
        ServingError: see above.
    """
    scheduler = vllm_config.scheduler_config
    window = last_tokens(vllm_config, settings)
    needed = window + (scheduler.max_num_seqs - 1) * (1 + _drafts(vllm_config))
    if scheduler.max_num_batched_tokens < needed:
        raise ServingError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but a window of "
            f"{window} tokens beside {scheduler.max_num_seqs - 1} other requests takes up "
            f"to {needed}; raise it, or lower max_num_seqs"
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < window:
        raise ServingError(
            f"long_prefill_token_threshold is {threshold}, below the window of {window} "
            "tokens, which are computed together; raise it"
        )


def check_hook(owner: Any, name: str, *parameters: str) -> None:
    """Refuse a release of vLLM in which a method that the plugin builds on is another one.

    Args:
        owner: a class or module.
        name: of its function.
        parameters: the names it must take, in this order, without `self` and `cls`.

    Raises:
        ServingError: it tells the release found and those tested.
    """
    found = getattr(owner, name, None)
    names = [] if found is None else list(inspect.signature(found).parameters)
    if names[:1] in (["self"], ["cls"]):
        names = names[1:]
    if found is None or tuple(names[: len(parameters)]) != parameters:
        import vllm

        raise ServingError(
            f"vLLM {vllm.__version__} is not supported: {owner.__name__}.{name} is not what "
            f"pyramidkv builds on; tested with vLLM {', '.join(TESTED)}"
        )
