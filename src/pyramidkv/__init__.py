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
    from .checked_score import ScoreError
    from .compression import Compression
    from .context import CompressedContext, compress_context
    from .deployment import Deployment, PlanError
    from .engine import compress
    from .errors import CacheStateError, ContextFileError, PromptError, PyramidKVError
    from .generation import Generation, generate
    from .method_options import SELECTION_OPTIONS, MethodError, Options
    from .methods import METHODS, Method, get_method, register_method
    from .planning import plan_memory
    from .plugins import PluginError, load_plugin
    from .profiling import AttentionProfile, profile_attention
    from .schedule_profile import ProfileError, ScheduleProfile
    from .scores import AccumulatingScore, Score
    from .support import SUPPORTED_MODEL_TYPES, UnsupportedModelError

__version__ = version("pyramidkv")

# Loaded on first use, so that what needs no model starts without torch.
_HOMES = {
    "attention": ("AttentionError",),
    "budgets": ("BudgetError",),
    "cache": ("CompressedCache",),
    "chat": ("Chat",),
    "checked_score": ("ScoreError",),
    "context": ("CompressedContext", "compress_context"),
    "deployment": ("Deployment", "PlanError"),
    "engine": ("compress",),
    "errors": ("CacheStateError", "ContextFileError", "PromptError", "PyramidKVError"),
    "generation": ("Generation", "generate"),
    "compression": ("Compression",),
    "method_options": ("SELECTION_OPTIONS", "MethodError", "Options"),
    "methods": ("METHODS", "Method", "get_method", "register_method"),
    "planning": ("plan_memory",),
    "plugins": ("PluginError", "load_plugin"),
    "profiling": ("AttentionProfile", "profile_attention"),
    "schedule_profile": ("ProfileError", "ScheduleProfile"),
    "scores": ("AccumulatingScore", "Score"),
    "support": ("SUPPORTED_MODEL_TYPES", "UnsupportedModelError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "METHODS",
    "SELECTION_OPTIONS",
    "SUPPORTED_MODEL_TYPES",
    "AccumulatingScore",
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
    "Options",
    "PlanError",
    "PluginError",
    "ProfileError",
    "PromptError",
    "PyramidKVError",
    "ScheduleProfile",
    "Score",
    "ScoreError",
    "UnsupportedModelError",
    "__version__",
    "compress",
    "compress_context",
    "generate",
    "get_method",
    "load_plugin",
    "plan_memory",
    "profile_attention",
    "register_method",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module 'pyramidkv' has no attribute {name!r}")
