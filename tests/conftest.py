"""Shared settings: few threads, offline, deterministic."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from hypothesis import settings

torch.set_num_threads(2)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci")
