"""PyramidKV and its relatives: compress a transformer's KV cache after the prompt, for real."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import AttentionError
    from .budgets import BudgetError
    from .cache import CompressedCache
    from .chat import Chat
    from .compression import Compression
    from .context import CompressedContext, compress_context
    from .deployment import Deployment, PlanError
    from .engine import compress
    from .errors import CacheStateError, ContextFileError, PromptError, PyramidKVError
    from .generation import Generation, generate
    from .methods import METHODS, Method, MethodError, get_method
    from .planning import plan_memory
    from .profiling import AttentionProfile, profile_attention
    from .schedule_profile import ProfileError, ScheduleProfile
    from .support import SUPPORTED_MODEL_TYPES, UnsupportedModelError

__version__ = version("pyramidkv")

# Loaded on first use, so that what needs no model starts without torch.
_HOMES = {
    "attention": ("AttentionError",),
    "budgets": ("BudgetError",),
    "cache": ("CompressedCache",),
    "chat": ("Chat",),
    "context": ("CompressedContext", "compress_context"),
    "deployment": ("Deployment", "PlanError"),
    "engine": ("compress",),
    "errors": ("CacheStateError", "ContextFileError", "PromptError", "PyramidKVError"),
    "generation": ("Generation", "generate"),
    "compression": ("Compression",),
    "methods": ("METHODS", "Method", "MethodError", "get_method"),
    "planning": ("plan_memory",),
    "profiling": ("AttentionProfile", "profile_attention"),
    "schedule_profile": ("ProfileError", "ScheduleProfile"),
    "support": ("SUPPORTED_MODEL_TYPES", "UnsupportedModelError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "METHODS",
    "SUPPORTED_MODEL_TYPES",
    "AttentionError",
    "AttentionProfile",
    "BudgetError",
    "CacheStateError",
    "Chat",
    "CompressedCache",
    "CompressedContext",
    "Compression",
    "ContextFileError",
    "Deployment",
    "Generation",
    "Method",
    "MethodError",
    "PlanError",
    "ProfileError",
    "PromptError",
    "PyramidKVError",
    "ScheduleProfile",
    "UnsupportedModelError",
    "__version__",
    "compress",
    "compress_context",
    "generate",
    "get_method",
    "plan_memory",
    "profile_attention",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module 'pyramidkv' has no attribute {name!r}")
