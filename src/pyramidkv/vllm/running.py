"""The model runner of each vLLM in this process, whose batch the attention looks at."""

from __future__ import annotations

import weakref
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
