"""What cannot be served is refused at start-up, each in a sentence."""

from __future__ import annotations

from typing import Any

from .settings import KEY, ServingError, ServingSettings, read_settings


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
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return read_settings(given[KEY], layers)


def check_scheduler(vllm_config: Any, settings: ServingSettings) -> None:
    """Refuse limits under which a prompt's last window might never fit into a step.

    Raises:
        ServingError: see above.
    """
    scheduler = vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    needed = settings.window + (scheduler.max_num_seqs - 1) * (1 + drafts)
    if scheduler.max_num_batched_tokens < needed:
        raise ServingError(
            f"max_num_batched_tokens is {scheduler.max_num_batched_tokens}, but a window of "
            f"{settings.window} tokens beside {scheduler.max_num_seqs - 1} other requests takes up "
            f"to {needed}; raise it, or lower max_num_seqs"
        )
    threshold = scheduler.long_prefill_token_threshold
    if 0 < threshold < settings.window:
        raise ServingError(
            f"long_prefill_token_threshold is {threshold}, below the window of {settings.window} "
            "tokens, which are computed together; raise it"
        )
