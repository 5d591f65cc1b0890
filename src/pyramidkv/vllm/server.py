"""Start vLLM's OpenAI-compatible server such that `/metrics` has the counts of all its processes.

Scheduler and workers are not the process that answers HTTP, so their counts reach its page through
a folder, as prometheus_client has it for servers of several processes.
"""

from __future__ import annotations

import os
import runpy
import tempfile

SERVER = "vllm.entrypoints.openai.api_server"
FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def main() -> None:
    """Run vLLM's server with this process's arguments."""
    with tempfile.TemporaryDirectory(prefix="pyramidkv-metrics-") as folder:
        os.environ.setdefault(FOLDER, folder)  # read when prometheus_client is first imported
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
