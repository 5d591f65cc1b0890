"""What a run is measured with: peak memory, versions, machine, and records on disk."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from . import records


class PeakMemory:
    """Peak memory since `start`, of the GPU's allocator or of this process.

    On the CPU it is the peak resident size, weights included; Linux lets it start anew, elsewhere
    it counts from the start of the process.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.kind = "cuda allocated" if device.type == "cuda" else "process resident"

    def start(self) -> None:
        """Count from now on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.kind = "process resident since its start"

    def bytes(self) -> int:
        """Return the peak so far."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Return the versions a result depends on."""
    return records.versions("torch", "transformers")


def machine(device: torch.device) -> dict[str, Any]:
    """Describe where a run took place."""
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
